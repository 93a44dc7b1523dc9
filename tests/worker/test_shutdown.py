"""SIGTERM and SIGINT: jobs that end soon may end, others are given back at once and uncharged, within the grace.

The cases of the matrix (short, long or deaf jobs; one signal or two) happen at the same time, each in a worker of its
own; one more worker, which serves all their queues, is there to take over.
"""

import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest

from pgqueue.embedded import PostgresServer
from tests.worker.processes import GRACE, LONG_LEASE, Database, Fleet, WorkerProcess, database_on, wait, worker_id

pytestmark = pytest.mark.parametrize("server", ["pg18"], indirect=True, scope="session")

KINDS = ("short", "long", "deaf")
PLACES = ("async", "thread", "process")
CASES = [(kind, times) for kind in KINDS for times in (1, 2)]


@dataclass
class Case:
    worker: WorkerProcess
    ids: list[int]
    late: list[int] = field(default_factory=list)
    """Jobs that were added after the signal."""
    exit_after: float = 0.0
    """Seconds; without those in which the machine stood still."""
    exit_at: datetime = datetime.max


Told = tuple[Database, str, int, Case, WorkerProcess]


@pytest.fixture(scope="module")
def matrix(
    server: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Database, dict[tuple[str, int], Case], WorkerProcess]]:
    with database_on(server) as db:
        directory = tmp_path_factory.mktemp("shutdown")
        fleet = Fleet(db.dsn, directory, db)
        try:
            cases = play(db, fleet)
            yield db, cases, fleet.workers[-1]
        finally:
            fleet.close()


def play(db: Database, fleet: Fleet) -> dict[tuple[str, int], Case]:
    path, never = fleet.directory / "go", fleet.directory / "never"
    cases = {}
    for kind, times in CASES:
        queue = f"{kind}{times}"
        worker = fleet.start(queue, queues=queue, threads=3, ready=False, PGQUEUE_SHUTDOWN_GRACE=str(GRACE))
        # Two signals come before the jobs would end.
        payload = {"path": str(path if times == 1 else never)}
        ids = [db.add(f"{kind}_{place}", payload, queue=queue) for place in PLACES]
        cases[kind, times] = Case(worker, ids)
    wait(lambda: len(db.effects(note="started")) == len(CASES) * len(PLACES), "all of them run", 60)
    fleet.start("survivor", threads=32)
    # The survivor has no part in this yet: every job is in the hands of its own worker.
    signalled = time.monotonic()
    for case in cases.values():
        case.worker.signal(signal.SIGTERM)
    path.touch()
    deaf = dict(cases)
    while deaf:
        for (kind, times), case in list(deaf.items()):
            if case.worker.events("worker.stopping"):
                case.late = db.add_many("work", [{}] * 2, queue=f"{kind}{times}")
                if times == 2:
                    case.worker.signal(signal.SIGTERM)
                del deaf[kind, times]
        assert time.monotonic() - signalled < 20, deaf
        time.sleep(0.02)
    left, before, stood_still = list(cases.values()), time.monotonic(), 0.0
    while left:
        stood_still += max(0.0, time.monotonic() - before - 0.1)
        before = time.monotonic()
        for case in list(left):
            if case.worker.process.poll() is not None:
                case.exit_after, case.exit_at = before - signalled - stood_still, datetime.now(UTC)
                left.remove(case)
        assert before - signalled < 30, [case.worker.tail() for case in left]
        time.sleep(0.02)
    for case in cases.values():
        db.wait_for_all(case.ids + case.late, "completed")
    return cases


@pytest.fixture(params=CASES, ids=[f"{kind} jobs, {'one signal' if times == 1 else 'two'}" for kind, times in CASES])
def case(request: pytest.FixtureRequest, matrix: tuple[Database, dict[tuple[str, int], Case], WorkerProcess]) -> Told:
    kind, times = request.param
    db, cases, survivor = matrix
    return db, kind, times, cases[kind, times], survivor


def test_it_ends_below_the_grace(case: Told, matrix: tuple[Database, dict[tuple[str, int], Case], Any]) -> None:
    _, kind, times, it, _ = case
    assert it.worker.process.returncode == 0
    assert it.exit_after < GRACE + 1  # a second for a busy machine
    if times == 2:
        cases = matrix[1]
        # Of those that end when they are told, one at least was not in the way of a busy machine.
        hurried = [it] if kind == "deaf" else [cases["short", 2], cases["long", 2]]
        unhurried = cases["deaf" if kind == "deaf" else "long", 1]
        sooner = unhurried.exit_after - min(each.exit_after for each in hurried)
        assert sooner > 0.5, "the second signal did not hurry it"


def test_jobs_end_or_are_given_back_at_once_and_uncharged(case: Told) -> None:
    db, kind, times, it, survivor = case
    for id in it.ids:
        job, started = db.job(id), db.effects(id, "started")
        assert (job["status"], job["attempt"], job["lost"]) == ("completed", 1, 0)
        assert db.attempts(id) == []
        if kind == "short" and times == 1:
            assert len(started) == 1
            assert job["worker_id"] == worker_id(db, it.worker.name)
        else:
            assert len(started) == 2
            assert job["worker_id"] == worker_id(db, "survivor")
            # No waiting for a lease to run out.
            taken = next(event["time"] for event in survivor.events("job.started") if event["job"] == id)
            assert (datetime.fromisoformat(taken) - it.exit_at).total_seconds() < LONG_LEASE / 2


def test_a_handler_that_looks_is_told(case: Told) -> None:
    db, kind, times, it, _ = case
    told = [id for id in it.ids if db.effects(id, "told")]
    # The coroutine's cancellation is not noted down by these handlers.
    assert told == (it.ids[1:] if kind == "long" or (kind, times) == ("short", 2) else [])


def test_no_new_job_is_claimed_after_the_signal(case: Told) -> None:
    db, _, _, it, _ = case
    assert {db.job(id)["worker_id"] for id in it.late} == {worker_id(db, "survivor")}


def test_the_worker_is_shown_as_gone_and_said_what_it_waited_for(case: Told) -> None:
    db, kind, _, it, _ = case
    row = db.worker(it.worker.name) or {}
    assert (row["state"], row["stopped_at"] is not None, row["threads_used"]) == ("unavailable", True, 0)
    (stopping,) = it.worker.events("worker.stopping")
    assert f"{it.ids[0]} {kind}_async" in stopping["message"]
    assert "3 running jobs" in stopping["message"]


@pytest.fixture
def idle(server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Database, Fleet]]:
    with database_on(server) as db:
        fleet = Fleet(db.dsn, tmp_path_factory.mktemp("idle"), db)
        try:
            yield db, fleet
        finally:
            fleet.close()


def test_an_idle_worker_ends_at_once(idle: tuple[Database, Fleet]) -> None:
    db, fleet = idle
    workers = fleet.start_all(["w1", "w2"], PGQUEUE_SHUTDOWN_GRACE="30")
    workers[0].signal(signal.SIGTERM)
    workers[1].signal(signal.SIGINT)
    assert [worker.wait(10) for worker in workers] == [0, 0]
    assert db.value("SELECT count(*) FROM pgqueue.workers WHERE stopped_at IS NOT NULL") == 2
    wait(lambda: not db.sessions(), "the server has seen them go")


def test_jobs_that_were_claimed_ahead_are_given_back(idle: tuple[Database, Fleet]) -> None:
    """Many short jobs make it claim ahead; none of them waits for a lease when it stops."""
    db, fleet = idle
    worker, other = fleet.start("w", threads=2, ready=False), fleet.start("other", queues="none")
    fleet.wait_until_idle(worker)
    db.run(
        "INSERT INTO pgqueue.jobs (type, payload) SELECT 'nap', '{\"seconds\": 0.002}' FROM generate_series(1, 20000)"
    )
    wait(lambda: db.statuses().get("completed", 0) > 300, "it is under way")
    worker.stop()
    statuses = db.statuses()
    assert statuses.keys() == {"completed", "pending"}, statuses
    assert db.value("SELECT count(*) FROM pgqueue.attempts") == 0
    assert db.value("SELECT max(attempt + lost) FROM pgqueue.jobs WHERE status = 'pending'") == 0
    other.stop()


def test_a_signal_during_a_claim(idle: tuple[Database, Fleet]) -> None:
    """What the claim brings is run or given back at once, uncharged, and not left to a rescue."""
    db, fleet = idle
    settings = {"PGQUEUE_FAILPOINT": "claim.after:sleep", "PGQUEUE_SHUTDOWN_GRACE": "15"}  # it sleeps for 5 s
    worker = fleet.start("claiming", queues="claiming", threads=2, **settings)
    ids = db.add_many("work", [{}] * 2, queue="claiming")
    wait(lambda: db.statuses(ids) == {"running": 2}, "they are claimed")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert not db.value("SELECT count(*) FROM pgqueue.jobs WHERE status NOT IN ('pending', 'completed') OR lost > 0")
    assert not db.value("SELECT count(*) FROM pgqueue.attempts")


def test_an_operator_drains_a_worker(idle: tuple[Database, Fleet]) -> None:
    db, fleet = idle
    worker = fleet.start("w")
    running = db.add("nap", {"seconds": 0.8})
    db.wait_for(running, "running")
    db.run("SELECT pgqueue.drain_worker(id) FROM pgqueue.workers WHERE stopped_at IS NULL")
    assert worker.wait() == 0
    assert db.job(running)["status"] == "completed"


def test_a_stop_before_the_database_is_there(idle: tuple[Database, Fleet]) -> None:
    _, fleet = idle
    fleet.dsn = "postgresql://nobody@127.0.0.1:1/nothing"
    worker = fleet.start("w", ready=False)
    wait(lambda: worker.events("database.away"), "it has tried")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0


def test_a_database_without_the_schema_is_refused(idle: tuple[Database, Fleet]) -> None:
    db, fleet = idle
    db.run("DROP SCHEMA pgqueue CASCADE")
    worker = fleet.start("w", ready=False)
    assert worker.wait() == 1
    said = worker.log.read_text()
    assert "pgqueue migrate up" in said
    assert "Traceback" not in said


def test_people_can_read_what_it_says(idle: tuple[Database, Fleet]) -> None:
    db, fleet = idle
    worker = fleet.start("worker-1", PGQUEUE_LOG="pretty")
    path = fleet.directory / "end"
    id = db.add("nap", {"path": str(path)})
    wait(lambda: f"processing job {id} nap" in worker.log.read_text(), "it runs")
    worker.signal(signal.SIGINT)
    wait(lambda: "stopping" in worker.log.read_text(), "it has heard")
    path.touch()
    assert worker.wait() == 0
    lines = [line.partition(" ")[2] for line in worker.log.read_text().splitlines()]
    assert f"worker-1 | processing job {id} nap" in lines
    assert any(line.startswith("worker-1 | stopping: waiting up to") and f"{id} nap" in line for line in lines)
    assert any(re.match(rf"worker-1 \| completed job {id} nap in \d\.\d+ s", line) for line in lines)
