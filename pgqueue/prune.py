"""History comes and goes by whole partitions; keys and worker rows go when their time is over."""

from __future__ import annotations

from psycopg import errors as pg

from pgqueue.db import Connection
from pgqueue.sql import SQL

PARTITIONS_AHEAD = 7
AT_ONCE = 5_000
"""Keys: whoever prunes has other things to do."""


async def make_partitions(conn: Connection) -> int:
    try:
        return await _number(conn, SQL.make_partitions, {"ahead": PARTITIONS_AHEAD})
    except (pg.LockNotAvailable, pg.DeadlockDetected):
        # Somebody reads the history for long. There are days of partitions ahead: the next time will do.
        return 0


async def prune(conn: Connection, retention_days: float) -> int:
    """How many partitions were dropped. They come last: if somebody's view stands on one, only they wait for that."""
    await forget(conn)
    await conn.execute(SQL.prune_steps, {"days": retention_days}, prepare=False)
    await conn.execute(SQL.prune_series, {"days": retention_days}, prepare=False)
    await conn.execute(SQL.prune_workers, prepare=False)
    await conn.execute(SQL.prune_access, prepare=False)
    return await _number(conn, SQL.drop_partitions, {"days": retention_days})


async def forget(conn: Connection) -> bool:
    """Keys and effects past their time, some of them; whether there may be more."""
    pruned = [
        (await conn.execute(statement, {"limit": AT_ONCE}, prepare=False)).rowcount
        for statement in (SQL.prune_keys, SQL.prune_effects)
    ]
    return max(pruned) == AT_ONCE


async def _number(conn: Connection, statement: str, parameters: dict[str, float]) -> int:
    cursor = await conn.execute(statement.encode(), parameters, prepare=False)
    row = await cursor.fetchone()
    return row[0] if row else 0
