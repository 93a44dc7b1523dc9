"""What happened, counted: totals since the beginning, series by time, and how things stand now."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from pgqueue.db import Connection, retrying, translated
from pgqueue.pages import like
from pgqueue.sql import SQL

BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 1800, 3600)
"""Of the histograms, in seconds; pgqueue.bounds() has the same."""
MINUTE, HOUR = 60, 3600


class Total(NamedTuple):
    name: str
    queue: str
    type: str
    label: str
    bucket: int
    value: float


class Piece(NamedTuple):
    at: datetime
    name: str
    bucket: int
    value: float


class Backlog(NamedTuple):
    queue: str
    ready: int
    scheduled: int
    retrying: int
    running: int
    dead: int
    oldest_ready: float | None
    paused: bool


class Slots(NamedTuple):
    name: str
    threads: int
    threads_used: int
    state: str


class TableSize(NamedTuple):
    name: str
    bytes: float
    dead: float
    notify_queue: float


async def fold(conn: Connection, *, wait: bool = True) -> int:
    """Brings the totals up to date, and says how many tallies there were. Without `wait`, not if another is at it."""
    # Where transactions are REPEATABLE READ by default, whoever waited for another fold sees what that one took.
    rows = await retrying(lambda: _rows(conn, SQL.fold, {"wait": wait}))
    return int(rows[0][0])


async def read_totals(conn: Connection) -> list[Total]:
    return [Total(*row) for row in await _rows(conn, SQL.read_totals)]


async def read_series(
    conn: Connection,
    since: datetime,
    until: datetime,
    step: int,
    *,
    queue: str | None = None,
    queues: Sequence[str] | None = None,
) -> list[Piece]:
    """`step` is a number of whole minutes; of whole hours, where minutes are not kept any more."""
    parameters = {
        "since": since,
        "until": until,
        "step": step,
        "piece": HOUR if step % HOUR == 0 else MINUTE,
        "queue": queue,
        "queues": like(queues),
    }
    return [Piece(*row) for row in await _rows(conn, SQL.read_series, parameters)]


async def read_backlog(conn: Connection) -> list[Backlog]:
    return [Backlog(*row) for row in await _rows(conn, SQL.read_backlog)]


async def read_fleet(conn: Connection) -> list[Slots]:
    return [Slots(*row) for row in await _rows(conn, SQL.read_fleet)]


async def read_server(conn: Connection) -> list[TableSize]:
    return [TableSize(*row) for row in await _rows(conn, SQL.read_server)]


def percentile(counts: Iterable[tuple[int, float]], share: float) -> float | None:
    """From a histogram: how many (value) are within which bound (bucket, from 1). Between two bounds it is a guess."""
    ordered = sorted(counts)
    wanted = share * sum(value for _, value in ordered)
    if not wanted:
        return None
    passed = 0.0
    for bucket, value in ordered:
        if passed + value >= wanted:
            low = BOUNDS[bucket - 2] if bucket > 1 else 0.0
            high = BOUNDS[min(bucket, len(BOUNDS)) - 1]
            return low + max(0.0, high - low) * (wanted - passed) / value
        passed += value
    return float(BOUNDS[-1])


async def _rows(conn: Connection, statement: Any, parameters: dict[str, Any] | None = None) -> list[tuple[Any, ...]]:
    with translated():
        # In binary, because a session's DateStyle can make times unreadable as text.
        return await (await conn.execute(statement, parameters, prepare=False, binary=True)).fetchall()
