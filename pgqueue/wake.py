"""Wakes workers that sleep: only a hint, they poll as well."""

from __future__ import annotations

from collections.abc import Sequence

from psycopg import errors as pg

from pgqueue.db import Connection
from pgqueue.sql import SQL


async def wake(conn: Connection, queues: Sequence[str], types: Sequence[str], demands: Sequence[int]) -> bool:
    """Wakes idle workers that can run such jobs; whether there was one. It never waits for long."""
    parameters = {"queues": list(queues), "types": list(types), "demands": list(demands)}
    try:
        row = await (await conn.execute(SQL.wake, parameters, prepare=False)).fetchone()
    except pg.LockNotAvailable:
        return False
    return bool(row and row[0])
