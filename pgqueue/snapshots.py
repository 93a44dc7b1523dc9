"""What keeps vacuum from removing dead rows, and for how long it has."""

from __future__ import annotations

import time
from math import inf
from typing import NamedTuple
from uuid import UUID

from pgqueue.db import Connection
from pgqueue.sql import SQL

SAMPLES = 200


class Holder(NamedTuple):
    kind: str
    """session, prepared, slot or standby."""
    name: str
    transactions: int
    """How many have begun since then."""
    what: str
    remedy: str
    seconds: float
    """How old its snapshot is, as far as we know."""


class Watch:
    """PostgreSQL says of a snapshot which transactions it does not see, and not when it was taken. So we remember which
    were the newest at which time."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, int]] = []

    async def look(self, conn: Connection, worker_id: UUID | None = None) -> list[Holder]:
        """The oldest first. With a worker's id nothing, unless it is the one that speaks for all."""
        rows = await (await conn.execute(SQL.snapshot_holders, {"worker_id": worker_id}, prepare=False)).fetchall()
        now, upcoming = time.monotonic(), rows[0][0]
        if not self._samples or upcoming > self._samples[-1][1]:
            self._samples.append((now, upcoming))
        if len(self._samples) > SAMPLES:
            del self._samples[1::2]
        return [
            Holder(kind, name, transactions, what, remedy, min(self._age(upcoming - transactions, now), at_most or inf))
            for _, kind, name, transactions, at_most, what, remedy in rows
            if kind is not None
        ]

    def _age(self, transaction: int, now: float) -> float:
        return next((now - at for at, upcoming in self._samples if upcoming > transaction), 0.0)
