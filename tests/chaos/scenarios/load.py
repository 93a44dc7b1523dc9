"""Load that goes on while somebody holds a snapshot, migrates, fills the disk or works on many jobs at once."""

import asyncio
import os
import random
import shutil
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, contextmanager, suppress
from datetime import datetime
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median

import psycopg

from pgqueue import finish, migrate, workers
from pgqueue.db import Connection, connect
from pgqueue.embedded import start_postgres
from pgqueue.job import Lease
from tests.chaos.cuts.parts import cancelled, completed, failed, released
from tests.chaos.scenarios.history import Twin, twin
from tests.chaos.site import Site, fault, on, percentile, site, tool
from tests.chaos.verdict import Skipped, Verdict
from tests.db.queue import MiniWorker
from tests.worker.processes import wait


class Stream:
    """Adds so many jobs a second, and notes how long each commit took and whether it was acknowledged."""

    def __init__(self, dsn: str, rate: float, type: str = "nothing") -> None:
        self.dsn = dsn
        self.rate = rate
        self.type = type
        self.took: list[tuple[float, float]] = []
        """When, and for how long."""
        self.acknowledged: list[int] = []
        self.refused: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def reached(self) -> float:
        """Jobs a second, from the first that was tried to the last."""
        return len(self.acknowledged) / max(1.0, self.took[-1][0] - self.took[0][0])

    @contextmanager
    def running(self) -> Iterator["Stream"]:
        self._thread.start()
        try:
            yield self
        finally:
            self.stop()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)

    def longest(self, since: float = 0.0) -> float:
        return max((took for at, took in self.took if at >= since), default=0.0)

    def _run(self) -> None:
        batch = max(1, round(self.rate / 50))
        due = time.monotonic()
        conn = None
        while not self._stop.is_set():
            started = time.monotonic()
            try:
                if conn is None or conn.closed:
                    conn = psycopg.connect(self.dsn, autocommit=True, connect_timeout=5)
                query = "INSERT INTO pgqueue.jobs (type) SELECT %s FROM generate_series(1, %s) RETURNING id"
                self.acknowledged += [id for (id,) in conn.execute(query, [self.type, batch]).fetchall()]
            except psycopg.Error as error:
                self.refused.append(error.sqlstate or type(error).__name__)
                if conn is not None:
                    conn.close()
                time.sleep(0.1)
            self.took.append((started, time.monotonic() - started))
            due = max(due + batch / self.rate, time.monotonic() - 1)
            time.sleep(max(0.0, due - time.monotonic()))
        if conn is not None:
            conn.close()


HOLDING = {"max_prepared_transactions": "2", "wal_level": "logical", "max_replication_slots": "2"}
ALARM = 60.0
"""Seconds within which somebody says who holds a snapshot."""


def delays(at: Site, seconds: float) -> list[float]:
    """How long the jobs that ended in the last seconds had waited."""
    query = "SELECT extract(epoch FROM started_at - created_at)::float FROM pgqueue.jobs_finished"
    return at.db.values(f"{query} WHERE finished_at > now() - make_interval(secs => %s)", seconds) or [0.0]


def curve(at: Site, pieces: int, seconds: float) -> list[float]:
    """The 99th percentile of waiting in one piece of time after the other."""
    points = []
    for _ in range(pieces):
        time.sleep(seconds)
        points.append(round(percentile(delays(at, seconds), 0.99), 3))
    return points


@fault(
    "C35",
    "a snapshot is held under load: by a report; then by an abandoned replication slot, a prepared transaction and a"
    " query on a standby with hot_standby_feedback",
    invariant="each is told of within a minute, by one worker; jobs do not wait longer; nothing is left after it",
    alone=True,
    budget=300,
)
def snapshot_is_held(verdict: Verdict, small: bool) -> None:
    rate, pieces, seconds = (200, 3, 2.0) if small else (500, 15, 5.0)
    with (
        site(HOLDING | ({"autovacuum_naptime": "5s"} if small else {})) as at,
        twin(at, "standby") as standby,
        Stream(at.server.dsn, rate).running() as stream,
    ):
        follow(at, standby)
        for name in ("a", "b"):
            at.worker(name, threads=8, ready=False)
        time.sleep(5)
        curves = {"before": curve(at, 3 if small else 6, seconds)}
        alarms: dict[str, float] = {}
        for what, holds in HOLDS.items():
            with ExitStack() as stack:
                for hold in holds.values():
                    stack.enter_context(hold(at, standby))
                began = time.time()
                curves[what] = curve(at, pieces, seconds)
                alarms |= told(at, began, holds)
                verdict.figures[f"held by {what}"] = sizes(at)
            verdict.faults[what] = 1
        released = time.monotonic()
        few = max(20_000, 10 * rate)
        wait(lambda: sizes(at)["dead_rows"] < few, "vacuum has removed what was held", 120)
        verdict.recovery = [time.monotonic() - released]
        curves["after"] = curve(at, 3, seconds)
        backlog = at.db.value("SELECT count(*) FROM pgqueue.jobs_live WHERE status = 'pending'")
        stream.stop()
        wait(lambda: not at.db.value("SELECT count(*) FROM pgqueue.jobs_live"), "everything has ended", 60)
        verdict.n = len(stream.acknowledged)
        verdict.lost = verdict.n - at.db.statuses().get("completed", 0)
        usual = median(curves["before"])
        for what, points in curves.items():
            # At the end of it, when there is most to wade through; not one moment at which the machine had other work.
            p99 = median(points[-6:])
            verdict.expect(p99 <= max(0.1, 3 * usual), f"{what}: p99 of waiting is {p99:.3f} s, usually {usual:.3f}")
        verdict.expect(backlog < rate, f"{backlog} jobs wait")
        verdict.expect(stream.reached > 0.95 * rate, f"only {stream.reached:.0f} jobs/s came, not {rate}")
        if not small:
            for kind in [kind for holds in HOLDS.values() for kind in holds]:
                told_after = alarms.get(kind)
                verdict.expect(told_after is not None and told_after <= ALARM, f"{kind}: told after {told_after} s")
            events = [event["message"] for worker in at.fleet.workers for event in worker.events("snapshot.held")]
            verdict.expect(len(events) == 4, f"told of {events}")
            verdict.figures["alarm_after_s"] = {kind: round(after, 1) for kind, after in alarms.items()}
        verdict.figures |= {"jobs_per_s": round(stream.reached), "wait_p99": curves, "after": sizes(at)}


def told(at: Site, began: float, kinds: Iterable[str]) -> dict[str, float]:
    """How many seconds after that the workers told of holders of these kinds."""
    events = [event for worker in at.fleet.workers for event in worker.events("snapshot.held")]
    times = {event["kind"]: datetime.fromisoformat(event["time"]).timestamp() - began for event in events}
    return {kind: seconds for kind, seconds in times.items() if kind in kinds}


def sizes(at: Site) -> dict[str, float]:
    return at.db.rows(
        "SELECT sum(n_dead_tup)::int AS dead_rows, round(sum(pg_table_size(relid)) / 2.0^20, 1)::float AS tables_mb,"
        " round(sum(pg_indexes_size(relid)) / 2.0^20, 1)::float AS indexes_mb FROM pg_stat_user_tables"
        " WHERE relid IN ('pgqueue.jobs_live'::regclass, 'pgqueue.workers'::regclass, 'pgqueue.tallies'::regclass)"
    )[0]


def follow(at: Site, standby: Twin) -> None:
    standby.copy()
    standby.start(
        f"primary_conninfo={at.server.dsn}?application_name=standby",
        "hot_standby_feedback=on",
        "wal_receiver_status_interval=1s",
        "max_standby_streaming_delay=-1",
        *(f"{name}={value}" for name, value in HOLDING.items()),
        signal_file="standby.signal",
    )
    wait(lambda: standby.answers("SELECT 1"), "the standby follows")


@contextmanager
def report(at: Site, standby: Twin) -> Iterator[None]:
    with read_for_long(at.server.dsn):
        yield


@contextmanager
def read_for_long(dsn: str) -> Iterator[None]:
    with psycopg.connect(dsn) as conn:
        conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        conn.execute("SELECT count(*) FROM pgqueue.jobs_live")
        yield


@contextmanager
def feedback(at: Site, standby: Twin) -> Iterator[None]:
    with read_for_long(standby.dsn):
        yield


@contextmanager
def slot(at: Site, standby: Twin) -> Iterator[None]:
    at.db.run("SELECT pg_create_logical_replication_slot('abandoned', 'pgoutput')")
    try:
        yield
    finally:
        at.db.run("SELECT pg_drop_replication_slot('abandoned')")


@contextmanager
def prepared(at: Site, standby: Twin) -> Iterator[None]:
    with psycopg.connect(at.server.dsn, autocommit=True) as conn:
        conn.execute("BEGIN")
        conn.execute("CREATE TABLE public.forgotten (n int)")
        conn.execute("PREPARE TRANSACTION 'forgotten'")
    try:
        yield
    finally:
        at.db.run("ROLLBACK PREPARED 'forgotten'")


HOLDS: dict[str, dict[str, Callable[[Site, Twin], AbstractContextManager[None]]]] = {
    "a report": {"session": report},
    # The prepared one is the last: a snapshot that is taken while it runs is as old as it is.
    "slot, standby and prepared": {"slot": slot, "standby": feedback, "prepared": prepared},
}
"""By the kinds of which workers tell."""


@fault(
    "C37",
    "the schema goes back a version and forth again under load, with workers and the API running, much history and a"
    " long transaction open",
    invariant="no enqueue stalls for a second, no job is lost, no index is left invalid; meanwhile jobs run, workers"
    " and the API say what is wrong, and all is well again after",
    budget=240,
)
def migrate_under_load(verdict: Verdict, small: bool) -> None:
    from tests.api.conftest import api_process

    rounds, history = (1, 20_000) if small else (3, 2_000_000)
    with site() as at, api_process(at.server.dsn) as (api, _):
        add_history(at, history)
        head = migrate.head()
        previous = f"r{int(head[1:]) - 1:04}"
        for name in ("a", "b"):
            at.worker(name, threads=8, ready=False)
        wait(lambda: at.db.value("SELECT count(*) FROM pgqueue.workers WHERE listening") == 2, "both workers are there")

        def well() -> bool:
            return at.events("schema.back") == at.events("schema.differs")

        def down() -> None:
            wait(well, "the workers know that all is well again", 30)
            known = at.events("schema.differs")
            migrate.down(at.server.dsn, previous)
            begun = at.db.value("SELECT max(id) FROM pgqueue.jobs_finished WHERE type = 'nothing'") or 0
            wait(lambda: at.events("schema.differs") >= known + 2, "workers say so", 30)
            answer = api("GET", "/readyz")
            words = f"the database's schema is at {previous}, this code needs {head}; run: pgqueue migrate up"
            verdict.expect(answer.status == 503 and words in answer.text, f"readyz: {answer.status}")
            done = "SELECT count(*) FROM pgqueue.jobs_finished WHERE type = 'nothing' AND id > %s"
            wait(lambda: at.db.value(done, begun) > 100, "jobs run with the schema of before")

        steps = {
            "down": down,
            "up": lambda: migrate.up(at.server.dsn),
            # What a later version may do, and in the way in which migrations do it.
            "add a column": lambda: alter(at, "ADD COLUMN chaos integer DEFAULT 7"),
            "drop a column": lambda: alter(at, "DROP COLUMN chaos"),
        }
        stalls = dict.fromkeys(steps, 0.0)
        with Stream(at.server.dsn, 300 if small else 1000).running() as stream:
            for name, step in list(steps.items()) * rounds:
                began = time.monotonic()
                with reader(at) as let_go:
                    threading.Timer(4, let_go).start()
                    try:
                        step()
                    except Exception as error:
                        verdict.problems.append(f"{name}: {type(error).__name__}: {error}"[:300])
                stalls[name] = max(stalls[name], round(stream.longest(began), 3))
        wait(lambda: api("GET", "/readyz").status == 200, "the API is ready again")
        wait(well, "the workers know that all is well again", 30)
        live = "SELECT count(*) FROM pgqueue.jobs_live WHERE type = 'nothing' AND status <> 'scheduled'"
        wait(lambda: not at.db.value(live), "everything has ended", 60)
        invalid = at.db.values("SELECT indexrelid::regclass::text FROM pg_index WHERE NOT indisvalid")
        completed = "SELECT count(*) FROM pgqueue.jobs WHERE type = 'nothing' AND status = 'completed'"
        verdict.n = len(stream.acknowledged)
        verdict.lost = verdict.n - at.db.value(completed)
        verdict.faults = {"migrations": len(steps) * rounds}
        verdict.expect(not invalid, f"invalid: {invalid}")
        verdict.expect(not stream.refused, f"{len(stream.refused)} enqueues were refused: {set(stream.refused)}")
        verdict.expect(max(stalls.values()) < 1, f"an enqueue stalled: {stalls}")
        verdict.expect(migrate.status(at.server.dsn).up_to_date, "it is not at its newest version")
        verdict.figures |= {
            "longest_enqueue_s": max(stalls.values()),
            "stalls": stalls,
            "history_rows": history,
            "between": [previous, head],
        }


def add_history(at: Site, rows: int) -> None:
    """As if jobs had been done for three days; and some are waiting for their time."""
    at.db.run(
        "INSERT INTO pgqueue.jobs_finished (type, status, attempt, started_at, finished_at)"
        " SELECT 'old', 'completed', 1, at, at FROM (SELECT now() - n * interval '3 days' / %s AS at"
        " FROM generate_series(1, %s) AS n) AS history",
        rows,
        rows,
    )
    at.db.run(
        "INSERT INTO pgqueue.jobs (type, run_at) SELECT 'nothing', now() + interval '1 day'"
        " FROM generate_series(1, %s)",
        rows // 20,
    )


def alter(at: Site, what: str) -> None:
    with psycopg.connect(at.server.dsn) as conn:
        for _ in range(migrate.TRIES):
            try:
                with conn.transaction():
                    conn.execute(f"SET LOCAL lock_timeout = '{migrate.LOCK_TIMEOUT}'")
                    conn.execute(f"ALTER TABLE pgqueue.jobs {what}")
                return
            except psycopg.errors.LockNotAvailable:
                time.sleep(migrate.PAUSE * random.uniform(0.5, 1.5))
    raise TimeoutError(f"{what}: no lock")


@contextmanager
def reader(at: Site) -> Iterator[Callable[[], None]]:
    """Somebody who has read the jobs and is still in the transaction."""
    conn = psycopg.connect(at.server.dsn)
    conn.execute("SELECT id FROM pgqueue.jobs LIMIT 1")
    conn.execute("SELECT count(*) FROM pgqueue.workers")
    try:
        yield conn.close
    finally:
        conn.close()


VERBS: dict[str, Callable[[Lease], Lease]] = {
    "complete": completed,
    "fail": partial(failed, delay=0.0),
    "cancel": cancelled,
    "snooze": lambda lease: finish.Snoozed(lease.id, lease.lease_token, 0.0),
    "release": released,
}


class Hands:
    """Several hands that end the same attempts, many with each statement, and each in an order of its own."""

    HANDS, ATTEMPTS, BATCH = 4, 60, 30

    def __init__(self, dsn: str, ids: list[int]) -> None:
        self.dsn = dsn
        self.ids = ids
        """Of all jobs; those that these need are added, so that the others work on them, too."""
        self.batches: Counter[str] = Counter()
        self.wrong: list[tuple[str, int, int]] = []
        """How, which job, and by how many it was ended."""

    async def end_jobs(self, until: float) -> None:
        async with AsyncExitStack() as stack:
            first, *hands = [await stack.enter_async_context(await connect(self.dsn)) for _ in range(self.HANDS + 1)]
            worker = await MiniWorker(first, queues=["hands"]).register(lease_timeout=600)
            for verb in cycle(VERBS):
                if time.monotonic() > until:
                    break
                if len(jobs := await worker.claim(self.ATTEMPTS)) < self.ATTEMPTS // 2:
                    added = "INSERT INTO pgqueue.jobs (queue, type, max_attempts) SELECT 'hands', 'nothing', 1000"
                    found = await first.execute(
                        f"{added} FROM generate_series(1, {self.ATTEMPTS}) RETURNING id".encode()
                    )
                    self.ids += [id for (id,) in await found.fetchall()]
                leases = [Lease(job.id, worker.tokens[job.id]) for job in jobs]
                done = Counter[int]()
                for ended in await asyncio.gather(*(self._end(hand, verb, leases) for hand in hands)):
                    done.update(ended)
                self.wrong += [(verb, lease.id, done[lease.id]) for lease in leases if done[lease.id] != 1]
            # What a deadlock has left is rescued.
            await workers.retire(first, worker.who.worker_id, completed=0, failed=0)

    async def _end(self, hand: Connection, verb: str, leases: Sequence[Lease]) -> list[int]:
        order, ended = random.sample(leases, len(leases)), []
        for start in range(0, len(order), self.BATCH):
            outcomes = [VERBS[verb](lease) for lease in order[start : start + self.BATCH]]
            with suppress(psycopg.errors.DeadlockDetected):  # PostgreSQL counts them
                ended += await getattr(finish, verb)(hand, outcomes)
                self.batches[verb] += 1
        return ended


@fault(
    "C40",
    "completing, failing, snoozing, giving back and stopping in batches by several hands, cancelling, retrying,"
    " editing, pruning, all of it on the same jobs at the same time",
    invariant="no deadlock, every attempt is ended by one hand, and every job is in one place",
    minute=True,
    budget=180,
)
def everybody_at_once(verdict: Verdict, small: bool) -> None:
    seconds, jobs = (6.0, 300) if small else (60.0, 1500)
    with site({"log_lock_waits": "on", "deadlock_timeout": "200ms"}) as at:
        for name in ("a", "b"):
            at.worker(name, threads=8, ready=False, queues="default")
        ids = at.db.add_many("sleep", [{"seconds": 0.02}] * jobs, max_attempts=1)
        until = time.monotonic() + seconds
        hands = Hands(at.server.dsn, ids)
        acts: dict[str, int] = {}
        errors: list[str] = []
        statements = {
            "cancel": "SELECT pgqueue.act_on_jobs(%s, 'cancel', 'chaos')",
            "retry": "SELECT pgqueue.act_on_jobs(%s, 'retry', 'chaos')",
            # Who locks several jobs does it in the order of their ids.
            "edit": "SELECT pgqueue.edit_job(id, jsonb_build_object('priority', (random() * 10)::int)) FROM (SELECT id"
            " FROM pgqueue.jobs WHERE id = ANY (%s) AND status IN ('pending', 'scheduled') ORDER BY id LIMIT 20) j",
            "prune": "SELECT pgqueue.drop_partitions('1 day'), pgqueue.make_partitions(), cardinality(%s::bigint[])",
        }

        def act(name: str, statement: str, chance: random.Random) -> None:
            with psycopg.connect(at.server.dsn, autocommit=True) as conn:
                while time.monotonic() < until:
                    some = chance.sample(ids, 60)
                    try:
                        conn.execute(statement, [some])
                        acts[name] = acts.get(name, 0) + 1
                    except psycopg.errors.DeadlockDetected:
                        errors.append(f"{name}: deadlock")
                    except psycopg.Error as error:
                        # A job that was pending a moment ago is running now: that is no error of ours.
                        if error.sqlstate != "PQ003":
                            errors.append(f"{name}: {error}"[:200])

        actors = [
            threading.Thread(target=act, args=[name, statement, random.Random(f"{name}{n}")])
            for name, statement in statements.items()
            for n in range(1 if name == "prune" else 2)
        ]
        for actor in actors:
            actor.start()
        asyncio.run(hands.end_jobs(until))
        for actor in actors:
            actor.join()
        for some, last in ((ids[:jobs], "retry"), (ids[jobs:], "cancel")):
            at.db.run("SELECT pgqueue.act_on_jobs(%s, %s, 'the end')", some, last)
        wait(lambda: not at.db.value("SELECT count(*) FROM pgqueue.jobs_live"), "everything has ended", 90)
        deadlocks = at.db.value("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
        places = at.db.value("SELECT count(*) - count(DISTINCT id) FROM pgqueue.jobs")
        verdict.n = len(ids)
        verdict.faults = acts | {f"{verb} in batches": number for verb, number in hands.batches.items()}
        verdict.lost = len(ids) - sum(at.db.statuses(ids).values())
        verdict.duplicated = places
        verdict.expect(len(hands.batches) == len(VERBS), f"the hands only came to {dict(hands.batches)}")
        verdict.expect(not hands.wrong, f"{len(hands.wrong)} attempts were not ended by one hand: {hands.wrong[:5]}")
        if deadlocks:
            log = (at.folder / "pg" / "postgres.log").read_text()
            verdict.problems.append(f"{deadlocks} deadlocks: {log[log.index('deadlock detected') :][:1500]}")
        verdict.expect(not errors, f"{len(errors)} errors, such as {errors[:2]}")
        verdict.figures |= {"deadlocks": deadlocks, "seconds_of_it": seconds}


@fault(
    "C38",
    "PostgreSQL's disk is full, then free again",
    invariant="no acknowledgement without a row, the API answers 503, all goes on when there is room",
    budget=180,
)
def disk_is_full(verdict: Verdict, small: bool) -> None:
    with small_disk(320) as disk:
        settings = {
            "max_wal_size": "48MB",
            "min_wal_size": "32MB",
            "checkpoint_timeout": "30s",
            "shared_buffers": "32MB",
        }
        server = start_postgres(disk / "pg", settings=settings)
        try:
            if not server.data_dir.is_relative_to(disk):
                raise Skipped("the server's data are not on the small disk")
            with tempfile.TemporaryDirectory(prefix="pgqueue-chaos-") as folder, on(server, Path(folder)) as at:
                fill_and_free(verdict, at, disk, 8 if small else 20)
        finally:
            server.stop("immediate")


@contextmanager
def small_disk(megabytes: int) -> Iterator[Path]:
    """A file system of its own; only root can have one."""
    if os.geteuid() != 0 or not os.path.exists("/dev/loop-control"):
        raise Skipped("no loop devices, or not root")
    mkfs = tool("/usr/sbin/mkfs.ext4:/sbin/mkfs.ext4", "mkfs.ext4")
    with tempfile.TemporaryDirectory(prefix="pgqueue-disk-") as folder:
        image, disk = Path(folder) / "image", Path(folder) / "disk"
        with image.open("wb") as file:
            file.truncate(megabytes << 20)
        disk.mkdir()
        subprocess.run([mkfs, "-q", "-m", "0", str(image)], check=True)
        if subprocess.run(["mount", "-o", "loop", str(image), str(disk)], capture_output=True).returncode:
            raise Skipped("no loop devices")
        try:
            Path(folder).chmod(0o711)
            disk.chmod(0o711)
            yield disk
        finally:
            subprocess.run(["umount", str(disk)], check=True)


def fill_and_free(verdict: Verdict, at: Site, disk: Path, seconds: float) -> None:
    from tests.api.conftest import api_process

    answers: list[tuple[int, int | None]] = []
    stop = threading.Event()
    with api_process(at.server.dsn) as (api, _), Stream(at.server.dsn, 300, "write_nothing").running() as stream:

        def post() -> None:
            while not stop.is_set():
                with suppress(OSError):
                    answer = api("POST", "/api/v1/jobs", {"type": "write", "payload": {"key": "x" * 20_000}})
                    answers.append((answer.status, answer.json.get("id") if answer.status < 300 else None))
                time.sleep(0.05)

        posting = threading.Thread(target=post, daemon=True)
        posting.start()
        at.worker("w", ready=False)
        time.sleep(3)
        ballast = disk / "ballast"
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(b"x" * (1 << 20))
        with ballast.open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(b"x" * 4096)
        before = len(answers)
        time.sleep(seconds)
        while_full = [status for status, _ in answers[before:]]
        refused, free = len(stream.refused), shutil.disk_usage(disk).free
        ballast.unlink()
        freed = time.monotonic()
        fell = not at.server._main_pid()
        if fell:
            at.server.restart()
        at.db.again()
        seen = len(answers)
        wait(lambda: any(status < 300 for status, _ in answers[seen:]), "the API takes jobs again", 60)
        verdict.recovery = [time.monotonic() - freed]
        stop.set()
        posting.join(30)
        stream.stop()
    wait(lambda: at.db.value("SELECT count(*) FROM pgqueue.jobs_live WHERE type = 'write'") == 0, "jobs run again", 90)
    posted = {id for _, id in answers if id is not None}
    acknowledged = posted | set(stream.acknowledged)
    rows = set(at.db.values("SELECT id FROM pgqueue.jobs"))
    done = set(at.db.values("SELECT job_id FROM public.effects"))
    verdict.n = len(acknowledged)
    verdict.faults = {"full disks": 1}
    verdict.lost = len(acknowledged - rows) + len(posted - done)
    verdict.duplicated = sum(n > 1 for n in at.db.how_often().values())
    odd = {status for status, _ in answers} - {200, 201, 202, 503}
    verdict.expect(not odd, f"the API answered {sorted(odd)}")
    verdict.expect(refused or 503 in while_full, "nothing was refused: the disk was not full")
    verdict.figures |= {
        "api_503": sum(status == 503 for status in while_full),
        "refused_while_full": refused,
        "free_bytes_while_full": free,
        "postgres_had_to_be_started": fell,
    }
