"""Numbers at their ends, retries that come together, clocks that jump."""

import math
import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import psycopg

from pgqueue.outcome import Retry
from tests.chaos.site import Site, fault, site, tool
from tests.chaos.stalls import Stalls
from tests.chaos.verdict import Verdict
from tests.worker.processes import LEASE, RESCUE, WorkerProcess, wait

CALM = {"PGQUEUE_LEASE_TIMEOUT": "6", "PGQUEUE_HEARTBEAT_INTERVAL": "1"}
"""A busy machine must not be taken for a clock."""
INT, BIGINT = 2**31 - 1, 2**63 - 1


@fault(
    "C27",
    "sequences just below 2^31 and 2^63, attempts and losses at their limits",
    invariant="2^31 is not noticed; at 2^63 a clean error; no number stops the neighbours",
)
def numbers_run_out(verdict: Verdict, small: bool) -> None:
    with site() as at:
        verdict.expect(not small_sequences(at), f"sequences that are too small: {small_sequences(at)}")
        set_sequences(at, INT - 1)
        at.worker("w")
        ids = at.db.add_many("write", [{"key": f"k{n}"} for n in range(100)])
        at.db.wait_for_all(ids, "completed")
        verdict.expect(min(ids) >= INT - 1 and max(ids) > INT, "the ids did not pass 2^31")
        operate(at, verdict)
        hostile = at.db.add_many("write", [{"key": f"hostile {n}"} for n in range(3)], run_at="2100-01-01")
        for id, column in zip(hostile, ("attempt", "lost", "max_attempts"), strict=True):
            at.db.run(f"UPDATE pgqueue.jobs_live SET {column} = {INT} WHERE id = {id}")
            at.db.run("SELECT pgqueue.retry_job(%s)", id)
        neighbours = at.db.add_many("write", [{"key": f"n{n}"} for n in range(100)])
        at.db.wait_for_all(neighbours, "completed", 30)
        at.db.wait_for_all(hostile[1:], "completed")
        # The third can only be set right by who set it wrong.
        at.db.run("UPDATE pgqueue.jobs_live SET attempt = 0 WHERE id = %s", hostile[0])
        at.db.wait_for(hostile[0], "completed")
        at.worker("leaves").stop()
        set_sequences(at, BIGINT - 1)
        last = at.db.add("write", {"key": "last"})
        told = ""
        try:
            at.db.add("write", {"key": "one too many"})
        except psycopg.errors.SequenceGeneratorLimitExceeded as error:
            told = str(error.diag.message_primary)
        at.db.wait_for(last, "completed")
        verdict.expect("reached maximum value" in told, "no error at 2^63")
        verdict.expect(last == BIGINT, f"the last id is {last}")
        verdict.n = len(ids) + len(neighbours) + len(hostile) + 5
        verdict.duplicated = sum(n > 1 for n in at.db.how_often().values())
        verdict.figures |= {"statuses": at.db.statuses(), "at 2^63": told}


def small_sequences(at: Site) -> list[str]:
    """Those that would end at 2^31, were it only by inserts that are duplicates."""
    return at.db.values("SELECT sequencename FROM pg_sequences WHERE schemaname = 'pgqueue' AND max_value < %s", BIGINT)


def set_sequences(at: Site, value: int) -> None:
    names = at.db.values(
        "SELECT c.oid::regclass::text FROM pg_class c WHERE relkind = 'S' AND relnamespace = 'pgqueue'::regnamespace"
    )
    for name in names:
        at.db.run(f"SELECT setval('{name}', {value})")


def operate(at: Site, verdict: Verdict) -> None:
    """What operators do, to a job with a large id."""
    id = at.db.add("write", {"key": "operated"}, run_at="2100-01-01")
    at.db.run("SELECT pgqueue.edit_job(%s, '{\"priority\": 9}')", id)
    at.db.run("SELECT pgqueue.cancel_job(%s)", id)
    at.db.run("SELECT pgqueue.retry_job(%s)", id)
    at.db.wait_for(id, "completed")
    verdict.expect(
        at.db.value("SELECT count(*) FROM pgqueue.audit WHERE id > %s", INT) > 0, "the audit did not pass 2^31"
    )


# The delay that is stored, by the clock and the statement that stored it.
PLANNED = """
CREATE TABLE public.planned (attempt int, failed_at timestamptz, run_at timestamptz);
CREATE FUNCTION public.plan() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO public.planned VALUES (NEW.attempt, statement_timestamp(), NEW.run_at);
    RETURN NULL;
END $$;
CREATE TRIGGER plan AFTER UPDATE ON pgqueue.jobs_live FOR EACH ROW
    WHEN (OLD.status = 'running' AND NEW.status = 'scheduled') EXECUTE FUNCTION public.plan();
"""


@fault(
    "C28",
    "what thousands of jobs depend on is down for a minute, then healthy",
    invariant="retries are spread as their jitter says, and come no faster than what they retry; all is drained soon",
)
def dependency_is_down(verdict: Verdict, small: bool) -> None:
    jobs, seconds = (1000, 6.0) if small else (10_000, 60.0)
    with site() as at:
        down = at.sink.folder / "down"
        down.touch()
        at.db.run(PLANNED)
        at.worker("w", threads=16)
        far = far_attempts(at, verdict)
        began = time.monotonic()
        insert = "INSERT INTO pgqueue.jobs (type, max_attempts) SELECT 'depend', 100 FROM generate_series(1, %s)"
        at.db.run(insert, jobs)
        time.sleep(seconds)
        down.unlink()
        up = time.monotonic()
        wait(lambda: at.db.value("SELECT count(*) FROM pgqueue.jobs_live") == 0, "drained", 150)
        drained = time.monotonic() - up
        verdict.n = jobs + far
        verdict.lost = jobs - at.db.statuses().get("completed", 0)
        cap = Retry().cap
        verdict.expect(drained < 2 * cap, f"drained only after {drained:.0f} s")
        spread_as_promised(at, verdict)
        verdict.figures |= {"drained_s": round(drained, 1), "outage_s": round(up - began, 1)}


def spread_as_promised(at: Site, verdict: Verdict) -> None:
    """Of every attempt that was tried again: its delay is the shortest one and an even jitter, and of the next attempts
    no more fall into any second than of the failures that caused them."""
    retry, peaks, distances = Retry(), [], []
    query = "SELECT extract(epoch FROM failed_at)::float AS failed, extract(epoch FROM run_at)::float AS due, attempt"
    rows = at.db.rows(f"{query} FROM public.planned WHERE attempt < 100 ORDER BY failed_at")
    for attempt in sorted({row["attempt"] for row in rows}):
        some = [row for row in rows if row["attempt"] == attempt]
        jitters = [row["due"] - row["failed"] - shortest(retry, attempt) for row in some]
        verdict.expect(min(jitters) > -0.001, f"retry {attempt} was planned {-min(jitters):.3f} s too early")
        distance, allowed = kolmogorov(jitters, retry.jitter)
        distances.append(distance / allowed)
        verdict.expect(
            distance < allowed, f"jitter of retry {attempt}: {distance:.3f} from even, {allowed:.3f} allowed"
        )
        failed, due = busiest([row["failed"] for row in some]), busiest([row["due"] for row in some])
        peaks.append(due / failed)
        chance = 3 / math.sqrt(failed)
        verdict.expect(due < failed * (1.5 + chance), f"{due} retries {attempt} in a second, after {failed} failures")
    tries = [float(line) for line in at.sink.all("tries")]
    verdict.figures |= {
        "tries": len(tries),
        "tries_in_the_busiest_second": busiest(tries),
        "retries_over_failures_in_the_busiest_second": round(max(peaks), 2),
        "stored_delays": len(rows),
        "jitter_ks_over_allowed": round(max(distances), 2),
    }


def far_attempts(at: Site, verdict: Verdict) -> int:
    """One failure each of the attempts 1 to 999 (the last one allowed is not tried again)."""
    at.db.run("SELECT pgqueue.pause_queue('far')")
    ids = at.db.values(
        "INSERT INTO pgqueue.jobs (type, queue, max_attempts)"
        " SELECT 'depend', 'far', 1000 FROM generate_series(1, 999) RETURNING id"
    )
    at.db.run("UPDATE pgqueue.jobs_live SET attempt = id - %s WHERE queue = 'far'", min(ids))
    at.db.run("SELECT pgqueue.resume_queue('far')")
    wait(lambda: at.db.value("SELECT count(DISTINCT attempt) FROM public.planned") == 999, "each has failed", 60)
    late = at.db.value("SELECT max(run_at - failed_at) > interval '62 s' FROM public.planned")
    verdict.expect(not late, "a retry without an end")
    at.db.run("DELETE FROM pgqueue.jobs_live WHERE queue = 'far'")
    at.db.run("TRUNCATE public.planned")
    (at.sink.folder / "tries").unlink()
    return len(ids)


def busiest(times: list[float]) -> int:
    """How many of them lie within one second, at most."""
    ordered, first, most = sorted(times), 0, 0
    for last, each in enumerate(ordered):
        while each - ordered[first] >= 1:
            first += 1
        most = max(most, last - first + 1)
    return most


def shortest(retry: Retry, attempt: int) -> float:
    return min(retry.base * 2 ** (attempt - 1), retry.cap)


def kolmogorov(values: list[float], width: float) -> tuple[float, float]:
    """How far the values are from being spread evenly over 0 to width, and how far chance may take them."""
    ordered = sorted(values)
    count = len(ordered)
    even = [min(1.0, max(0.0, value / width)) for value in ordered]
    distance = max(max((n + 1) / count - share, share - n / count) for n, share in enumerate(even))
    return distance, 1.95 / math.sqrt(count)


@fault(
    "C32",
    "the worker's clock is a day early and a day late; PostgreSQL's jumps an hour ahead and two hours back",
    invariant="a worker's clock means nothing; a jump rescues early at most, keeps no dead worker's jobs, and makes no"
    " negative times",
    alone=True,  # PostgreSQL gets its clock from this process
    budget=240,
)
def clocks_jump(verdict: Verdict, small: bool) -> None:
    library = tool(
        "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1:/usr/lib/faketime/libfaketimeMT.so.1", "libfaketime"
    )
    worker_clocks(verdict, library)
    server_clock(verdict, library)


def worker_clocks(verdict: Verdict, library: Path) -> None:
    with site() as at:
        for name, offset in (("early", "-1d"), ("late", "+1d")):
            fake = {"LD_PRELOAD": str(library), "FAKETIME": offset, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
            at.worker(name, env=fake | CALM)
        ids = at.db.add_many("write", [{"key": f"k{n}", "seconds": 0.05} for n in range(200)])
        # Longer than a lease, and put off by a second.
        ids += at.db.add_many("write", [{"key": f"long {n}", "seconds": 8.0} for n in range(4)])
        ids.append(at.db.value("SELECT id FROM pgqueue.add_job('write', '{\"key\": \"delayed\"}', delay => '1 s')"))
        at.db.wait_for_all(ids, "completed", 60)
        late = at.db.value(
            "SELECT extract(epoch FROM started_at - run_at)::float FROM pgqueue.jobs WHERE id = %s", ids[-1]
        )
        rescued = at.events("jobs.rescued")
        verdict.n += len(ids)
        verdict.duplicated += sum(n > 1 for n in at.db.how_often().values())
        verdict.faults["worker clocks"] = 2
        verdict.expect(rescued == 0, f"{rescued} rescues because of a worker's clock")
        verdict.expect(0 <= late < 15, f"a delayed job started {late:.1f} s late")
        ahead = at.db.value(
            "SELECT max(abs(extract(epoch FROM finished_at - clock_timestamp())))::float FROM pgqueue.jobs_finished"
        )
        verdict.expect(ahead < 3600, "a worker's clock is in the history")


def server_clock(verdict: Verdict, library: Path) -> None:
    """One server, whose clock follows a file; only what it starts with has it."""
    with tempfile.NamedTemporaryFile("w", prefix="pgqueue-clock-") as file:
        clock = Path(file.name)
        clock.write_text("+0\n")
        clock.chmod(0o644)
        fake = {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(clock),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
        os.environ |= fake
        try:
            with site() as at:
                drop(fake)
                jump(at, verdict, clock)
        finally:
            drop(fake)


def drop(names: Iterable[str]) -> None:
    for name in names:
        os.environ.pop(name, None)


# What ended before it began.
NEGATIVE = """
SELECT 'job' AS what, id FROM pgqueue.jobs WHERE finished_at < started_at
UNION ALL SELECT 'attempt', id FROM pgqueue.attempts WHERE finished_at < started_at
UNION ALL SELECT 'metrics', id FROM pgqueue.job_metrics WHERE least(queue_time, execution_time, total_time) < '0'
UNION ALL SELECT 'tally', 0 FROM pgqueue.tallies WHERE seconds < 0 OR wait_seconds < 0
UNION ALL SELECT 'queue', 0 FROM pgqueue.queue_stats WHERE oldest_wait < interval '0'
UNION ALL SELECT 'worker', 0 FROM pgqueue.worker_stats WHERE heartbeat_age < interval '0' AND stopped_at IS NULL
"""


def noticed(at: Site, victim: WorkerProcess) -> float:
    """Kills it; how long its jobs were still its own. (They run one after the other then, in case one is to blame.)"""
    dead = at.db.worker(victim.name)
    assert dead is not None
    victim.kill()
    with Stalls(at.server.dsn).noted() as stalls:
        killed = time.monotonic(), time.time()
        mine = "SELECT count(*) FROM pgqueue.jobs_live WHERE worker_id = %s AND status = 'running'"
        wait(lambda: not at.db.value(mine, dead["id"]), "they are rescued", 60)
        return time.monotonic() - killed[0] - stalls.within(killed[1], time.time())


def on_time(at: Site, verdict: Verdict, name: str) -> None:
    """What is put off from now on is due when it should be; what fails is tried again."""
    began = time.monotonic()
    ids = at.db.values("SELECT id FROM pgqueue.add_job('nothing', delay => '1 s')")
    ids += at.db.values("SELECT id FROM pgqueue.add_job('twice')")
    at.db.wait_for_all(ids, "completed", 30)
    took = time.monotonic() - began
    verdict.expect(1 <= took < 10, f"after {name}, a delay of 1 s took {took:.1f} s")


def jump(at: Site, verdict: Verdict, clock: Path) -> None:
    workers = [at.worker(name, threads=8, ready=False) for name in ("a", "b")]
    at.fleet.wait_until_idle(*workers)
    began = at.db.value("SELECT extract(epoch FROM clock_timestamp())::float")
    verdict.expect(abs(began - time.time()) < 60, "the clock is not the file's")
    rescues = {}
    for name, offset in (("+1 h", "+3600\n"), ("-2 h", "-3600\n")):
        seen = at.events("jobs.rescued")
        ids = at.db.add_many("write", [{"key": f"{name} {n}", "seconds": 1.5} for n in range(12)])
        wait(lambda ids=ids: at.db.statuses(ids).get("running", 0) > 4)  # type: ignore[misc]
        clock.write_text(offset)
        shift = at.db.value("SELECT extract(epoch FROM clock_timestamp())::float") - time.time()
        verdict.expect(abs(shift - float(offset)) < 60, f"the clock did not jump: {shift:.0f} s")
        if name == "-2 h":
            # Its last heartbeat is two hours in the future now, and no other will come.
            busy = "SELECT w.name FROM pgqueue.workers w JOIN pgqueue.jobs_live j ON j.worker_id = w.id LIMIT 1"
            victim = next(worker for worker in workers if worker.name == at.db.value(busy))
            verdict.recovery.append(noticed(at, victim))
            workers.remove(victim)
        at.db.wait_for_all(ids, "completed", 60)
        on_time(at, verdict, name)
        backwards = at.db.rows(NEGATIVE)
        verdict.expect(not backwards, f"negative times after {name}: {backwards}")
        verdict.n += len(ids)
        verdict.faults[f"PostgreSQL {name}"] = 1
        rescues[name] = at.events("jobs.rescued") - seen
    bound = LEASE + 2 * RESCUE
    verdict.expect(verdict.recovery[0] < bound + 1, f"a death was noticed after {verdict.recovery[0]:.1f} s")
    more = at.db.add_many("write", [{"key": f"after {n}"} for n in range(50)])
    at.db.wait_for_all(more, "completed", 30)
    verdict.duplicated += sum(n > 1 for n in at.db.how_often().values())
    verdict.figures |= {"rescues": rescues, "alive": all(w.process.poll() is None for w in workers)}
    verdict.expect(rescues["-2 h"] > 0, "nothing of the dead worker was rescued: nothing was tried")
    verdict.expect(verdict.figures["alive"], "a worker did not survive the jump")
