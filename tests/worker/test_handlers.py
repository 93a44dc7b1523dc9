"""What handlers do, return, raise and break, and what becomes of their jobs; the worker goes on in every case.

The tests of this file share two workers, one with the sample app and one with the types that ship. What takes long, the
pauses between attempts, is begun with them and looked at in the end.
"""

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterator
from email import message_from_bytes
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiosmtpd.controller import Controller
from psycopg.types.json import Jsonb

from pgqueue.embedded import PostgresServer
from tests.worker.processes import Database, Fleet, WorkerProcess, database_on, wait

pytestmark = pytest.mark.parametrize("server", ["pg18"], indirect=True, scope="session")


class Mailbox:
    def __init__(self) -> None:
        self.messages: list[Any] = []

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        self.messages.append(message_from_bytes(envelope.content))
        return "250 taken"


class Server(Controller):
    """Finds a free port by itself."""

    def __init__(self, mailbox: Mailbox) -> None:
        super().__init__(mailbox, hostname="127.0.0.1", port=0)

    def _trigger_server(self) -> None:
        assert isinstance(self.server, asyncio.Server)
        self.port = self.server.sockets[0].getsockname()[1]
        super()._trigger_server()  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def mailbox() -> Iterator[tuple[Mailbox, Controller]]:
    mailbox = Mailbox()
    controller = Server(mailbox)
    controller.start()
    yield mailbox, controller
    controller.stop()


@pytest.fixture(scope="module")
def shared(
    server: PostgresServer, tmp_path_factory: pytest.TempPathFactory, mailbox: tuple[Mailbox, Controller]
) -> Iterator[tuple[Database, Fleet]]:
    with database_on(server) as db:
        fleet = Fleet(db.dsn, tmp_path_factory.mktemp("shared"), db)
        try:
            _, controller = mailbox
            mail = {"SMTP_HOST": "127.0.0.1", "SMTP_PORT": str(controller.port), "SMTP_EMAIL": "shop@example.org"}
            fleet.start("builtin", app="", ready=False, **mail)
            fleet.start("sample", threads=8)
            fleet.wait_until_idle(*fleet.workers)
            db.add("fail", name="always")
            db.add_many("fail", [{}] * 50, max_attempts=2, name="together")
            yield db, fleet
        finally:
            fleet.close()


@pytest.fixture
def db(shared: tuple[Database, Fleet]) -> Database:  # the one of all the tests, instead of one each
    dead = [worker.tail(3) for worker in shared[1].workers if worker.process.poll() is not None]
    assert not dead, "\n".join(dead)
    return shared[0]


@pytest.fixture
def sample(shared: tuple[Database, Fleet]) -> WorkerProcess:
    return shared[1].workers[1]


# The types that ship


@pytest.mark.parametrize(
    ("type", "payload", "demand", "result"),
    [
        ("add_numbers", {"x": 5, "y": 7}, 1, {"sum": 12}),
        ("add_numbers", {"x": 5, "y": 7}, 4, {"sum": 12}),
        ("reverse_string", {"text": "héllo"}, 1, {"reversed": "olléh"}),
        ("reverse_string", {"text": "héllo"}, 3, {"reversed": "olléh"}),
        ("resize_image", {"url": "a.png", "width": 3, "height": 4}, 1, {"resized_url": "a.png_resized_3x4"}),
        ("large_array_sum", {"numbers": [1, 2, 3, 4, 5]}, 10, {"sum": 15}),
        ("large_array_sum", {"array": [1, 2, 3, 4, 5]}, 4, {"sum": 15}),
        ("large_array_sum", {"numbers": []}, 4, {"sum": 0}),
    ],
)
def test_small_types(db: Database, type: str, payload: Any, demand: int, result: Any) -> None:
    """A demand for threads changes nothing for those that need only one."""
    id = db.add(type, payload, thread_demand=demand)
    job = db.wait_for(id, "completed")
    assert job["result"] == result
    assert job["finished_at"] is not None
    metrics = db.rows("SELECT * FROM pgqueue.job_metrics WHERE id = %s", id)[0]
    assert metrics["total_time"] == metrics["queue_time"] + metrics["execution_time"]
    # Eight are the threads of the largest worker here.
    assert metrics["worker_threads"] == (1 if demand > 8 else demand)
    if type == "resize_image":
        assert metrics["execution_time"].total_seconds() > 0.095  # uvloop's timers may be a millisecond early


def test_a_large_sum_is_made_of_chunks(db: Database) -> None:
    numbers = [7] * 250_000
    id = db.add("large_array_sum", {"numbers": numbers}, thread_demand=4)
    assert db.wait_for(id, "completed")["result"] == {"sum": 1_750_000}
    steps = db.rows("SELECT name, result FROM pgqueue.steps WHERE job_id = %s", id)
    assert len(steps) == 4
    assert sum(step["result"] for step in steps) == 1_750_000


@pytest.mark.parametrize(
    ("type", "payload", "says"),
    [
        ("cpu_intensive", {"rounds": 10}, "Computed 10 hashes"),
        ("io_intensive", {"lines": 100}, "Processed 100 lines"),
        ("mixed_workload", {"rounds": 10, "lines": 100}, "Mixed work"),
        ("network_task", "test task", "requests successful"),
        ("default", {"seconds": 0.01}, "completed in"),
        ("test_job", {"seconds": 0.01}, "completed in"),
    ],
)
def test_busy_types(db: Database, type: str, payload: Any, says: str) -> None:
    result = db.wait_for(db.add(type, payload), "completed")["result"]
    assert says in str(result)


def test_a_failure_to_order(db: Database) -> None:
    id = db.add("io_intensive", "an invalid_job, please", max_attempts=2)
    job = db.wait_for(id, "failed")
    assert (job["error"], job["reason"]) == ("Invalid job content", "max_attempts")
    assert [attempt["outcome"] for attempt in db.attempts(id)] == ["retried", "failed"]


def test_a_welcome_mail(db: Database, shared: tuple[Database, Fleet], mailbox: tuple[Mailbox, Controller]) -> None:
    box, _ = mailbox
    db.wait_for(db.add("send_welcome_email", {"email": "ada@example.org", "name": "Ada"}), "completed")
    (message,) = box.messages
    assert message["To"] == "Ada <ada@example.org>"
    assert "Ada" in str(message)
    log = shared[1].workers[0].log.read_text()
    assert "Successfully sent welcome email to ada@example.org" in log


# Failures stay with their job


@pytest.mark.parametrize("place", ["throw", "throw_in_thread", "throw_in_process"])
@pytest.mark.parametrize(
    ("what", "error_type", "says"),
    [
        ("nul", "ValueError", "a NUL \\x00 and half a \\ud800 pair"),
        ("long", "ValueError", "xxx"),
        ("unreadable", "sample_app.Unreadable", "cannot be read"),
        ("rude", "sample_app.Rude", "cannot be read"),
        ("exit", "SystemExit", "3"),
        ("interrupt", "KeyboardInterrupt", "KeyboardInterrupt"),
        ("stop_iteration", None, "StopIteration"),
        ("generator_exit", None, "GeneratorExit"),
        ("cancelled", None, "CancelledError"),
        ("timeout", "TimeoutError", "TimeoutError"),
        ("group", "ExceptionGroup", "several"),
    ],
)
def test_whatever_is_raised_ends_that_job_alone(
    db: Database, place: str, what: str, error_type: str | None, says: str
) -> None:
    id = db.add(place, {"what": what}, max_attempts=1)
    job = db.wait_for(id, "failed")
    assert says in f"{job['error_type']} {job['error']}"
    assert len(job["error"]) < 5_000
    if error_type:
        assert job["error_type"] == error_type
    (attempt,) = db.attempts(id)
    assert (attempt["reason"], attempt["outcome"], attempt["attempt"]) == ("error", "failed", 1)
    assert attempt["worker_id"] == job["worker_id"]
    assert attempt["started_at"] <= attempt["finished_at"]
    # The traceback leads to the handler, wherever it ran.
    assert "sample_app.py" in attempt["traceback"]
    assert len(attempt["traceback"]) < 40_000


@pytest.mark.parametrize(
    ("type", "says"),
    [
        ("cancel_itself", "CancelledError"),
        ("exit_in_a_subtask", "SystemExit"),
        ("forget_super", "Forgetful, which cannot be told: .* has no attribute 'delay'"),
    ],
)
def test_a_handler_does_not_end_its_worker(db: Database, sample: WorkerProcess, type: str, says: str) -> None:
    job = db.wait_for(db.add(type, max_attempts=1), "failed")
    assert re.search(says, f"{job['error_type']}: {job['error']}")
    db.wait_for_all(db.add_many("nap", [{}] * 8), "completed")
    assert sample.process.poll() is None


def test_nor_does_what_a_handler_left_behind(db: Database, sample: WorkerProcess) -> None:
    """It cancels the task of a runner that has no job now."""
    id = db.add("cancel_later")
    db.wait_for(id, "completed")
    wait(lambda: [line for line in sample.events() if line.get("job") == id and line["message"] == "cancelled"])
    db.wait_for_all(db.add_many("nap", [{}] * 16), "completed")
    assert not sample.events("worker.broken")


def test_a_handler_that_cancels_itself_leaves_no_trace(db: Database) -> None:
    """Its task runs the next job, too."""
    for _ in range(2):
        ids = db.add_many("cancel_quietly", [{}] * 8)
        db.wait_for_all(ids, "completed")
        assert [db.job(id)["result"] for id in ids] == [0] * 8


@pytest.mark.parametrize("place", ["give", "give_in_thread", "give_in_process"])
@pytest.mark.parametrize("what", ["object", "nan", "nul", "surrogate", "huge", "endless", "big_number"])
def test_a_result_that_cannot_be_stored_fails_at_once(db: Database, place: str, what: str) -> None:
    id = db.add(place, {"what": what})
    job = db.wait_for(id, "failed")
    assert (job["reason"], job["attempt"]) == ("bad_result", 1)
    assert job["error"]
    assert len(db.attempts(id)) == 1


@pytest.mark.parametrize("place", ["give", "give_in_thread", "give_in_process"])
def test_no_result_is_fine(db: Database, place: str) -> None:
    assert db.wait_for(db.add(place, {"what": "nothing"}), "completed")["result"] is None


@pytest.mark.parametrize("payload", ["null", "7", '"text"', "[1]", '{"seconds": "soon"}', '{"unknown": 1}'])
def test_a_payload_that_the_handler_does_not_take(db: Database, payload: str) -> None:
    id = db.value("INSERT INTO pgqueue.jobs (type, payload) VALUES ('work', %s) RETURNING id", payload)
    job = db.wait_for(id, "failed")
    assert (job["reason"], job["attempt"]) == ("undecodable", 1)
    assert db.effects(id) == []


@pytest.mark.parametrize(
    "payload",
    ['{"seconds": ' + "9" * 5_000 + "}", "[" * 2_000 + "]" * 2_000, '{"seconds": 1e400}'],
    ids=["a number too long", "too deep", "too large"],
)
def test_a_payload_that_python_cannot_read(db: Database, payload: str) -> None:
    good = db.add("work")
    id = db.value("INSERT INTO pgqueue.jobs (type, payload) VALUES ('work', %s) RETURNING id", payload)
    beside = db.add("work")
    assert db.wait_for(id, "failed")["reason"] == "undecodable"
    db.wait_for_all([good, beside], "completed")


@pytest.mark.parametrize(("type", "says"), [("abort_in_process", "signal SIGABRT"), ("exit_in_process", "exit code 0")])
def test_a_process_that_dies_takes_only_its_own_job_along(
    db: Database, sample: WorkerProcess, type: str, says: str
) -> None:
    beside = db.add_many("nap_in_process", [{"seconds": 0.5}] * 2)
    id = db.add(type, max_attempts=2)
    job = db.wait_for(id, "failed")
    assert says in job["error"]
    assert (job["attempt"], job["lost"], job["reason"]) == (2, 0, "max_attempts")
    db.wait_for_all(beside, "completed")
    assert {db.job(each)["attempt"] for each in beside} == {1}
    assert sample.process.poll() is None


@pytest.mark.parametrize("type", ["end_helpers_in_thread", "end_helpers_in_process"])
def test_a_handler_may_have_processes_of_its_own_and_end_them(db: Database, sample: WorkerProcess, type: str) -> None:
    assert db.wait_for(db.add(type), "completed")["result"] == [-signal.SIGTERM] * 2
    assert not sample.events("worker.stopping")


def test_a_killed_process_frees_its_slot_though_its_fork_lives(db: Database, tmp_path: Path) -> None:
    id = db.add("fork_and_hang", {"path": str(tmp_path / "end")}, max_attempts=1)
    try:
        assert "timeout" in db.wait_for(id, "failed")["error"]
    finally:
        (tmp_path / "end").touch()


def test_what_cannot_be_read_stays_with_its_job(db: Database) -> None:
    """It is no answer to another job that the same process is given next."""
    id = db.add("log_in_riddles")
    assert db.wait_for(id, "completed")["result"] == id
    assert "cannot be read" in db.wait_for(db.add("ask_in_riddles", max_attempts=1), "failed")["error"]
    for id in [db.add("id_in_process") for _ in range(3)]:
        assert db.wait_for(id, "completed")["result"] == id


def test_a_process_that_nobody_waits_for_any_more_gets_no_other_job(db: Database) -> None:
    job = db.wait_for(db.add("impatient", max_attempts=1), "failed")
    assert job["error_type"] == "TimeoutError"
    for id in [db.add("id_in_process", {"seconds": 1}) for _ in range(2)]:
        assert db.wait_for(id, "completed")["result"] == id


def test_threads_that_nobody_waits_for_any_more_keep_no_job_from_running(db: Database) -> None:
    """As many as the worker has, of handlers and of chunks."""
    try:
        db.wait_for_all(db.add_many("impatient_in_thread", [{}] * 8, max_attempts=1), "failed")
        db.wait_for(db.add("hanging_chunks_in_threads", thread_demand=8, max_attempts=1), "failed")
        ids = [*db.add_many("nap_in_thread", [{}] * 8), db.add("sum_a_million", thread_demand=8)]
        db.wait_for_all(ids, "completed")
        assert {db.job(id)["attempt"] for id in ids} == {1}
    finally:
        db.wait_for(db.add("end_threads"), "completed")


def test_a_thread_that_outlives_its_job_speaks_for_no_other(db: Database) -> None:
    first = db.add("leave_a_thread")
    pid = db.wait_for(first, "completed")["result"]
    assert db.wait_for(db.add("follow_a_thread"), "completed")["result"] == [pid, "LeaseLost", "LeaseLost", "mine"]
    assert not db.values("SELECT id FROM pgqueue.jobs WHERE payload = %s", Jsonb({"of": first}))


def test_a_process_that_does_not_read_keeps_only_its_own_job(db: Database) -> None:
    """It stands still, its job does not fit into the pipe, and somebody cancels that."""
    pid = db.wait_for(db.add("nap_in_process"), "completed")["result"]
    os.kill(pid, signal.SIGSTOP)
    id = db.add("measure", {"text": "x" * 1_000_000})
    wait(lambda: db.job(id)["status"] == "running", "it has been claimed")
    db.wait_for(db.add("nap"), "completed")
    db.cancel(id)
    db.wait_for(id, "cancelled")
    db.wait_for(db.add("nap"), "completed")
    assert not Path(f"/proc/{pid}").exists()


def test_chunks_that_die_fail_their_job_and_no_other(db: Database) -> None:
    id = db.add("dying_chunks", max_attempts=1, thread_demand=2)
    assert "died" in db.wait_for(id, "failed")["error"]
    assert db.wait_for(db.add("chunks_in_processes", thread_demand=2), "completed")["result"] == 28


@pytest.mark.parametrize("type", ["hanging_chunks", "hanging_chunks_of_a_thread", "hanging_chunks_of_a_process"])
def test_chunks_end_with_their_job(db: Database, type: str) -> None:
    db.run("DELETE FROM effects WHERE note = 'a chunk hangs'")
    id = db.add(type, thread_demand=2)
    hanging = "SELECT pid FROM effects WHERE note = 'a chunk hangs'"
    wait(lambda: len(db.values(hanging)) == 2, "both run")
    db.cancel(id)
    db.wait_for(id, "cancelled")
    wait(lambda: not any(Path(f"/proc/{pid}").exists() for pid in db.values(hanging)), "their processes are gone")


def test_a_process_that_waits_for_chunks_times_out(db: Database) -> None:
    """The worker's thread that waits for them in its stead ends with it, and its slots are free."""
    id = db.add("hanging_chunks_of_a_process", thread_demand=8, max_attempts=1, timeout="2 s")
    assert db.wait_for(id, "failed")["error_type"] == "JobTimeout"
    db.wait_for(db.add("hold", {"seconds": 0}, thread_demand=8), "completed")


# What a handler may say


def test_give_up(db: Database) -> None:
    id = db.add("give_up")
    job = db.wait_for(id, "failed")
    assert (job["reason"], job["attempt"], job["error"]) == ("gave_up", 1, "it makes no sense")


def test_retry_later(db: Database) -> None:
    id = db.add("later", {"seconds": 0.7})
    job = db.wait_for(id, "completed")
    (attempt,) = db.attempts(id)
    assert 0.7 <= (job["started_at"] - attempt["finished_at"]).total_seconds() < 10
    assert (attempt["error"], job["result"], job["attempt"]) == ("not yet", 2, 2)


def test_snooze_spends_no_attempt(db: Database) -> None:
    id = db.add("snooze", {"seconds": 0.2, "times": 2}, max_attempts=1)
    job = db.wait_for(id, "completed")
    assert job["result"] == {"attempt": 1, "runs": 3}
    assert db.attempts(id) == []
    starts = [effect["at"] for effect in db.effects(id)]
    assert all((later - earlier).total_seconds() >= 0.2 for earlier, later in pairwise(starts))


def test_the_context_knows_the_job(db: Database) -> None:
    id = db.add("about", queue="shop", max_attempts=3, timeout="20 s", idempotency_key="k-1", thread_demand=2)
    result = db.wait_for(id, "completed")["result"]
    assert 10 < result.pop("remaining") <= 20
    assert result == {
        "id": id,
        "type": "about",
        "queue": "shop",
        "attempt": 1,
        "max_attempts": 3,
        "last": False,
        "timeout": 20,
        "key": "k-1",
        "threads": 2,
    }
    other = db.wait_for(db.add("about", max_attempts=1), "completed")
    key = f"pgqueue:{other['id']}:{other['created_at'].timestamp():.6f}"  # ids alone are not unique outside
    assert (other["result"]["key"], other["result"]["last"]) == (key, True)


@pytest.mark.parametrize("type", ["parent", "parent_in_thread", "parent_in_process"])
def test_a_handler_adds_jobs(db: Database, type: str) -> None:
    id = db.add(type)
    child = db.wait_for(db.wait_for(id, "completed")["result"], "completed")
    assert (child["type"], child["result"]) == ("child", id)


@pytest.mark.parametrize("type", ["report", "report_in_process"])
def test_progress_is_in_the_row_while_the_job_runs(db: Database, type: str) -> None:
    id = db.add(type)
    progress = wait(lambda: db.job(id)["progress"], "there is progress")
    assert (progress["done"], progress["total"]) == (1, 2)
    assert db.job(id)["status"] == "running"
    db.cancel(id)
    db.wait_for(id, "cancelled")


def test_progress_that_cannot_be_stored_harms_nobody(db: Database) -> None:
    bad = db.add("report_badly")
    good = db.add("report", {"message": "fine"})
    wait(lambda: db.job(good)["progress"], "there is progress")
    for id in (bad, good):
        db.cancel(id)
        db.wait_for(id, "cancelled")


def test_ctx_log_names_the_job(db: Database, sample: WorkerProcess) -> None:
    id = db.add("report", {"seconds": 0})
    db.wait_for(id, "completed")
    line = next(line for line in sample.events() if line.get("job") == id and line["message"] == "reporting")
    assert (line["worker"], line["step"], line["type"]) == ("sample", 1, "report")


def test_chunks_run_at_the_same_time_on_the_slots_of_the_job(db: Database) -> None:
    id = db.add("chunks_that_meet", thread_demand=4)
    job = db.wait_for(id, "completed")
    assert len(job["result"]) == 4
    assert len(set(job["result"])) == 4
    assert db.value("SELECT count(*) FROM pgqueue.steps WHERE job_id = %s", id) == 4


def test_two_lambdas_are_two_functions(db: Database) -> None:
    """Though they have one name."""
    assert db.wait_for(db.add("chunks_of_two_lambdas"), "completed")["result"] == [[6], [3]]


def test_a_million_numbers_in_four_chunks(db: Database) -> None:
    id = db.add("sum_a_million", thread_demand=4)
    assert db.wait_for(id, "completed")["result"] == 499_999_500_000
    assert db.value("SELECT count(*) FROM pgqueue.steps WHERE job_id = %s", id) == 4


def test_chunks_from_a_process(db: Database) -> None:
    assert db.wait_for(db.add("chunks_from_process", thread_demand=3), "completed")["result"] == 4950


def test_a_retry_does_only_the_chunks_that_are_missing(db: Database) -> None:
    id = db.add("sum_fragile", thread_demand=4)
    job = db.wait_for(id, "completed")
    assert (job["result"], job["attempt"]) == (4950, 2)
    runs = db.rows("SELECT note, count(*) FROM effects WHERE note LIKE 'chunk %%' GROUP BY 1 ORDER BY 1")
    assert {row["note"]: row["count"] for row in runs} == {"chunk 0": 1, "chunk 25": 1, "chunk 50": 1, "chunk 75": 2}


def test_middlewares_wrap_every_attempt(db: Database) -> None:
    well, badly = db.add("traced_well"), db.add("traced_badly", max_attempts=1)
    assert db.wait_for(well, "completed")["result"] == {"wrapped": "fine"}
    notes = [effect["note"] for effect in db.effects(well)]
    assert notes == ["outer: before", "inner: before", "handler", "inner: after", "outer: after"]
    db.wait_for(badly, "failed")
    notes = [effect["note"] for effect in db.effects(badly)]
    assert notes == ["outer: before", "inner: before", "handler", "outer: ValueError", "outer: after"]


# Time and cancellation


@pytest.mark.parametrize("type", ["wait_async", "wait_in_thread", "wait_in_process", "ignore_in_process"])
def test_timeouts(db: Database, type: str) -> None:
    """A coroutine is cancelled, a process killed, a thread told at its next ctx.check()."""
    id = db.add(type, timeout="0.6 s", max_attempts=1)
    job = db.wait_for(id, "failed")
    (attempt,) = db.attempts(id)
    assert (attempt["reason"], job["error_type"]) == ("timeout", "JobTimeout")
    assert 0.6 <= (attempt["finished_at"] - attempt["started_at"]).total_seconds() < 10


def test_a_job_that_timed_out_is_tried_again(db: Database) -> None:
    id = db.add("nap_in_process", {"seconds": 60}, timeout="0.3 s", max_attempts=2)
    db.wait_for(id, "failed")
    assert [attempt["reason"] for attempt in db.attempts(id)] == ["timeout", "timeout"]


def test_the_types_own_timeout(db: Database) -> None:
    id = db.add("short_of_time", max_attempts=1)
    assert "0.2 s" in db.wait_for(id, "failed")["error"]


@pytest.mark.parametrize("type", ["wait_async", "wait_in_thread", "wait_in_process"])
def test_cancelling_reaches_the_handler_within_a_second(db: Database, type: str) -> None:
    took: list[float] = []
    # A busy machine may be late, but not three times in a row.
    while not took or (took[-1] >= 1 and len(took) < 3):
        id = db.add(type)
        db.wait_for_effect(id, "started")
        asked = db.value("SELECT clock_timestamp()")
        db.cancel(id)
        took.append((db.wait_for_effect(id, "told")["at"] - asked).total_seconds())
        job = db.wait_for(id, "cancelled")
        assert (job["reason"], job["finished_at"] is not None) == ("cancelled", True)
        (attempt,) = db.attempts(id)
        assert (attempt["outcome"], attempt["reason"]) == ("cancelled", "cancelled")
    assert min(took) < 1


def test_a_process_that_does_not_listen_is_killed_soon_after_it_was_cancelled(db: Database) -> None:
    id = db.add("ignore_in_process")
    pid = db.wait_for_effect(id, "started")["pid"]
    db.cancel(id)
    db.wait_for(id, "cancelled", 10)
    wait(lambda: not Path(f"/proc/{pid}").exists(), "its process is gone", 10)


def test_cancelling_one_job_does_not_harm_the_next_in_a_process(db: Database) -> None:
    """The order to end its process must not reach the next job."""
    id = db.add("wait_in_process")
    db.wait_for_effect(id, "started")
    db.cancel(id)
    db.wait_for(id, "cancelled")
    db.wait_for_all(db.add_many("nap_in_process", [{"seconds": 1.3}] * 2), "completed")


def test_a_cancellation_during_a_middleware_does_not_harm_the_next_in_the_same_process(db: Database) -> None:
    first = db.add("followed")
    db.wait_for_effect(first, "followed")
    second = db.add("wait_in_process", {"seconds": 1})
    assert db.wait_for_effect(second, "started")["pid"] == db.wait_for_effect(first)["pid"]
    db.cancel(first)
    db.wait_for(first, "cancelled")
    db.wait_for(second, "completed")


def test_a_cancelled_job_that_fails_is_not_tried_again(db: Database) -> None:
    id = db.add("stubborn")
    db.wait_for_effect(id, "started")
    db.cancel(id)
    job = db.wait_for(id, "cancelled")
    assert job["error"] == "ValueError: never"
    assert len(db.effects(id, "started")) == 1


def test_a_handler_that_ignores_its_cancellation_may_complete(db: Database) -> None:
    id = db.add("ignore_async")
    db.wait_for_effect(id, "started")
    db.cancel(id)
    db.wait_for_effect(id, "ignored")
    db.wait_for(id, "completed")


# Attempts, and the dead letter queue


@pytest.mark.parametrize(("max_attempts", "payload"), [(1, "first"), (4, "second")])
def test_a_job_has_as_many_attempts_as_it_says(db: Database, max_attempts: int, payload: str) -> None:
    id = db.add("fail_fast", {"text": payload}, max_attempts=max_attempts, queue="shop", tags=["a"], name="mine")
    job = db.wait_for(id, "failed")
    assert len(db.effects(id)) == max_attempts
    attempts = db.attempts(id)
    assert [each["attempt"] for each in attempts] == list(range(1, max_attempts + 1))
    assert [each["outcome"] for each in attempts] == ["retried"] * (max_attempts - 1) + ["failed"]
    assert all(each["error"] == payload and each["error_type"] == "ValueError" for each in attempts)
    assert all("raise ValueError(text)" in each["traceback"] for each in attempts)
    (dead,) = db.rows("SELECT * FROM pgqueue.failed_jobs WHERE id = %s", id)
    assert (dead["error"], dead["reason"], dead["attempts"]) == (payload, "max_attempts", max_attempts)
    assert (dead["payload"], dead["queue"], dead["name"]) == ({"text": payload}, "shop", "mine")
    assert dead["failed_at"] == job["finished_at"]


def test_a_dead_job_comes_back_by_hand_only(db: Database) -> None:
    id = db.add("fail_fast", max_attempts=1)
    db.wait_for(id, "failed")
    time.sleep(0.7)
    assert db.job(id)["status"] == "failed"
    db.run("SELECT pgqueue.retry_job(%s, 'once more')", id)
    wait(lambda: len(db.effects(id)) == 2, "it ran again")
    db.wait_for(id, "failed")
    assert len(db.attempts(id)) == 2, "its history is gone"

    # This one succeeds the second time, and leaves the dead letter queue.
    id = db.add("zombie", {"what": "give_up"})
    db.wait_for(id, "failed")
    assert db.value("SELECT count(*) FROM pgqueue.failed_jobs WHERE id = %s", id) == 1
    db.run("SELECT pgqueue.retry_job(%s)", id)
    assert db.wait_for(id, "completed")["attempt"] == 1
    assert db.value("SELECT count(*) FROM pgqueue.failed_jobs WHERE id = %s", id) == 0
    assert [each["reason"] for each in db.attempts(id)] == ["gave_up"]
    assert db.values("SELECT action FROM pgqueue.audit WHERE job_id = %s", id) == ["retry"]


def test_backoff_has_a_cap(db: Database) -> None:
    id = db.add("fail", max_attempts=20, run_at="2999-01-01")
    db.run("UPDATE pgqueue.jobs_live SET attempt = 10 WHERE id = %s", id)
    db.run("SELECT pgqueue.retry_job(%s)", id)
    (attempt,) = wait(lambda: db.attempts(id), "it has failed once more")
    job = db.job(id)
    assert 60 <= (job["run_at"] - attempt["finished_at"]).total_seconds() < 70
    assert (job["attempt"], job["status"]) == (11, "scheduled")


def test_jitter_spreads_jobs_that_failed_together(db: Database) -> None:
    wait(lambda: db.value("SELECT count(*) FROM pgqueue.jobs WHERE name = 'together' AND status = 'failed'") == 50)
    # run_at is when they were due for the last time.
    delays = db.values(
        "SELECT extract(epoch FROM j.run_at - a.finished_at)::float8 FROM pgqueue.jobs j"
        " JOIN pgqueue.attempts a ON a.job_id = j.id AND a.attempt = 1 WHERE j.name = 'together'"
    )
    # Between one second and two, and as much more as passed until they were written.
    assert 0.95 < min(delays) < max(delays) < 7
    assert max(delays) - min(delays) > 0.4
    assert len({round(delay, 3) for delay in delays}) > 30


def test_pauses_of_one_two_four_and_eight_seconds(db: Database) -> None:
    id = db.value("SELECT id FROM pgqueue.jobs WHERE name = 'always'")
    job = db.wait_for(id, "failed", 40)
    assert (job["attempt"], job["reason"]) == (5, "max_attempts")
    attempts = db.attempts(id)
    pauses = [(later["started_at"] - earlier["finished_at"]).total_seconds() for earlier, later in pairwise(attempts)]
    # Up to a second of jitter, and something for the slowness of machines.
    assert all(base - 0.05 <= pause < base + 6 for base, pause in zip((1, 2, 4, 8), pauses, strict=True)), pauses


def test_the_worker_is_as_it_was(db: Database, sample: WorkerProcess) -> None:
    """After all this: nothing runs, every slot is free, and every kind of job works."""
    wait(lambda: db.value("SELECT count(*) FROM pgqueue.jobs WHERE status = 'running'") == 0, "nothing runs")
    db.wait_for_all(db.add_many("nap_in_thread", [{}] * 8) + db.add_many("nap_in_process", [{}] * 2), "completed")
    whole = db.add("hold", {"seconds": 0}, thread_demand=8)
    assert db.wait_for(whole, "completed")["result"] == {"threads": 8, "held": 8}
    assert db.rows("SELECT id FROM pgqueue.jobs WHERE status = 'running'") == []
    assert not [line for line in sample.events() if line["level"] in ("error", "critical")]
