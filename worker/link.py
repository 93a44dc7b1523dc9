"""A connection that comes back: opened when needed, thrown away when it breaks, opened again with growing pauses."""

from __future__ import annotations

import asyncio
import logging
import random
import time

import psycopg

from pgqueue.db import Connection, connect, is_outage
from pgqueue.errors import DatabaseUnavailable
from pgqueue.log import say

logger = logging.getLogger("pgqueue.worker")

QUIET = 10.0


class Link:
    def __init__(self, dsn: str, name: str, *, longest_pause: float = 2.0) -> None:
        self.dsn = dsn
        self.name = name
        self.longest_pause = longest_pause
        self._conn: Connection | None = None
        self._pause = 0.0
        self._last_failure = -QUIET
        self._down_since: float | None = None

    async def get(self) -> Connection:
        """Waits for as long as the database is away."""
        while self._conn is None or self._conn.closed:
            if self._pause:
                await asyncio.sleep(random.uniform(0.5, 1.0) * self._pause)
            try:
                self._conn = await connect(self.dsn, application_name=self.name)
            except (DatabaseUnavailable, psycopg.Error, OSError) as error:
                await self.failed(error, "waiting for the database")
        if self._down_since is not None:
            seconds = time.monotonic() - self._down_since
            say(logger, logging.INFO, "database.back", f"the database is back after {seconds:.1f} s", link=self.name)
            self._down_since = None
        return self._conn

    async def failed(self, error: BaseException, doing: str) -> None:
        """Logs it once an outage, closes the connection, and makes the next get() wait a little. An error that is no
        outage is a bug of ours or a missing right: it is logged every time, and tried again all the same."""
        if self._down_since is None or not is_outage(error):
            text = f"{self.name}: {str(error).strip() or type(error).__name__}; {doing}"
            say(logger, logging.WARNING, "database.away", text, link=self.name)
        now = time.monotonic()
        self._down_since = self._down_since or now
        # A connection that opens and then fails at once is still an outage: only some quiet resets the pause.
        growing = now - self._last_failure < QUIET
        self._pause = min(max(self._pause * 2, 0.05), self.longest_pause) if growing else 0.05
        self._last_failure = now
        await self.close()

    async def close(self) -> None:
        if self._conn is not None:
            conn, self._conn = self._conn, None
            await conn.close()
