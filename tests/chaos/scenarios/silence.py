"""Networks that are slow or silent, and workers that freeze."""

import signal
import time
from collections import Counter
from itertools import cycle
from secrets import token_hex

from tests.chaos.cable import Cable
from tests.chaos.site import Site, fault, percentile, site
from tests.chaos.verdict import Verdict
from tests.worker.processes import LEASE, wait


@fault(
    "C4",
    "workers freeze past their lease after they have called a provider that honours keys",
    invariant="one effect a job, one key for all its calls",
)
def zombies_call_outside(verdict: Verdict, small: bool) -> None:
    jobs = 24 if small else 120
    with site() as at:
        first = at.worker("zombie", threads=8)
        at.db.add_many("call", [{"key": f"k{n}", "after": 0.8} for n in range(jobs)])
        second = None
        froze = 0
        while live(at):
            wait(lambda: live(at, "running") or not live(at))
            first.signal(signal.SIGSTOP)
            froze += 1
            second = second or at.worker("healthy", threads=8, ready=False)
            time.sleep(LEASE * 2)
            first.signal(signal.SIGCONT)
            time.sleep(0.3)
        calls = at.sink.all("calls")
        effects = at.sink.all("effects")
        time.sleep(1)
        keys = {line.split()[0]: line.split()[1] for line in calls}
        verdict.n = jobs
        verdict.faults = {"freezes": froze}
        verdict.lost = jobs - len({line.split()[0] for line in effects})
        verdict.duplicated = sum(n > 1 for n in Counter(line.split()[0] for line in effects).values())
        # A job that three workers froze with is taken for the cause.
        ends = at.db.rows("SELECT status::text, reason FROM pgqueue.jobs")
        ends = Counter(row["reason"] or row["status"] for row in ends)
        verdict.expect(set(ends) <= {"completed", "poison"}, f"they ended as {dict(ends)}")
        verdict.expect(len({tuple(line.split()[:2]) for line in calls}) == jobs, "a job's calls had two keys")
        verdict.expect(len(set(keys.values())) == jobs, "two jobs had one key")
        fenced = at.events("job.lease_lost")
        verdict.expect(fenced > 0, "no zombie was fenced: nothing was tried")
        verdict.figures |= {"calls": len(calls), "replays": len(calls) - len(effects), "fenced": fenced, **ends}


def live(at: Site, status: str = "%") -> int:
    count: int = at.db.value("SELECT count(*) FROM pgqueue.jobs_live WHERE status::text LIKE %s", status)
    return count


def done(at: Site, ids: list[int]) -> bool:
    return at.db.statuses(ids) == {"completed": len(ids)}


@fault(
    "C10",
    "jobs of ten leases; every second heartbeat vanishes, then three in a row",
    invariant="no live worker's job is rescued",
)
def heartbeats_vanish(verdict: Verdict, small: bool) -> None:
    # The lease is not that short: reconnecting on a busy machine takes its time, too.
    lease = 6.0
    settings = {"PGQUEUE_LEASE_TIMEOUT": f"{lease}", "PGQUEUE_HEARTBEAT_INTERVAL": "2"}
    seconds = lease * (2 if small else 10)
    with site() as at, Cable(at.server.dsn).running() as cable:
        at.worker("long", dsn=cable.dsn, threads=50, env=settings)
        at.worker("vulture", env=settings)
        gaps = [0.0]
        fates = cycle(["pass", "vanish", "pass", "vanish", "pass", "vanish", "vanish", "vanish"])
        vanished = []

        def swallows(name: str, sent: bytes) -> bool:
            if not name.startswith("pgqueue-heartbeat") or b"pgqueue.workers" not in sent or next(fates) == "pass":
                return False
            vanished.append(time.monotonic())
            return True

        cable.swallows = swallows
        ids = at.db.add_many("write", [{"key": f"k{n}", "seconds": seconds} for n in range(50)], queue="default")
        wait(lambda: at.db.statuses(ids).get("running", 0) + at.db.statuses(ids).get("completed", 0) == 50)
        ends = time.monotonic() + seconds + 30
        while not done(at, ids) and time.monotonic() < ends:
            gap = at.db.value(
                "SELECT extract(epoch FROM clock_timestamp() - heartbeat_at)::float FROM pgqueue.workers"
                " WHERE name = 'long'"
            )
            gaps.append(gap)
            time.sleep(0.05)
        verdict.n = 50
        verdict.faults = {"heartbeats vanished": len(vanished)}
        rescued = at.events("jobs.rescued")
        verdict.expect(done(at, ids), f"not completed: {at.db.statuses(ids)}")
        verdict.expect(rescued == 0, f"{rescued} rescues of a worker that lives")
        verdict.duplicated = sum(n > 1 for n in at.db.how_often().values())
        verdict.figures |= {"lease": lease, "longest_gap": round(max(gaps), 2), "rescues": rescued}


@fault(
    "C15",
    "the listener's connection falls silent, without a word",
    invariant="noticed within 15 s, polling meanwhile, woken again after",
)
def listener_goes_deaf(verdict: Verdict, small: bool) -> None:
    with site() as at, Cable(at.server.dsn).running() as cable:
        at.worker("w", env={"PGQUEUE_LISTEN_URL": cable.dsn, "PGQUEUE_POLL_INTERVAL": "1"})
        before = pick_ups(at, 20)
        cable.dead, fell = True, time.monotonic()
        during: list[float] = []
        while at.db.worker("w")["listening"] and time.monotonic() < fell + 60:  # type: ignore[index]
            during += pick_ups(at, 1)
        detected = time.monotonic() - fell
        during += pick_ups(at, 5)
        cable.dead, back = False, time.monotonic()
        wait(lambda: at.db.is_idle("w"), "it listens again", 60)
        again = time.monotonic() - back
        after = pick_ups(at, 20)
        verdict.n = len(before) + len(during) + len(after)
        verdict.faults = {"silences": 1}
        verdict.recovery = [detected]
        verdict.expect(detected < 17, f"noticed only after {detected:.1f} s")
        verdict.expect(max(during) < 2.5, f"polling, a job waited for {max(during):.1f} s")
        verdict.expect(percentile(after, 0.5) < 0.3, f"it is not woken: {percentile(after, 0.5):.2f} s")
        verdict.figures |= {
            "listens_again_after": round(again, 1),
            "pickup_p50_before_during_after": [round(percentile(each, 0.5), 3) for each in (before, during, after)],
            "pickup_max_during": round(max(during), 3),
        }


def pick_ups(at: Site, jobs: int) -> list[float]:
    """How long single jobs waited for an idle worker."""
    waits = []
    for _ in range(jobs):
        time.sleep(0.1)
        id = at.db.add("nothing")
        job = at.db.wait_for(id, "completed")
        waits.append((job["started_at"] - job["created_at"]).total_seconds())
    return waits


@fault(
    "C19",
    "every answer of PostgreSQL takes 100 ms longer; then the line is narrow as well, 1 Mbit/s for payloads of 4 KB",
    invariant="no lease lost; few round trips a job, and few bytes besides the payload",
)
def far_away(verdict: Verdict, small: bool) -> None:
    jobs = 1000 if small else 5000
    loads = {
        "nothing": ("nothing", None, [{}] * jobs),
        "write": ("write", None, [{"key": "k"}] * (jobs // 10)),
        # It comes with the claim, and goes back with the effect.
        "narrow": ("write", NARROW, [{"key": token_hex(PAYLOAD // 2)} for _ in range(jobs // 10)]),
    }
    with site() as at, Cable(at.server.dsn).running() as cable:
        at.worker("far", dsn=cable.dsn, threads=32)
        cable.delay = 0.05
        rates = {}
        for name, (type, cable.rate, payloads) in loads.items():
            cable.trips = cable.bytes = 0
            started = time.monotonic()
            ids = at.db.add_many(type, payloads)
            at.db.wait_for_all(ids, "completed", 300)
            number = len(payloads)
            rates[name] = {
                "jobs_per_s": round(number / (time.monotonic() - started)),
                "round_trips_per_job": round(cable.trips / number, 2),
                "bytes_per_job": round(cable.bytes / number),
            }
            verdict.n += number
        lost = at.events("job.lease_lost") + at.events("jobs.rescued")
        verdict.expect(lost == 0, f"{lost} leases lost")
        verdict.expect(rates["nothing"]["round_trips_per_job"] <= 2, "more than two round trips a job")
        spare = rates["narrow"]["bytes_per_job"] - 2 * PAYLOAD
        verdict.expect(spare < PAYLOAD, f"{spare} bytes a job besides its payload, there and back")
        verdict.lost = verdict.n - at.db.statuses().get("completed", 0)
        verdict.duplicated = sum(n > 1 for n in at.db.how_often().values())
        verdict.figures |= {"leases_lost": lost, **rates}


NARROW, PAYLOAD = 125_000, 4096
