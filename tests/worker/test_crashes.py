"""Workers that die, hang, come back from the dead, or take too long to be believed alive."""

import asyncio
import os
import random
import signal
import time
from pathlib import Path

import psycopg
import pytest

from pgqueue import Context, PgQueue, workers
from pgqueue.rescue import rescue
from tests.db.queue import MiniWorker
from tests.once.inside import worker_inside
from tests.worker.processes import LONG_LEASE, SHORT_LEASE, Database, Fleet, wait, worker_id

pytestmark = pytest.mark.parametrize("server", ["pg18"], indirect=True)


def test_jobs_of_a_killed_worker_are_done_by_another_in_time_and_once(db: Database, fleet: Fleet) -> None:
    first, second, third = fleet.start_all(["w1", "w2", "w3"])
    ids = db.add_many("stuck_once", [{}] * 12)
    wait(lambda: len(db.effects(note="started")) == 12, "all of them run")
    gone = [worker_id(db, "w1"), worker_id(db, "w2")]
    theirs = db.values("SELECT id FROM pgqueue.jobs WHERE worker_id = ANY (%s)", gone)
    assert theirs
    first.kill()
    second.kill()
    # Nobody remembers the second one, and a new one has the name, the host and perhaps the process id of the first.
    db.run("DELETE FROM pgqueue.workers WHERE id = %s", gone[1])
    fleet.start("w1", ready=False)
    db.bury()
    db.wait_for_all(theirs, "completed", 10)
    rest = [id for id in ids if id not in theirs]
    assert db.statuses(rest) == {"running": len(rest)}, "a live worker's jobs were taken from it"
    done = [effect["job_id"] for effect in db.effects(note="done")]
    assert sorted(done) == sorted(theirs)
    for id in theirs:
        job, (attempt,) = db.job(id), db.attempts(id)
        assert (job["attempt"], job["lost"]) == (1, 1), "a lost worker is not the handler's failure"
        assert (attempt["outcome"], attempt["reason"], attempt["worker_id"] in gone) == ("retried", "worker_lost", True)
    assert db.values("SELECT state FROM pgqueue.workers WHERE id = %s", gone[0]) == ["unavailable"]
    third.signal(signal.SIGTERM)
    third.signal(signal.SIGTERM)


async def test_a_handler_is_told_that_its_lease_is_lost(
    conn: psycopg.AsyncConnection, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgqueue.worker.janitor.RECONCILE_AFTER", 0.2)
    app = PgQueue()
    told, started, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @app.job
    async def loses(ctx: Context) -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            told.set()

    @app.job
    async def writes(ctx: Context) -> None:
        async with ctx.transaction():
            pass
        await told.wait()
        await asyncio.sleep(1)  # its lease is gone as well, and that is as it should be
        ended.set()

    async with worker_inside(app, dsn), asyncio.timeout(20):
        await conn.execute("INSERT INTO pgqueue.jobs (type) VALUES ('loses'), ('writes')")
        await started.wait()
        await conn.execute("UPDATE pgqueue.jobs_live SET lease_token = gen_random_uuid() WHERE type = 'loses'")
        await told.wait()
        await ended.wait()


async def test_a_worker_that_comes_back_after_its_lease_is_refused(
    db: Database, fleet: Fleet, conn: psycopg.AsyncConnection
) -> None:
    """Whatever it wants to do with the jobs, while another has them: complete, fail, put off, add jobs, keep steps."""
    kinds = ["complete", "fail", "give_up", "snooze", "enqueue", "progress", "chunks"]
    path = fleet.directory / "go on"
    zombie = fleet.start("zombie", threads=len(kinds), **SHORT_LEASE)
    ids = db.add_many("zombie", [{"what": kind, "path": str(path)} for kind in kinds])
    wait(lambda: len(db.effects(note="started")) == len(kinds), "all of them run")
    wait(lambda: (db.worker("zombie") or {})["state"] == "busy", "it is shown as busy")
    leases = db.rows("SELECT * FROM pgqueue.leases")
    assert len(leases) == len(kinds)
    assert all(lease["worker"] == "zombie" and not lease["expired"] for lease in leases)
    assert all(lease["lease_start"] < lease["lease_until"] for lease in leases)

    zombie.signal(signal.SIGSTOP)
    wait(lambda: db.value("SELECT bool_and(expired) FROM pgqueue.leases"), "its leases have run out")
    other = await MiniWorker(conn).register()
    assert (await rescue(conn)).jobs == len(kinds)
    assert (db.worker("zombie") or {})["state"] == "unavailable"
    jobs = await other.claim()
    assert sorted(job.id for job in jobs) == ids
    before = db.rows("SELECT * FROM pgqueue.jobs ORDER BY id")

    path.touch()
    zombie.signal(signal.SIGCONT)
    wait(lambda: len(db.effects(note="late")) == len(kinds), "the late ones have done what they wanted")
    wait(lambda: {event["job"] for event in zombie.events("job.lease_lost")} == set(ids), "all of them were refused")
    assert db.rows("SELECT * FROM pgqueue.jobs ORDER BY id") == before, "it changed a job that is not its own"
    assert db.value("SELECT count(*) FROM pgqueue.steps") == 0
    assert [each["reason"] for id in ids for each in db.attempts(id)] == ["worker_lost"] * len(kinds)
    assert await other.complete(jobs) == set(ids)

    # It is well again, and works.
    wait(lambda: (db.worker("zombie") or {})["state"] == "available", "it is available again")
    await workers.retire(conn, other.who.worker_id)
    db.wait_for_all(db.add_many("work", [{}] * 20), "completed")


def test_leases_are_renewed_however_long_a_job_takes(db: Database, fleet: Fleet) -> None:
    """Even if the handler blocks the event loop for longer than the lease: the heartbeat has a thread of its own."""
    path = fleet.directory / "end"
    fleet.start_all(["w1", "w2", "w3"], threads=1)
    ids = [db.add(type, {"path": str(path)}) for type in ("block_the_loop", "work")]
    db.wait_for_all(ids, "running")
    # Whoever renews nothing has what it had when it claimed.
    renewed = (
        "SELECT bool_and(w.expires_at > j.started_at + make_interval(secs => %s + 1))"
        " FROM pgqueue.jobs j JOIN pgqueue.workers w ON w.id = j.worker_id"
    )
    wait(lambda: db.value(renewed, LONG_LEASE), "both have been renewed")
    assert db.statuses(ids) == {"running": 2}
    path.touch()
    db.wait_for_all(ids, "completed")
    assert db.how_often() == dict.fromkeys(ids, 1)
    assert db.value("SELECT count(*) FROM pgqueue.attempts") == 0
    assert db.value("SELECT sum(lost) FROM pgqueue.jobs") == 0


def test_a_poisonous_job_does_not_take_its_neighbours_along(db: Database, fleet: Fleet) -> None:
    supervisor = fleet.start("w", processes=2, threads=8)
    with_poison = db.add_many("work", [{"seconds": 0.05}] * 24)
    poison = db.add("poison")
    with_poison += db.add_many("work", [{"seconds": 0.05}] * 25)
    wait(lambda: (db.bury(), db.job(poison)["status"] == "failed")[1], "it is in the dead letter queue", 40)
    job = db.job(poison)
    assert (job["reason"], job["lost"], job["error_type"]) == ("poison", 3, "WorkerLost")
    assert len(db.effects(poison)) == 3
    db.wait_for_all(with_poison, "completed")
    charged = db.values("SELECT DISTINCT attempt FROM pgqueue.jobs WHERE id = ANY (%s)", with_poison)
    assert charged == [1], "innocents were charged"
    assert db.value("SELECT max(lost) FROM pgqueue.jobs WHERE id = ANY (%s)", with_poison) <= 2
    assert len(supervisor.events("worker.died")) == 3
    assert [attempt["reason"] for attempt in db.attempts(poison)] == ["worker_lost"] * 3
    # And the fleet is whole again, and ends as one.
    wait(lambda: db.value("SELECT count(*) FROM pgqueue.workers") == 5, "those that died have been started again")
    wait(lambda: db.is_idle("w-1") and db.is_idle("w-2"), "both are back")
    supervisor.stop()
    assert not fleet.members()
    assert db.value("SELECT count(*) FROM pgqueue.workers WHERE stopped_at IS NOT NULL") == 2


def test_a_dead_child_is_started_again_and_none_outlives_the_supervisor(db: Database, fleet: Fleet) -> None:
    supervisor = fleet.start("w", processes=2)
    before = {name: db.worker(name) or {} for name in ("w-1", "w-2")}
    os.kill(before["w-1"]["pid"], signal.SIGKILL)
    wait(lambda: (db.worker("w-1") or {})["id"] != before["w-1"]["id"], "there is a new w-1")
    assert (db.worker("w-2") or {})["id"] == before["w-2"]["id"]
    wait(lambda: db.is_idle("w-1"), "it is ready")
    ids = db.add_many("work", [{"seconds": 0.2}] * 8)
    db.wait_for_all(ids, "completed")
    # One that was told to end is not.
    db.run("UPDATE pgqueue.workers SET draining = true WHERE id = %s", before["w-2"]["id"])
    assert wait(lambda: supervisor.events("worker.ended"), "it has drained")[0]["name"] == "w-2"
    supervisor.kill()
    wait(lambda: not fleet.members(), "its workers have ended")


def test_a_supervisor_does_not_wait_for_ever(db: Database, fleet: Fleet) -> None:
    supervisor = fleet.start("w", processes=2, PGQUEUE_SHUTDOWN_GRACE="0.5")
    os.kill(db.value("SELECT pid FROM pgqueue.workers WHERE name = 'w-1'"), signal.SIGSTOP)
    supervisor.signal(signal.SIGTERM)
    assert supervisor.wait() == signal.SIGKILL
    assert not fleet.members()


def test_no_process_outlives_its_worker(db: Database, fleet: Fleet) -> None:
    """Neither those that run handlers nor those that run chunks, whether the worker is killed or stopped."""
    killed, stopped = fleet.start_all(["killed", "stopped"], threads=2)
    db.wait_for_all(db.add_many("chunks_in_processes", [{}] * 2, thread_demand=2), "completed")
    asleep = db.add_many("ignore_in_process", [{}] * 4)
    wait(lambda: len(db.effects(note="started")) == 4, "all of them run")
    assert {effect["pid"] for effect in db.effects(note="started")} <= fleet.members().keys()
    assert len(fleet.members()) >= 2 + len(asleep)
    killed.kill()
    stopped.stop()
    wait(lambda: not fleet.members(), "nothing is left")


def test_nor_does_one_that_keeps_the_interpreter(db: Database, fleet: Fleet) -> None:
    """None of its threads hears of the worker's end."""
    worker = fleet.start(threads=1)
    pid = db.wait_for_effect(db.add("keep_the_interpreter"), "started")["pid"]
    assert pid in fleet.members()
    worker.kill()
    wait(lambda: not fleet.members(), "nothing is left", 5)


def test_a_worker_that_lost_a_part_of_itself_is_started_again(db: Database, fleet: Fleet) -> None:
    supervisor = fleet.start("w", processes=2)
    id = db.add("end_a_part")
    died = wait(lambda: supervisor.events("worker.died"), "one has ended, and not as it should")
    assert [event["message"] for event in supervisor.events("worker.broken")] == [
        "housekeeping ended unexpectedly; the worker stops"
    ]
    old = {each["id"] for each in db.rows("SELECT id FROM pgqueue.workers WHERE stopped_at IS NOT NULL")}
    assert len(old) == len(died) == 1
    wait(lambda: db.value("SELECT count(*) FROM pgqueue.workers") == 3, "there is a new one")
    wait(lambda: db.is_idle("w-1") and db.is_idle("w-2"), "both are back")
    db.wait_for(id, "completed")


def test_random_kills_leave_every_job_accounted_for(db: Database, fleet: Fleet) -> None:
    fleet.start("w", processes=3, threads=4)
    types = ["work"] * 6 + ["fail_fast", "fail_once", "snooze", "parent"]
    payloads = {"work": {"seconds": 0.05}, "snooze": {"seconds": 0.1, "times": 1}}
    chosen = random.Random(7)
    ids = []
    until = time.monotonic() + 4
    while time.monotonic() < until:
        for _ in range(3):
            type = chosen.choice(types)
            ids += db.add_many(type, [payloads.get(type, {})] * 5, max_attempts=3)
        db.bury()
        victims = db.values("SELECT pid FROM pgqueue.workers WHERE expires_at > now() AND stopped_at IS NULL")
        victims = [pid for pid in victims if Path(f"/proc/{pid}").exists()]
        if victims and chosen.random() < 0.5:
            os.kill(chosen.choice(victims), signal.SIGKILL)
        time.sleep(0.3)
    ended = {"completed", "failed"}
    wait(lambda: (db.bury(), db.statuses(ids).keys() <= ended)[1], "all of them have ended", 40)
    assert sum(db.statuses(ids).values()) == len(ids)
    types_of = {row["type"]: row["statuses"] for row in db.rows(FATES, ids)}
    assert types_of.pop("fail_fast") == ["failed"]
    assert all(statuses == ["completed"] for statuses in types_of.values())
    assert db.rows(BROKEN) == []
    assert all(count >= 1 for count in db.how_often().values())


FATES = "SELECT type, array_agg(DISTINCT status::text) AS statuses FROM pgqueue.jobs WHERE id = ANY (%s) GROUP BY 1"
BROKEN = """
SELECT id, status, attempt, lost FROM pgqueue.jobs
WHERE status IN ('completed', 'failed') AND (finished_at IS NULL OR started_at IS NULL OR worker_id IS NULL)
   OR status = 'running' AND (lease_token IS NULL OR worker_id IS NULL)
   OR status <> 'running' AND finished_at IS NULL AND lease_token IS NOT NULL
   OR finished_at < started_at OR attempt > max_attempts OR lost > 3
   OR status = 'failed' AND (reason IS NULL OR error IS NULL)
"""
