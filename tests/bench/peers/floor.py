"""The floor: our own SQL in a bare psycopg loop, without handlers, wake-ups, heartbeats or shutdown."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from tests.bench.peers.ours import STORE
from tests.bench.peers.peer import Here


@dataclass(frozen=True, kw_only=True)
class Floor(Here):
    def setup(self) -> list[list[str]]:
        return [[sys.executable, "-m", "pgqueue", "migrate", "up"]]

    def workers(self, processes: int) -> list[list[str]]:
        return [self.produce("worker")] * processes


PEERS = (
    Floor(
        name="floor",
        package="psycopg",
        settings="claims of 500 on one connection, completions on another; single INSERTs and COPY",
        hint=30_000,
        driver="with_floor",
        store=STORE,
        handlers=False,
    ),
)
