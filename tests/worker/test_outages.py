"""PostgreSQL comes late, restarts, crashes, and cuts connections: nothing is lost, and no worker needs a restart."""

import asyncio
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

from pgqueue import PgQueue, migrate
from pgqueue.embedded import PostgresServer, running_postgres, start_postgres
from pgqueue.job import NewJob
from pgqueue.settings import Settings
from pgqueue.sql import SQL
from pgqueue.worker.heartbeat import Heartbeat, Vitals
from pgqueue.worker.janitor import RECONCILE_AFTER, Janitor
from pgqueue.worker.link import Link
from pgqueue.worker.runtime import Runtime
from tests.db.queue import MiniWorker, add, value
from tests.once.inside import worker_inside
from tests.once.proxy import proxied
from tests.worker.processes import GRACE, LEASE, SHORT_LEASE, Database, Fleet, wait

on_18 = pytest.mark.parametrize("server", ["pg18"], indirect=True)

SETTINGS = {"synchronous_commit": "on", "shared_preload_libraries": "pg_stat_statements"}


@pytest.fixture(scope="module")
def own() -> Iterator[PostgresServer]:
    """A server that may be stopped and killed; it keeps what was committed."""
    place = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="pgqueue-", dir=place) as directory:
        Path(directory).chmod(0o711)
        server = start_postgres(Path(directory), fast=True, settings=SETTINGS)
        try:
            migrate.up(server.dsn)
            with psycopg.connect(server.dsn, autocommit=True) as conn:
                conn.execute("ALTER ROLE CURRENT_USER SET search_path = public")
                conn.execute("CREATE EXTENSION pg_stat_statements SCHEMA public")
            yield server
        finally:
            server.stop("immediate")


@pytest.fixture
def frail(own: PostgresServer, tmp_path: Path) -> Iterator[tuple[PostgresServer, Database, Fleet]]:
    db = Database(own.dsn)
    fleet = Fleet(own.dsn, tmp_path, db)
    try:
        yield own, db, fleet
    finally:
        fleet.close()
        db.close()


def test_a_worker_waits_for_the_database(frail: tuple[PostgresServer, Database, Fleet]) -> None:
    server, db, fleet = frail
    id = db.add("work")
    db.close()
    server.stop()
    worker = fleet.start("w", ready=False)
    wait(lambda: worker.events("database.away"), "it has tried")
    server.restart()
    db.again()
    db.wait_for(id, "completed")
    assert len(db.effects(id)) == 1
    assert worker.process.poll() is None


def test_a_restart_under_load_loses_nothing(frail: tuple[PostgresServer, Database, Fleet]) -> None:
    """Once in order, once as a crash; the dead letter queue is still there afterwards."""
    server, db, fleet = frail
    dead = db.add("fail_fast", max_attempts=1)
    workers = fleet.start_all(["w1", "w2"])
    db.wait_for(dead, "failed")
    ids = db.add_many("nap", [{"seconds": 0.02}] * 400)
    for crash in (False, True):
        wait(lambda: db.statuses().get("completed", 0) > 40, "it is under way")
        if crash:
            server.kill()
        server.restart()
        db.again()
        ids += db.add_many("nap", [{"seconds": 0.02}] * 200)
    db.wait_for_all(ids, "completed", 40)
    assert db.value("SELECT sum(lost) FROM pgqueue.jobs WHERE id = ANY (%s)", ids) == 0
    assert db.value("SELECT max(attempt) FROM pgqueue.jobs WHERE id = ANY (%s)", ids) == 1
    assert all(worker.process.poll() is None for worker in workers)
    job = db.job(dead)
    assert (job["status"], job["error"]) == ("failed", "no")
    # One line an outage and a connection, not one an attempt.
    for worker in workers:
        assert len(worker.events("database.away")) < 40


def test_results_are_kept_while_the_database_is_away(frail: tuple[PostgresServer, Database, Fleet]) -> None:
    """The jobs end while nobody can be told, and their results are written when the database is back; even if every
    lease has run out by then, because nobody has taken the jobs."""
    server, db, fleet = frail
    fleet.start_all(["a1", "a2"], queues="a")  # the outage is shorter than their lease, as it usually is
    fleet.start_all(["b1", "b2"], queues="b", **SHORT_LEASE)
    notes = fleet.directory / "notes"
    ids = []
    for queue in ("a", "b"):
        ids += db.add_many("note", [{"path": str(notes), "seconds": 1}] * 6, queue=queue)
    failing = db.add("note", {"path": str(notes), "seconds": 1, "fails": True}, queue="a", max_attempts=1)
    wait(lambda: db.statuses([*ids, failing]) == {"running": 13}, "they run")
    server.stop()
    gone = time.monotonic()
    wait(lambda: notes.exists() and len(notes.read_text().split()) == 13, "they end meanwhile")
    assert sorted(map(int, notes.read_text().split())) == sorted([*ids, failing])
    time.sleep(max(0.0, gone + LEASE + 0.5 - time.monotonic()))
    server.restart()
    db.again()
    db.wait_for_all(ids, "completed")
    db.wait_for(failing, "failed")
    assert sorted(map(int, notes.read_text().split())) == sorted([*ids, failing]), "some of them ran again"
    assert db.value("SELECT sum(lost) FROM pgqueue.jobs WHERE id = ANY (%s)", ids) == 0
    assert all(worker.process.poll() is None for worker in fleet.workers)


def test_the_heartbeat_comes_back_however_short_the_lease(frail: tuple[PostgresServer, Database, Fleet]) -> None:
    server, db, fleet = frail
    fleet.start("w", **SHORT_LEASE)
    server.stop()
    time.sleep(2 * LEASE)
    server.restart()
    db.again()
    lives = "SELECT count(*) FROM pgqueue.workers WHERE name = 'w' AND expires_at > now() AND stopped_at IS NULL"
    wait(lambda: db.value(lives) == 1, "its lease stands again")
    db.wait_for_all(db.add_many("nap", [{"seconds": 0.02}] * 20), "completed")


@on_18
def test_a_worker_without_a_heartbeat_claims_nothing(db: Database, fleet: Fleet) -> None:
    """The others would take its jobs away, again and again."""
    fleet.start("w", **SHORT_LEASE)
    with psycopg.connect(db.dsn) as conn:
        conn.execute("SELECT FROM pgqueue.workers WHERE name = 'w' FOR UPDATE")
        time.sleep(LEASE)
        id = db.add("work")
        ready = db.job(id)["seq"]
        time.sleep(1)
        job = db.job(id)
        assert (job["status"], job["seq"]) == ("pending", ready)
    db.wait_for(id, "completed")


def test_everything_stops_and_starts_again(frail: tuple[PostgresServer, Database, Fleet]) -> None:
    """First the database, then the worker, which must not wait for it for longer than its grace; then all come back."""
    server, db, fleet = frail
    worker = fleet.start("w")
    path = fleet.directory / "end"
    put_off, unwritten = db.add("later", {"seconds": 4.5}), db.add("nap", {"path": str(path)})
    wait(lambda: db.attempts(put_off), "it has failed once")
    db.wait_for(unwritten, "running")
    db.close()
    server.stop()
    try:
        path.touch()
        wait(lambda: worker.events("database.away"), "it has noticed")
        assert worker.stop() < GRACE + 3  # of which three are the machine's
        assert worker.events("worker.unwritten")
    finally:
        server.restart()
    db.again()
    db.bury()
    fleet.start("other")
    assert db.wait_for(unwritten, "completed")["lost"] == 1
    # A retry that was put off when they stopped happens at its time.
    job = db.wait_for(put_off, "completed")
    (attempt,) = db.attempts(put_off)
    assert (job["result"], attempt["worker_id"] != job["worker_id"]) == (2, True)
    assert (job["started_at"] - attempt["finished_at"]).total_seconds() > 4.4


def test_a_worker_brings_up_the_embedded_server_and_takes_it_down(own: PostgresServer, tmp_path: Path) -> None:
    own.stop()
    fleet = Fleet("", tmp_path)
    try:
        worker = fleet.start("w", ready=False, DATABASE_URL="", PGQUEUE_DIR=str(own.directory))
        wait(lambda: worker.events("worker.started"), "it has started")
        assert running_postgres(own.directory) is not None
        worker.stop()
        assert running_postgres(own.directory) is None
    finally:
        fleet.close()
        own.restart()


def test_an_idle_worker_asks_for_little(frail: tuple[PostgresServer, Database, Fleet]) -> None:
    _, db, fleet = frail
    usual = {"PGQUEUE_POLL_INTERVAL": "1", "PGQUEUE_HEARTBEAT_INTERVAL": "10", "PGQUEUE_LEASE_TIMEOUT": "30"}
    fleet.start("w", PGQUEUE_RESCUE_INTERVAL="5", **usual)
    time.sleep(1)  # the work of the first second: partitions, the first rescue
    db.run("SELECT public.pg_stat_statements_reset()")
    time.sleep(3)
    asked = db.rows("SELECT calls, query FROM public.pg_stat_statements WHERE query NOT LIKE '%%pg_stat_statements%%'")
    since = db.value("SELECT extract(epoch FROM clock_timestamp() - stats_reset) FROM public.pg_stat_statements_info")
    # Three a poll, with one at either end of the time; the listener's probe, two for a rescue, a heartbeat.
    assert sum(row["calls"] for row in asked) <= 3 * (since + 1) + 4, (since, asked)


@on_18
def test_connections_that_are_cut_at_random(db: Database, fleet: Fleet) -> None:
    parts = ["claim", "finish", "janitor", "listen", "heartbeat"]
    workers = fleet.start_all(["w1", "w2"])
    chosen = random.Random(3)
    ids = db.add_many("work", [{"seconds": 0.02 * (number % 5)} for number in range(500)])
    cuts = dict.fromkeys(parts, 0)
    while (left := len(ids) - db.statuses(ids).get("completed", 0)) > 20 or min(cuts.values()) < 2:
        if left <= 20:
            ids += db.add_many("work", [{"seconds": 0.02}] * 50)
        assert sum(cuts.values()) < 200, cuts
        part = chosen.choice(parts)
        cuts[part] += db.terminate(part)
        time.sleep(0.1)
    # The jobs of a claim whose answer was lost are given back when the connection is.
    db.wait_for_all(ids, "completed", RECONCILE_AFTER)
    assert db.how_often() == dict.fromkeys(ids, 1)
    assert db.value("SELECT count(*) FROM pgqueue.attempts") == 0
    wait(lambda: all(db.is_idle(worker.name) for worker in workers), "both are well")
    # One connection of a kind for each of them, as before.
    db.wait_for_all(db.add_many("work", [{"seconds": 0.1}] * 40), "completed")  # who has nothing to say does not notice
    wait(lambda: all(len(db.sessions(part)) == 2 for part in parts), "they are all back, and no others")
    wait(lambda: db.value("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == 0, "no lock is left over")


@on_18
async def test_jobs_of_a_claim_whose_answer_was_lost_are_given_back(conn: psycopg.AsyncConnection, dsn: str) -> None:
    worker = await MiniWorker(conn).register()
    known, lost, fresh = await add(conn, *[NewJob(type="a")] * 3)
    await worker.claim()
    # The answer never came: this worker knows of one of them only. The third was claimed a moment ago.
    await conn.execute(
        "UPDATE pgqueue.jobs_live SET started_at = started_at - make_interval(secs => %s) WHERE id <> %s",
        [RECONCILE_AFTER + 1, fresh],
    )
    ready = []
    janitor = Janitor(
        Link(dsn, "pgqueue-janitor test"),
        worker.who.worker_id,
        poll_interval=1,
        rescue_interval=5,
        retention_days=30,
        known=lambda: {known},
        cancel=lambda ids: None,
        ready=lambda: ready.append(True),
    )
    await janitor.reconcile(conn, RECONCILE_AFTER)
    statuses = "SELECT array_agg(status::text ORDER BY id) FROM pgqueue.jobs"
    assert await value(conn, statuses) == ["running", "pending", "running"]
    assert ready == [True]
    assert await value(conn, "SELECT attempt + lost FROM pgqueue.jobs WHERE id = %s", lost) == 0
    # The late answer, should it come after all, is worth nothing.
    other = await MiniWorker(conn).register()
    (again,) = await other.claim()
    assert again.id == lost
    assert await worker.complete([again]) == set()
    assert await other.complete([again]) == {lost}


@on_18
async def test_a_worker_whose_registration_was_not_answered_starts(conn: psycopg.AsyncConnection, dsn: str) -> None:
    """Its row is there, and it is its own."""
    async with proxied(dsn) as proxy:
        runtime = Runtime(PgQueue(proxy.dsn()), proxy.dsn(), Settings(), threads=1)
        proxy.cut(SQL.register_worker[:60], "after")
        running = asyncio.create_task(runtime.run())
        async with asyncio.timeout(20):
            await proxy.reached.wait()
            idle = "SELECT count(*) FROM pgqueue.workers WHERE idle_since IS NOT NULL AND heartbeat_at > started_at"
            while not await value(conn, idle):  # noqa: ASYNC110 - it is the database that we wait for
                await asyncio.sleep(0.05)
            runtime.stop()
            await running
    assert await value(conn, "SELECT count(*) FROM pgqueue.workers WHERE stopped_at IS NOT NULL") == 1


UPKEEP = [
    *("tick", "expire_workers", "rescue", "fold", "make_partitions", "drop_partitions", "prune_keys", "prune_effects"),
    *("prune_steps", "prune_series", "prune_workers", "prune_access"),
]
"""What a janitor that has just started does, in this order."""


@on_18
@pytest.mark.parametrize("statement", UPKEEP)
async def test_a_janitor_that_is_cut_off_goes_on(statement: str, conn: psycopg.AsyncConnection, dsn: str) -> None:
    """Else its worker would end with it."""
    text = getattr(SQL, statement).partition("%(")[0]
    async with proxied(dsn) as proxy:
        link = Link(proxy.dsn(), "pgqueue-janitor test")
        janitor = Janitor(
            link,
            (await MiniWorker(conn).register()).who.worker_id,
            poll_interval=0.05,
            rescue_interval=5,
            retention_days=30,
            known=set,
            cancel=lambda ids: None,
            ready=lambda: None,
        )
        proxy.cut(text, "after")
        running = asyncio.create_task(janitor.run())
        async with asyncio.timeout(20):
            await proxy.reached.wait()
            seen = len(proxy.statements)
            while not (running.done() or any("once a second" in each for each in proxy.statements[seen:])):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not running.done(), running.exception()
        running.cancel()
        await asyncio.wait([running])
        await link.close()


@on_18
async def test_a_rescue_that_is_due_between_two_ticks_is_on_time(dsn: str) -> None:
    times = {"poll_interval": 1, "rescue_interval": 5, "retention_days": 30}
    link = Link(dsn, "pgqueue-janitor test")
    janitor = Janitor(link, uuid4(), **times, known=set, cancel=lambda ids: None, ready=lambda: None)
    took: list[float] = []
    # A busy machine may be late, but not five times in a row.
    while not took or (took[-1] >= 0.7 and len(took) < 5):
        began = time.monotonic()
        janitor._next_rescue = began + 0.2
        await janitor._sleep()
        took.append(time.monotonic() - began)
    assert 0.2 <= min(took) < 0.7


@on_18
async def test_a_worker_that_registers_anew_has_its_lease_at_once(conn: psycopg.AsyncConnection, dsn: str) -> None:
    """Else it would give back all that it claims until its next heartbeat."""
    worker = (await MiniWorker(conn).register()).worker
    heartbeat = Heartbeat(dsn, worker, 10, Vitals, lambda pulse: None)
    await conn.execute("DELETE FROM pgqueue.workers")
    heartbeat.confirmed = time.monotonic() - 60
    await heartbeat._beat(conn)
    assert heartbeat.lease_stands(time.monotonic())
    assert await value(conn, "SELECT count(*) FROM pgqueue.workers WHERE expires_at > now()") == 1


@on_18
async def test_a_sleeper_whose_mark_was_taken_away_is_woken_again(conn: psycopg.AsyncConnection, dsn: str) -> None:
    """It was frozen past its lease while it slept: others take it for dead."""
    app = PgQueue()
    ran = asyncio.Event()

    @app.job("t")
    async def t() -> None:
        ran.set()

    idle = "SELECT count(*) FROM pgqueue.workers WHERE idle_since IS NOT NULL AND listening"
    async with worker_inside(app, dsn, poll_interval=60.0, heartbeat_interval=0.2), asyncio.timeout(20):
        while not await value(conn, idle):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await conn.execute("UPDATE pgqueue.workers SET idle_since = NULL")
        while not await value(conn, idle):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await add(conn, NewJob(type="t"))
        await ran.wait()
