"""NOTIFY, when it cannot be had, makes everything slower and stops nothing: enqueues, workers, operators."""

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import pytest

from pgqueue import listen, migrate
from pgqueue.db import connect
from pgqueue.embedded import PostgresServer, start_postgres
from pgqueue.idempotency import Effect, begin_effect
from pgqueue.job import Lease, NewJob
from pgqueue.listen import Listener
from pgqueue.wake import wake
from pgqueue.worker.finisher import settle
from pgqueue.workers import mark_idle
from tests.chaos.lab import until
from tests.db.queue import MiniWorker, add
from tests.worker.processes import Database, Fleet, wait

SETTINGS = {
    # Who asks for it waits for a standby that never comes, and keeps the lock that all NOTIFYs of the server need.
    "synchronous_standby_names": "ghost",
    "synchronous_commit": "local",
    "max_notify_queue_pages": "64",
}
INSERT = "INSERT INTO pgqueue.jobs (type) VALUES ('nap')"


@pytest.fixture(scope="module")
def own() -> Iterator[PostgresServer]:
    place = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="pgqueue-", dir=place) as directory:
        Path(directory).chmod(0o711)
        server = start_postgres(Path(directory), fast=True, settings=SETTINGS)
        try:
            migrate.up(server.dsn)
            with psycopg.connect(server.dsn, autocommit=True) as conn:
                conn.execute("ALTER ROLE CURRENT_USER SET search_path = public")
            yield server
        finally:
            server.stop("immediate")


@pytest.fixture
def db(own: PostgresServer) -> Iterator[Database]:
    database = Database(own.dsn)
    database.run("TRUNCATE pgqueue.jobs, pgqueue.workers, pgqueue.drains")
    yield database
    database.close()


@contextmanager
def hung_notify(db: Database) -> Iterator[None]:
    """Somebody else's commit, with a NOTIFY on a channel that is none of ours."""

    def hang() -> None:
        with psycopg.connect(db.dsn, autocommit=True) as conn:
            conn.execute("SET synchronous_commit = on")
            # What writes nothing would wait for nobody.
            conn.execute("INSERT INTO effects (note) SELECT pg_notify('elsewhere', '')::text")

    waiting = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    thread = threading.Thread(target=hang, daemon=True)
    thread.start()
    pid = wait(lambda: db.value(waiting), "it hangs")
    limit = threading.Timer(120, let_go, [db.dsn, pid])
    limit.start()
    try:
        yield
        assert db.value(waiting) == pid, "it did not hang until the end"
    finally:
        limit.cancel()
        let_go(db.dsn, pid)
        thread.join(10)


def let_go(dsn: str, pid: int) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("SELECT pg_cancel_backend(%s)", [pid])  # that ends only its wait


def insert(db: Database, lock_timeout: str = "500ms") -> bool:
    """Whether it went through; a producer that does not want to wait says so."""
    with psycopg.connect(db.dsn, autocommit=True) as conn:
        conn.execute("SELECT set_config('lock_timeout', %s, false)", [lock_timeout])
        try:
            conn.execute(INSERT)
        except psycopg.errors.LockNotAvailable:
            return False
    return True


def test_a_notify_that_hangs_stops_nobody(db: Database, fleet: Fleet) -> None:
    fleet.start_all(["a", "b"])
    long = db.add("nap", {"seconds": 60})
    db.wait_for(long, "running")
    wait(lambda: db.is_idle("a") or db.is_idle("b"), "one can be woken")
    with hung_notify(db):
        patient = threading.Thread(target=insert, args=[db, "0"], daemon=True)
        patient.start()
        wait(lambda: db.value("SELECT count(*) FROM pg_locks WHERE classid = 1262 AND NOT granted"), "it is held up")
        before = db.value("SELECT count(*) FROM pgqueue.jobs")
        went_through = insert(db)  # if they have noticed by now
        added = db.value("SELECT count(*) FROM pgqueue.jobs") - before
        assert added == went_through, "held up, it says so, and has not added a job"
        wait(lambda: insert(db), "enqueues go through", 15)
        assert all(insert(db) for _ in range(20))
        db.add("nap", run_at=db.value("SELECT now() + interval '0.5 s'"))
        retried = db.add("fail_once")
        db.cancel(long)
        db.wait_for(long, "cancelled")
        db.wait_for(retried, "completed")
        wait(lambda: not db.value("SELECT count(*) FROM pgqueue.jobs_live"), "workers poll, promote and finish")
        assert patient.is_alive(), "who is in the middle of its commit waits for its end"
    patient.join(10)
    wait(lambda: db.is_idle("a") and db.is_idle("b"), "both can be woken again", 30)
    wait(lambda: not db.value("SELECT count(*) FROM pgqueue.jobs_live"), "all is done")


async def test_a_listener_sees_that_somebody_hangs(
    own: PostgresServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before its own ping does, or anybody waits; it says so once."""
    monkeypatch.setattr(listen, "PING_EVERY", 600)
    monkeypatch.setattr(listen, "LOCK_WITHIN", "100ms")
    db = await asyncio.to_thread(Database, own.dsn)
    listener = Listener(own.dsn, "ear", lambda payload: None, "pgqueue-listen w")
    listening = asyncio.create_task(listener.run())
    try:
        await until(lambda: listener.hears, "it hears")
        with hung_notify(db):
            await until(lambda: not listener.hears, "it has noticed", 20)
            await asyncio.sleep(1.5)  # it tries again meanwhile
        await until(lambda: listener.hears, "it hears again", 30)
        said = [record.message for record in caplog.records if record.name == "pgqueue.listen"]
        assert [text[:12] for text in said] == ["NOTIFY hangs"], said
    finally:
        listening.cancel()
        await asyncio.wait([listening])
        db.close()


async def test_who_wakes_others_does_not_wait_for_long(own: PostgresServer, db: Database) -> None:
    conn = await connect(own.dsn)
    try:
        worker = await MiniWorker(conn).register(listening=True)
        await mark_idle(conn, worker.who.worker_id)
        assert await wake(conn, ["default"], ["nap"], [1])
        with hung_notify(db):
            assert not await wake(conn, ["default"], ["nap"], [1])
        assert await wake(conn, ["default"], ["nap"], [1])
    finally:
        await conn.close()


async def test_what_is_given_back_with_its_effect_is_written_all_the_same(own: PostgresServer, db: Database) -> None:
    conn = await connect(own.dsn)
    try:
        await add(conn, NewJob(type="nap"))
        worker, idle = [await MiniWorker(conn).register(listening=True) for _ in range(2)]
        [job] = await worker.claim()
        await mark_idle(conn, idle.who.worker_id)
        lease, effect = Lease(job.id, worker.tokens[job.id]), Effect("mail", True, 60)
        await begin_effect(conn, lease, effect)
        with hung_notify(db):
            assert await settle(conn, lease, effect) == {job.id: None}
        assert db.job(job.id)["status"] == "pending"
        assert db.value("SELECT count(*) FROM pgqueue.effects") == 0
    finally:
        await conn.close()


def test_a_full_notification_queue_stops_nobody(db: Database, fleet: Fleet) -> None:
    fleet.start("w")
    long = db.add("nap", {"seconds": 60})
    db.wait_for(long, "running")
    with psycopg.connect(db.dsn, autocommit=True) as listener:
        listener.execute("LISTEN elsewhere")
        listener.execute("BEGIN")
        listener.execute("SELECT 1")
        fill(db)
        ids = [db.add("nap") for _ in range(5)]
        db.cancel(long)
        db.wait_for(long, "cancelled")
        db.wait_for_all(ids, "completed")
        with pytest.raises(psycopg.errors.ProgramLimitExceeded):
            db.run("SELECT pg_notify('elsewhere', repeat('x', 7000))")
        listener.execute("COMMIT")
    wait(lambda: db.value("SELECT pg_notification_queue_usage()") < 0.1, "there is room again")
    wait(lambda: db.is_idle("w"), "it can be woken again", 30)


def fill(db: Database) -> None:
    for size in (7000, 1):
        with suppress(psycopg.errors.ProgramLimitExceeded):
            while True:
                db.run("SELECT pg_notify('elsewhere', repeat('x', %s) || random())", size)
