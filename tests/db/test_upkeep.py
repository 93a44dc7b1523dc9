"""What workers do for all, broken off in its middle: it is as if it had not begun, and the next one does it. And
nobody who leaves a transaction open holds it up."""

import asyncio
from contextlib import suppress

import psycopg
import pytest

from pgqueue import prune, rescue, tally, workers
from pgqueue.db import Connection, connect
from pgqueue.worker.link import Link
from pgqueue.workers import Pulse
from tests.chaos.cuts.upkeep import GONE, PATHS, House, pass_by
from tests.db.logins import connected_as
from tests.db.queue import MiniWorker, value

on_18 = pytest.mark.parametrize("server", ["pg18"], indirect=True)

OLD = f"SELECT 'jobs_finished' || to_char(current_date - {GONE}, '_YYYYMMDD')"


@on_18
@pytest.mark.parametrize(
    ("function", "held"),
    [
        ("fold()", "totals IN SHARE MODE"),
        ("make_partitions(7)", "attempts_default IN ACCESS SHARE MODE"),
        ("drop_partitions('30 days')", "{old} IN ACCESS SHARE MODE"),
    ],
    ids=["the tallies are gone", "the first partition is made", "the first partition is dropped"],
)
async def test_upkeep_that_is_broken_off(conn: Connection, dsn: str, function: str, held: str) -> None:
    house = House(conn)
    await house.prepare()
    await house.soil(PATHS)
    async with await psycopg.AsyncConnection.connect(dsn) as holder, await connect(dsn) as victim:
        await holder.execute(f"LOCK TABLE pgqueue.{held.format(old=await value(conn, OLD))}".encode())
        working = asyncio.create_task(victim.execute(f"SELECT pgqueue.{function}".encode()))
        waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND pid = %s"
        while not (working.done() or await value(conn, waits, victim.info.backend_pid)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await conn.execute("SELECT pg_terminate_backend(%s, 5000)", [victim.info.backend_pid])
        # It waits for half a second or two: where the machine is slower than that, it has given up by itself.
        with suppress(psycopg.OperationalError):
            await working
        await holder.rollback()
    assert await house.half_made() == []
    link = Link(dsn, "pgqueue-janitor test")
    await pass_by(link)
    await link.close()
    assert await house.problems() == []


@on_18
async def test_nobody_waits_while_keys_get_the_results_of_a_day_that_goes(conn: Connection, dsn: str) -> None:
    for parent in ("jobs_finished", "attempts"):
        day = f"PARTITION OF pgqueue.{parent} FOR VALUES FROM ('2020-01-01') TO ('2020-01-02')"
        await conn.execute(f"CREATE TABLE pgqueue.{parent}_20200101 {day}".encode())
    await conn.execute(
        "INSERT INTO pgqueue.jobs_finished (id, type, status, finished_at, result)"
        " VALUES (-1, 't', 'completed', '2020-01-01 12:00', '1')"
    )
    await conn.execute(
        "INSERT INTO pgqueue.idempotency_keys (key, fingerprint, job_id, expires_at)"
        " VALUES ('k', '', -1, now() + interval '1 day')"
    )
    async with await psycopg.AsyncConnection.connect(dsn) as holder, await connect(dsn) as janitor:
        await holder.execute("SELECT FROM pgqueue.idempotency_keys FOR UPDATE")
        dropping = asyncio.create_task(prune.prune(janitor, 30))
        pid = janitor.info.backend_pid
        while not await value(conn, "SELECT count(*) FROM pg_locks WHERE NOT granted AND pid = %s", pid):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        alone = "SELECT count(*) FROM pg_locks WHERE mode = 'AccessExclusiveLock' AND pid = %s"
        assert await value(conn, alone, pid) == 0
        await holder.rollback()
        await dropping
    await prune.prune(conn, 30)
    assert await value(conn, "SELECT to_regclass('pgqueue.jobs_finished_20200101')") is None


async def beat(conn: Connection, worker: MiniWorker) -> Pulse:
    vitals = {"threads_used": 0, "completed": 0, "failed": 0}
    async with asyncio.timeout(20):
        pulse = await workers.heartbeat(conn, worker.worker, **vitals, listening=False)
    assert pulse is not None
    return pulse


async def test_a_drain_that_nobody_commits(conn: Connection, dsn: str) -> None:
    worker = await MiniWorker(conn).register()
    async with await psycopg.AsyncConnection.connect(dsn) as operator:
        await operator.execute("SELECT pgqueue.drain_worker(%s)", [worker.who.worker_id])
        assert not (await beat(conn, worker)).draining
        await conn.execute("UPDATE pgqueue.workers SET expires_at = now()")
        async with asyncio.timeout(20):
            await rescue.rescue(conn)
        assert await value(conn, "SELECT state FROM pgqueue.workers") == "unavailable"
        await operator.commit()
    assert (await beat(conn, worker)).draining
    assert await value(conn, "SELECT draining FROM pgqueue.workers")
    await conn.execute("UPDATE pgqueue.workers SET expires_at = now() - interval '2 days'")
    await prune.prune(conn, 30)
    assert await value(conn, "SELECT count(*) FROM pgqueue.workers") == 0


async def test_a_workers_row_that_somebody_holds(conn: Connection, dsn: str) -> None:
    held, other = await MiniWorker(conn).register(), await MiniWorker(conn).register()
    await conn.execute("UPDATE pgqueue.workers SET expires_at = now()")
    async with await psycopg.AsyncConnection.connect(dsn) as holder:
        await holder.execute("SELECT FROM pgqueue.workers WHERE id = %s FOR UPDATE", [held.who.worker_id])
        async with asyncio.timeout(20):
            await rescue.rescue(conn)
        assert await value(conn, "SELECT id FROM pgqueue.workers WHERE state = 'unavailable'") == other.who.worker_id
        with pytest.raises(psycopg.errors.LockNotAvailable):
            await beat(conn, held)
    await beat(conn, held)


OUTDATED = {
    "steps": "(job_id, name, created_at) SELECT i, 's', now() - interval '99 days'",
    "series": "(step, at, queue, name, bucket, value) SELECT 60, now() - interval '2 days', 'q', 'enqueued', i, 1",
    "idempotency_keys": "(key, fingerprint, job_id, expires_at) SELECT i, '', i, now()",
    "effects": "(key, job_id, done_at, expires_at) SELECT i, i, now(), now()",
    "workers": "(id, name, host, pid, version, threads, expires_at)"
    " SELECT gen_random_uuid(), 'w', 'h', 1, '0', 1, now() - interval '2 days'",
    "refresh_tokens": "(hash, family, user_id, expires_at) SELECT i::text::bytea, gen_random_uuid(), u.id, now()",
    "revoked_tokens": "(jti, expires_at) SELECT i, now()",
    "http_answers": "(subject, route, key, fingerprint, expires_at) SELECT 's', 'r', i, '', now()",
}


async def test_rows_that_somebody_holds_are_pruned_the_next_time(conn: Connection, dsn: str) -> None:
    await conn.execute("INSERT INTO pgqueue.users (name, password_hash, scopes) VALUES ('ana', '', '{}')")
    for table, row in OUTDATED.items():
        await conn.execute(f"INSERT INTO pgqueue.{table} {row} FROM generate_series(1, 2) i, pgqueue.users u".encode())
    left = " + ".join(f"(SELECT count(*) FROM pgqueue.{table})" for table in OUTDATED)
    async with await psycopg.AsyncConnection.connect(dsn) as holder:
        for table in OUTDATED:
            await holder.execute(f"SELECT FROM pgqueue.{table} LIMIT 1 FOR UPDATE".encode())
        async with asyncio.timeout(20):
            await prune.prune(conn, 30)
        assert await value(conn, f"SELECT {left}") == len(OUTDATED)
    await prune.prune(conn, 30)
    assert await value(conn, f"SELECT {left}") == 0


async def test_a_partition_that_cannot_be_dropped_keeps_nothing_else(conn: Connection) -> None:
    await conn.execute(
        "CREATE TABLE pgqueue.attempts_20200101 PARTITION OF pgqueue.attempts"
        " FOR VALUES FROM ('2020-01-01') TO ('2020-01-02')"
    )
    await conn.execute("CREATE VIEW report AS SELECT * FROM pgqueue.attempts_20200101")
    await conn.execute("INSERT INTO pgqueue.users (name, password_hash, scopes) VALUES ('ana', '', '{}')")
    for table, row in OUTDATED.items():
        await conn.execute(f"INSERT INTO pgqueue.{table} {row} FROM generate_series(1, 2) i, pgqueue.users u".encode())
    with pytest.raises(psycopg.errors.DependentObjectsStillExist):
        await prune.prune(conn, 30)
    left = " + ".join(f"(SELECT count(*) FROM pgqueue.{table})" for table in OUTDATED)
    assert await value(conn, f"SELECT {left}") == 0


async def test_a_publication_of_all_tables(conn: Connection) -> None:
    await conn.execute("CREATE PUBLICATION everything FOR ALL TABLES")
    await conn.execute("INSERT INTO pgqueue.jobs (type) VALUES ('t')")
    assert await tally.fold(conn) == 1
    nameless = """
        SELECT array_agg(c.relname) FROM pg_class c
        WHERE c.relnamespace = 'pgqueue'::regnamespace AND c.relkind = 'r' AND c.relreplident = 'd'
          AND NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary)
    """
    assert await value(conn, nameless) is None, "their rows could not be changed"


@pytest.mark.usefixtures("logins")
async def test_no_stranger_can_hold_up_what_one_does_at_a_time(conn: Connection, dsn: str) -> None:
    house = House(conn)
    await house.prepare()
    await house.soil(PATHS)
    async with connected_as("stranger", dsn) as stranger:
        await stranger.execute("SELECT pg_advisory_lock(1885827429, n) FROM generate_series(1, 3) n")
        link = Link(dsn, "pgqueue-janitor test")
        await pass_by(link)
        await link.close()
    assert await house.problems() == []
