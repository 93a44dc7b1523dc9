"""What workers do for all, broken off in its middle: it is as if it had not begun, and the next one does it."""

import asyncio
from contextlib import suppress

import psycopg
import pytest

from pgqueue.db import Connection, connect
from pgqueue.worker.link import Link
from tests.chaos.cuts.upkeep import GONE, PATHS, House, pass_by
from tests.db.queue import value

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
