"""Jobs whose worker is gone become pending again. Every worker does it; no leader."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from pgqueue.db import Connection, retrying
from pgqueue.sql import SQL
from pgqueue.wake import wake

MAX_LOST = 3
BESIDE = 1.0
"""Seconds: what a worker took so long after a suspect had begun may be what killed it."""


@dataclass(slots=True)
class Clock:
    """The database's, as the last rescue saw it: if that was later than now, it was set back."""

    seen: datetime | None = None


class Rescued(NamedTuple):
    jobs: int
    poisoned: int


async def rescue(conn: Connection, limit: int = 500, *, clock: Clock | None = None) -> Rescued:
    """Marks dead workers unavailable and takes their jobs back, batch by batch until there are none."""
    clock = clock or Clock()
    clock.seen = await retrying(lambda: _expire(conn, clock.seen))
    jobs = poisoned = 0
    while True:
        batch = await retrying(lambda: _batch(conn, limit))
        jobs, poisoned = jobs + batch.jobs, poisoned + batch.poisoned
        if batch.jobs < limit:
            return Rescued(jobs, poisoned)


async def _expire(conn: Connection, seen: datetime | None) -> datetime:
    # In binary, because a session's DateStyle can make times unreadable as text.
    cursor = await conn.execute(SQL.expire_workers, {"seen": seen}, prepare=False, binary=True)
    row = await cursor.fetchone()
    assert row is not None
    now: datetime = row[0]
    return now


async def _batch(conn: Connection, limit: int) -> Rescued:
    cursor = await conn.execute(SQL.rescue, {"limit": limit, "max_lost": MAX_LOST, "beside": BESIDE}, prepare=False)
    row = await cursor.fetchone()
    assert row is not None
    jobs, poisoned, queues, types, demands = row
    if queues:
        await wake(conn, queues, types, demands)
    return Rescued(jobs, poisoned)
