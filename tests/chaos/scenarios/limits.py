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
from tests.chaos.verdict import Verdict
from tests.worker.processes import wait

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


@fault(
    "C28",
    "what thousands of jobs depend on is down for a while, then healthy",
    invariant="retries are spread as their jitter says; all is drained within the longest delay",
)
def dependency_is_down(verdict: Verdict, small: bool) -> None:
    jobs, seconds = (1000, 6.0) if small else (10_000, 40.0)
    with site() as at:
        down = at.sink.folder / "down"
        down.touch()
        at.worker("w", threads=16, env={"PGQUEUE_LOG": "json"})
        started = time.monotonic()
        insert = "INSERT INTO pgqueue.jobs (type, max_attempts) SELECT 'depend', 100 FROM generate_series(1, %s)"
        at.db.run(insert, jobs)
        time.sleep(seconds)
        planned = at.db.rows(
            "SELECT extract(epoch FROM j.run_at - a.finished_at)::float AS delay, a.attempt"
            " FROM pgqueue.jobs_live j JOIN pgqueue.attempts a ON a.job_id = j.id AND a.attempt = j.attempt"
            " WHERE j.status = 'scheduled'"
        )
        down.unlink()
        up = time.monotonic()
        wait(lambda: at.db.value("SELECT count(*) FROM pgqueue.jobs_live") == 0, "drained", 150)
        drained = time.monotonic() - up
        tries = [float(line) for line in at.sink.all("tries")]
        first = min(tries)
        rates = [sum(1 for each in tries if second <= each - first < second + 1) for second in range(int(seconds))]
        retry = Retry()
        early = [row for row in planned if row["delay"] < shortest(retry, row["attempt"])]
        verdict.expect(planned and not early, f"{len(early)} of {len(planned)} retries were planned too early")
        jitters = [retry.delay(attempt) - shortest(retry, attempt) for attempt in range(1, 11) for _ in range(1000)]
        distance, allowed = kolmogorov(jitters, retry.jitter)
        verdict.n = jobs
        verdict.lost = jobs - at.db.statuses().get("completed", 0)
        verdict.expect(distance < allowed, f"the jitter is not even: {distance:.3f} from it, {allowed:.3f} is allowed")
        longest = retry.base * 2 ** math.ceil(math.log2(seconds)) + retry.jitter
        verdict.expect(drained < 2 * longest + 10, f"drained only after {drained:.0f} s")
        horizon = [Retry(max_attempts=1000, base=1, cap=86400).delay(attempt) for attempt in range(1, 1001)]
        verdict.expect(all(map(math.isfinite, horizon)) and max(horizon) <= 86401, "a delay without end")
        verdict.figures |= {
            "tries": len(tries),
            "tries_a_second_first_and_peak_after": [rates[0], max(rates[1:])],
            "jitter_ks_distance": round(distance, 4),
            "jitter_ks_allowed": round(allowed, 4),
            "drained_s": round(drained, 1),
            "outage_s": round(up - started, 1),
        }


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
    invariant="a worker's clock means nothing; a jump rescues early at most, and keeps no dead worker's jobs",
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
            victim.kill()
            workers.remove(victim)
            killed = time.monotonic()
        at.db.wait_for_all(ids, "completed", 60)
        verdict.n += len(ids)
        verdict.faults[f"PostgreSQL {name}"] = 1
        rescues[name] = at.events("jobs.rescued") - seen
    verdict.recovery.append(time.monotonic() - killed)
    more = at.db.add_many("write", [{"key": f"after {n}"} for n in range(50)])
    at.db.wait_for_all(more, "completed", 30)
    verdict.duplicated += sum(n > 1 for n in at.db.how_often().values())
    verdict.figures |= {"rescues": rescues, "alive": all(w.process.poll() is None for w in workers)}
    verdict.expect(rescues["-2 h"] > 0, "nothing of the dead worker was rescued: nothing was tried")
    verdict.expect(verdict.figures["alive"], "a worker did not survive the jump")
