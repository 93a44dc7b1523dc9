"""The connections of a PgQueue: a small pool for each event loop, and one for synchronous code."""

from __future__ import annotations

import asyncio
import os
import select
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import psycopg
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from pgqueue.db import CONNECT, Connection, translated
from pgqueue.errors import InvalidSettings
from pgqueue.settings import Settings, mask

LARGEST = 4
PATIENCE = 10.0
"""Seconds that a caller waits for a connection."""
SERVER_PATIENCE = 3.0
"""The same in a server, whose clients wait as well; also for how long one attempt to connect goes on."""
ARGUMENTS: dict[str, Any] = {
    **CONNECT,
    "autocommit": True,
    "prepare_threshold": None,
    "application_name": "pgqueue-producer",
}


class Pools:
    def __init__(self, database_url: str | None, settings: Settings | None) -> None:
        self.unnamed = database_url is None and settings is None
        """Whether only the environment says which database it is."""
        self._url = database_url
        self._elsewhere: str | None = None
        self._settings = settings
        self._async: dict[asyncio.AbstractEventLoop, AsyncConnectionPool[Connection]] = {}
        self._sync: ConnectionPool[psycopg.Connection] | None = None
        self._pid = 0
        self._lock = threading.Lock()

    @property
    def database_url(self) -> str:
        if (url := self._elsewhere or self._url) is None:
            from pgqueue.embedded import database_url

            url = database_url(self._settings or Settings.from_env())
        return url

    def redirect(self, url: str | None) -> None:
        """From now on to this database, or with None to its own again; for tests."""
        self._elsewhere = url
        self.close_sync()
        while self._async:
            loop, pool = self._async.popitem()
            if not loop.is_closed():
                closing = pool.close()
                if loop.is_running():
                    asyncio.run_coroutine_threadsafe(closing, loop)
                else:
                    loop.run_until_complete(closing)

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "conninfo": self.database_url,
            "kwargs": ARGUMENTS,
            "min_size": 0,
            "max_size": LARGEST,
            "timeout": PATIENCE,
            "reconnect_timeout": PATIENCE,
            "num_workers": 1,
        }

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        loop = asyncio.get_running_loop()
        pool = self._async.get(loop)
        with translated(), self._readable_url():
            if pool is None:
                pool = await self._open(loop)
            conn = await pool.getconn()
        try:
            yield conn
        finally:
            await pool.putconn(conn)

    async def _open(self, loop: asyncio.AbstractEventLoop) -> AsyncConnectionPool[Connection]:
        # A pool only says that it has waited too long; one connection of our own says what is wrong, and at once.
        await (await psycopg.AsyncConnection.connect(self.database_url, **ARGUMENTS)).close()
        for other in [other for other in list(self._async) if other.is_closed()]:
            self._async.pop(other, None)
        if (pool := self._async.get(loop)) is None:
            pool = AsyncConnectionPool(
                self.database_url,
                kwargs=ARGUMENTS,
                min_size=0,
                max_size=LARGEST,
                timeout=PATIENCE,
                open=False,
                check=check,
            )
            self._async[loop] = pool
        await pool.open()
        return pool

    @contextmanager
    def connection_sync(self) -> Iterator[psycopg.Connection]:
        with translated(), self._readable_url():
            pool = self._open_sync()
            conn = pool.getconn()
        try:
            yield conn
        finally:
            pool.putconn(conn)

    def _open_sync(self) -> ConnectionPool[psycopg.Connection]:
        with self._lock:
            # The pool of a parent process has no threads here, and its connections are the parent's.
            if self._sync is None or self._pid != os.getpid():
                psycopg.connect(self.database_url, **ARGUMENTS).close()
                self._sync = ConnectionPool(**self.arguments, open=True, check=_check_sync)
                self._pid = os.getpid()
                weakref.finalize(self, _close, self._sync, self._pid)
            return self._sync

    @contextmanager
    def _readable_url(self) -> Iterator[None]:
        try:
            yield
        except psycopg.ProgrammingError as error:
            if error.sqlstate is not None:
                raise
            # libpq's own words would show the password.
            raise InvalidSettings(
                [f"DATABASE_URL={mask(self.database_url)}: PostgreSQL cannot read this URL"]
            ) from None

    async def close(self) -> None:
        if (pool := self._async.pop(asyncio.get_running_loop(), None)) is not None:
            await pool.close()

    def close_sync(self) -> None:
        with self._lock:
            pool, self._sync = self._sync, None
        if pool is not None:
            _close(pool, self._pid)


def _close(pool: ConnectionPool[Any], pid: int) -> None:
    if pid == os.getpid():
        pool.close()


def _has_news(fd: int) -> bool:
    """An idle connection hears nothing, except that it has ended; asking the server each time would double the cost."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


async def check(conn: Connection) -> None:
    """Whether a connection that has been idle still stands; without a round trip where the server has said nothing."""
    if _has_news(conn.fileno()):
        await AsyncConnectionPool.check_connection(conn)


def _check_sync(conn: psycopg.Connection) -> None:
    if _has_news(conn.fileno()):
        ConnectionPool.check_connection(conn)


class ServerPool:
    """The connections of a server process. The database may come later than the process, go away and come back."""

    def __init__(self, url: str, largest: int, application_name: str) -> None:
        self._pool: AsyncConnectionPool[Connection] = AsyncConnectionPool(
            url,
            kwargs={**ARGUMENTS, "application_name": application_name},
            min_size=1,
            max_size=largest,
            timeout=SERVER_PATIENCE,
            reconnect_timeout=SERVER_PATIENCE,
            open=False,
            check=check,
        )

    async def open(self) -> None:
        await self._pool.open()

    async def close(self) -> None:
        await self._pool.close(timeout=5)

    def sizes(self) -> dict[str, int]:
        """How many connections are there, and how many of them are free."""
        found = self._pool.get_stats()
        free = found.get("pool_available", 0)
        return {"idle": free, "used": max(0, found.get("pool_size", 0) - free)}

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        with translated():
            conn = await self._pool.getconn()
        try:
            yield conn
        finally:
            await self._pool.putconn(conn)
