"""What a worker gives back, because it waits here in vain; and its chores, when something is in their way."""

import asyncio
import logging
import time

import psycopg
import pytest

from pgqueue import Context, PgQueue, prune, workers
from pgqueue.claim import Claimed
from pgqueue.settings import Settings
from pgqueue.worker import janitor
from pgqueue.worker.runtime import STALE_AFTER, Runtime
from tests.db.queue import value
from tests.once.inside import worker_inside

on_18 = pytest.mark.parametrize("server", ["pg18"], indirect=True)


async def test_a_job_that_has_just_come_is_not_given_back() -> None:
    """However long the worker has been idle: its runners have had no time to take it."""
    runtime = Runtime(PgQueue("postgresql://nowhere"), "postgresql://nowhere", Settings(), threads=1)
    runtime._assemble()
    runtime.slots.moved = time.monotonic() - 60
    house = asyncio.create_task(runtime._keep_house())
    await asyncio.sleep(STALE_AFTER / 4)
    runtime.slots.offer([Claimed(1, "default", "t", "{}", 0, 1, 1, None, 5, 0, 0, None, 0.0, False)], "token")
    await asyncio.sleep(STALE_AFTER / 2)
    assert len(runtime.slots) == 1
    await asyncio.sleep(STALE_AFTER * 2)
    assert not len(runtime.slots), "now somebody else may have it"
    assert [outcome.id for outcome, _, _ in runtime.finisher.outcomes] == [1]
    house.cancel()
    await asyncio.wait([house])


@on_18
async def test_a_due_job_whose_row_somebody_holds_is_not_asked_for_all_the_time(
    conn: psycopg.AsyncConnection, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks, tick = [], workers.tick

    async def counted(*args: object) -> workers.Tick:
        ticks.append(time.monotonic())
        return await tick(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(workers, "tick", counted)
    app = PgQueue()
    ran = asyncio.Event()

    @app.job("held")
    async def held(ctx: Context) -> None:
        ran.set()

    await conn.execute("INSERT INTO pgqueue.jobs (type, run_at) VALUES ('held', now() + interval '0.5 s')")
    async with await psycopg.AsyncConnection.connect(dsn) as editor:
        await editor.execute("SELECT FROM pgqueue.jobs_live FOR UPDATE")
        async with worker_inside(app, dsn, poll_interval=1.0, rescue_interval=5.0):
            await asyncio.sleep(4)
            while_held = len(ticks)
            assert not ran.is_set()
            await editor.rollback()
            await asyncio.wait_for(ran.wait(), 5)
    assert while_held < 40


@on_18
async def test_a_chore_that_fails_keeps_no_other_from_its_turn(
    conn: psycopg.AsyncConnection, dsn: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pruned = asyncio.Event()
    real = prune.prune

    async def seen(*args: object) -> int:
        pruned.set()
        return await real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(prune, "prune", seen)
    monkeypatch.setattr(janitor, "FOLD_EVERY", 0.5)
    # It has no right to what it needs.
    await conn.execute("ALTER FUNCTION pgqueue.fold(boolean) SECURITY INVOKER SET role = pg_monitor")
    async with worker_inside(PgQueue(), dsn):
        await asyncio.wait_for(pruned.wait(), 10)
        await asyncio.sleep(3)
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [getattr(record, "event", None) for record in told] == ["chore.failed"], "once, and no outage"
    assert "permission denied" in told[0].getMessage()
    assert told[0].getMessage().endswith("figures stand still")


@on_18
async def test_a_chore_whose_function_is_gone_is_no_other_schema(
    conn: psycopg.AsyncConnection, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    await conn.execute("ALTER FUNCTION pgqueue.fold(boolean) RENAME TO gone")
    async with worker_inside(PgQueue(), dsn):
        await asyncio.sleep(2)
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [getattr(record, "event", None) for record in told] == ["chore.failed"]


TODAY = "SELECT to_char(now() AT TIME ZONE 'UTC', 'YYYYMMDD')"


@pytest.fixture
def no_chores(monkeypatch: pytest.MonkeyPatch) -> None:
    async def none_today(*args: object) -> None:
        pass

    monkeypatch.setattr(janitor.Janitor, "_chores", none_today)


async def until(conn: psycopg.AsyncConnection, condition: str) -> None:
    async with asyncio.timeout(10):
        while not await value(conn, f"SELECT {condition}"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_jobs_that_end_while_the_partition_of_their_day_is_made_are_completed(
    conn: psycopg.AsyncConnection, dsn: str, no_chores: None
) -> None:
    app = PgQueue()

    @app.job("plain")
    async def plain(ctx: Context) -> int:
        return 1

    @app.job("settle")
    async def settle(ctx: Context) -> None:
        async with ctx.transaction():
            pass

    @app.job("mail", at_most_once=True)
    async def mail(ctx: Context) -> None:
        pass

    leaf = f"pgqueue.jobs_finished_{await value(conn, TODAY)}"
    waits = "FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query ~ 'complete_jobs'"
    async with worker_inside(app, dsn):
        await until(conn, "EXISTS (SELECT FROM pgqueue.workers)")
        for type in app.types:
            await conn.execute(f"DROP TABLE {leaf}")
            async with await psycopg.AsyncConnection.connect(dsn) as janitor:
                await janitor.execute("SELECT pgqueue.make_partitions()")
                await conn.execute("INSERT INTO pgqueue.jobs (type) VALUES (%s)", [type])
                await until(conn, f"EXISTS (SELECT {waits})")
                await janitor.commit()
            await until(conn, "NOT EXISTS (SELECT FROM pgqueue.jobs_live)")
            done = "SELECT array_agg(status::text) FROM pgqueue.jobs WHERE type = %s"
            assert await value(conn, done, type) == ["completed"], type
    assert await value(conn, "SELECT count(*) FROM pgqueue.attempts") == 0


@on_18
async def test_there_are_partitions_before_the_first_claim(
    conn: psycopg.AsyncConnection, dsn: str, no_chores: None
) -> None:
    app = PgQueue()
    ran = asyncio.Event()

    @app.job("t")
    async def t(ctx: Context) -> None:
        ran.set()

    leaf = f"pgqueue.jobs_finished_{await value(conn, TODAY)}"
    await conn.execute(f"DROP TABLE {leaf}")
    await conn.execute("INSERT INTO pgqueue.jobs (type) VALUES ('t')")
    async with worker_inside(app, dsn):
        await asyncio.wait_for(ran.wait(), 10)
        assert await value(conn, "SELECT to_regclass(%s) IS NOT NULL", leaf)
