"""Scheduled jobs become pending when they are due. Every worker does it; no leader."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from pgqueue.db import Connection, retrying
from pgqueue.sql import SQL
from pgqueue.wake import wake

BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class DueFloor:
    """The promoter's floor: the last due time that it promoted, so that it does not wade through what it has done."""

    run_at: datetime = BEGINNING


async def promote(conn: Connection, floor: DueFloor, limit: int = 1000) -> int:
    """Makes due jobs pending, from the floor on, and wakes workers for them. How many they were."""

    async def send() -> tuple[int, datetime | None, list[str] | None, list[str] | None, list[int] | None]:
        parameters = {"floor": floor.run_at, "limit": limit}
        cursor = await conn.execute(SQL.promote, parameters, prepare=False, binary=True)
        row = await cursor.fetchone()
        assert row is not None
        return (row[0], row[1], row[2], row[3], row[4])

    promoted, last, queues, types, demands = await retrying(send)
    if last is not None:
        # Equal times may be split over two batches, and a promoter elsewhere may have rolled back: stay a little below.
        floor.run_at = max(floor.run_at, last - timedelta(milliseconds=10))
        await wake(conn, queues or [], types or [], demands or [])
    return promoted


async def seconds_until_due(conn: Connection, floor: DueFloor) -> float | None:
    """How long until the next scheduled job is due; None: there is none."""
    cursor = await conn.execute(SQL.next_due, {"floor": floor.run_at}, prepare=False)
    row = await cursor.fetchone()
    return None if row is None else row[0]
