"""Handlers that do not give the event loop back: timeouts and signals are kept all the same, at worst by the worker's
end. The cases happen at the same time, each on a worker of its own."""

import os
import signal
import time

import pytest

from tests.worker.processes import GRACE, Database, Fleet, wait

pytestmark = pytest.mark.parametrize("server", ["pg18"], indirect=True, scope="session")


def test_a_handler_that_blocks_the_loop_ends_at_its_timeout(db: Database, fleet: Fleet) -> None:
    queues = ["plain", "effect", "subtask", "deaf"]
    workers = {queue: fleet.start(queue, queues=queue, threads=3, ready=False) for queue in queues}
    types = ["block_past_the_timeout", "block_in_its_effect", "block_in_a_subtask", "block_and_ignore"]
    blocking = {queue: db.add(type, queue=queue, max_attempts=1) for queue, type in zip(queues, types, strict=True)}

    # It fails as one that can be cancelled, and its worker goes on.
    job = db.wait_for(blocking["plain"], "failed")
    [attempt] = db.attempts(blocking["plain"])
    assert (job["attempt"], job["lost"], attempt["reason"], attempt["error_type"]) == (1, 0, "timeout", "JobTimeout")
    assert "in block_past_the_timeout (" in attempt["error"], "it does not say where"
    db.wait_for(db.add("work", queue="plain"), "completed")

    # What it says after it was interrupted is no word on its effect.
    job = db.wait_for(blocking["effect"], "failed")
    assert (job["reason"], job["attempt"], job["lost"]) == ("in_doubt", 1, 0)
    db.wait_for(db.add("work", queue="effect"), "completed")

    # What cannot be interrupted ends its worker, and is lost as in a crash.
    for queue in ("subtask", "deaf"):
        assert workers[queue].wait() == 1
        [words] = workers[queue].events("worker.stuck")
        assert "sample_app.py" in words["message"]
    fleet.start("heir", queues="none")
    for queue in ("subtask", "deaf"):
        wait(lambda id=blocking[queue]: db.job(id)["lost"] == 1, "it was rescued")  # type: ignore[misc]


def test_a_worker_whose_loop_is_blocked_stops_within_its_grace(db: Database, fleet: Fleet) -> None:
    blocked = fleet.start("blocked", queues="blocked", threads=3)
    id = db.add("block_for_ever", queue="blocked")
    wait(lambda: db.job(id)["status"] == "running", "it runs")
    waiting = db.add("work", queue="blocked")
    wait(lambda: blocked.events("loop.blocked"), "it is told of")
    assert f"job {id} block_for_ever" in blocked.events("loop.blocked")[0]["message"]
    assert blocked.stop() < GRACE + 2
    assert (db.job(id)["status"], db.job(id)["attempt"], db.job(id)["lost"]) == ("pending", 0, 0)
    assert db.job(waiting)["status"] == "pending"
    assert not db.attempts(id)


def test_a_second_signal_is_heard_at_once(db: Database, fleet: Fleet) -> None:
    blocked = fleet.start("blocked", queues="blocked", PGQUEUE_SHUTDOWN_GRACE="600")
    id = db.add("block_for_ever", queue="blocked")
    wait(lambda: db.job(id)["status"] == "running", "it runs")
    blocked.signal(signal.SIGTERM)
    time.sleep(0.2)  # two signals that come at once are one
    blocked.signal(signal.SIGTERM)
    assert blocked.wait() == 0
    assert (db.job(id)["status"], db.job(id)["lost"]) == ("pending", 0)


def test_a_worker_whose_log_nobody_reads_stops_all_the_same(db: Database, fleet: Fleet) -> None:
    log = fleet.directory / "w.log"
    os.mkfifo(log)
    reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    try:
        worker = fleet.start("w", ready=False)
        # Its handler ends at its timeout; then the worker itself has something to log.
        db.wait_for(db.add("flood_the_log", max_attempts=1), "failed")
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 1
    finally:
        os.close(reader)
        log.unlink()
        log.touch()
