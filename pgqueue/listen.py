"""LISTEN on a connection of its own, with a ping to itself and reconnection; only a hint, the poll finds the rest."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from uuid import uuid4

import psycopg
from psycopg import errors as pg
from psycopg import sql

from pgqueue.db import Connection, connect, cut_after
from pgqueue.errors import DatabaseUnavailable
from pgqueue.log import say

logger = logging.getLogger("pgqueue.listen")

PING_EVERY = 3.0
LOOK_EVERY = 1.0
PONG_WITHIN = 5.0
LOCK_WITHIN = "1s"
"""The lock of all NOTIFYs is held for longer only by a commit that hangs (its standby is away). Then nobody must wake
this worker: whoever did would hang as well."""
HOLDER = """
SELECT virtualtransaction FROM pg_locks
WHERE locktype = 'object' AND database = 0 AND classid = 'pg_database'::regclass AND objid = 0 AND granted
"""
FIRST_PAUSE = 0.1
DEAF_PAUSE = 30.0


class Listener:
    """Calls `heard` with each payload, and with "" whenever notifications may have been missed."""

    def __init__(self, dsn: str, channel: str, heard: Callable[[str], None], application_name: str) -> None:
        self.dsn = dsn
        self.channel = channel
        self.heard = heard
        self.application_name = application_name
        self.hears = False
        """Whether notifications are known to arrive."""
        self.changed: Callable[[], None] = lambda: None
        """Told when that changes."""
        self._holder: str | None = None
        self._held_since = 0.0
        self._hangs = False
        """Whether it was said."""

    async def run(self) -> None:
        pause = FIRST_PAUSE
        while True:
            heard = False
            try:
                conn = await connect(self.dsn, application_name=self.application_name)
                try:
                    await self._listen(conn)
                finally:
                    if heard := self.hears:
                        self.hears = False
                        self.changed()
                    await conn.close()
            except (psycopg.Error, DatabaseUnavailable, OSError) as error:
                say(logger, logging.WARNING, "listen.lost", f"the listener lost its connection: {error}")
            except HangError:
                if not self._hangs:
                    text = "NOTIFY hangs: somebody's commit holds its lock (is a standby away?); this worker polls"
                    say(logger, logging.WARNING, "listen.hangs", text)
                self._hangs = True
            except DeafError:
                if heard:
                    say(logger, logging.WARNING, "listen.lost", "the listener does not hear itself any more")
                else:
                    say(
                        logger,
                        logging.WARNING,
                        "listen.deaf",
                        "notifications do not arrive (behind a pooler? set PGQUEUE_LISTEN_URL to a direct connection);"
                        " this worker polls",
                    )
                    pause = DEAF_PAUSE
            if heard:
                pause = FIRST_PAUSE
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(pause * 2, 5.0) if pause < DEAF_PAUSE else pause

    async def _listen(self, conn: Connection) -> None:
        with cut_after(conn, PONG_WITHIN):
            if await behind_pooler(conn):
                # A LISTEN would stay behind on a connection that others use next, and might even seem to work.
                raise DeafError
            await conn.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self.channel)))
        while True:
            await self._ping(conn)
            if not self.hears:
                self.hears = True
                self._hangs, self._holder = False, None
                self.changed()
                # What was committed before LISTEN took effect was not notified: somebody must look.
                self.heard("")
            next_ping = time.monotonic() + PING_EVERY
            while (left := next_ping - time.monotonic()) > 0:
                async for notice in conn.notifies(timeout=min(LOOK_EVERY, left)):
                    self.heard(notice.payload)
                await self._look(conn)

    async def _look(self, conn: Connection) -> None:
        """Whether the transaction that held the lock at the last look still has it. A ping would notice, too, but each
        one wakes every listener of the database; this wakes nobody."""
        with cut_after(conn, PONG_WITHIN):
            row = await (await conn.execute(HOLDER, prepare=False)).fetchone()
        holder, now = row[0] if row else None, time.monotonic()
        if holder is None or holder != self._holder:
            self._holder, self._held_since = holder, now
        elif now - self._held_since > LOOK_EVERY / 2:
            raise HangError

    async def _ping(self, conn: Connection) -> None:
        """Sends a word to itself, and waits until it has come."""
        ping = f"ping:{uuid4().hex[:8]}"
        with cut_after(conn, PONG_WITHIN):
            query = "SELECT set_config('lock_timeout', %s, true), pg_notify(%s, %s)"
            try:
                await conn.execute(query, [LOCK_WITHIN, self.channel, ping], prepare=False)
            except pg.LockNotAvailable:
                raise HangError from None
        deadline = time.monotonic() + PONG_WITHIN
        came = False
        while not came:
            if (left := deadline - time.monotonic()) <= 0:
                raise DeafError
            # Not left early: what came in the same packet would be lost.
            async for notice in conn.notifies(timeout=left, stop_after=1):
                if notice.payload == ping:
                    came = True
                else:
                    self.heard(notice.payload)


class HangError(Exception):
    """Whoever sends a notification waits for somebody else's commit."""


class DeafError(Exception):
    """Notifications do not come."""


async def behind_pooler(conn: Connection) -> bool:
    """Whether somebody stands between: PgBouncer and its like tell their clients a process id of their own."""
    row = await (await conn.execute("SELECT pg_backend_pid()", prepare=False)).fetchone()
    return row is not None and row[0] != conn.info.backend_pid
