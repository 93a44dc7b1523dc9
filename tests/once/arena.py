"""A PostgreSQL for tests that run whole workers: one database for each, with tables that count effects."""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import psycopg
from psycopg.rows import dict_row

from pgqueue import migrate
from pgqueue.embedded import PostgresServer, ValkeyServer, start_postgres, start_valkey
from tests.conftest import _ram_disk
from tests.once import handlers
from tests.once.handlers import Sink
from tests.once.nursery import Process

TEMPLATE = "once_template"
ENDED = ("completed", "failed", "cancelled")


class Arena:
    def __init__(self, server: PostgresServer, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self._numbers = count(1)
        self._making = asyncio.Lock()

    def dsn(self, database: str) -> str:
        return urlsplit(self.server.dsn)._replace(path=f"/{database}").geturl()

    @asynccontextmanager
    async def place(self) -> AsyncIterator["Place"]:
        """A database, a sink, and a connection to look on; whoever else is connected at the end is cut off."""
        name = f"once_{next(self._numbers)}"
        sink = self.folder / name
        sink.mkdir()
        await asyncio.to_thread(self._execute, f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}")
        try:
            conn = await psycopg.AsyncConnection.connect(self.dsn(name), autocommit=True)
            async with conn:
                yield Place(self.dsn(name), conn, Sink(str(sink)))
        finally:
            await asyncio.to_thread(self._execute, f"DROP DATABASE {name} WITH (FORCE)")

    def _execute(self, statement: str) -> None:
        with psycopg.connect(self.server.dsn, autocommit=True) as conn:
            conn.execute(statement.encode())


class Place:
    def __init__(self, dsn: str, conn: psycopg.AsyncConnection, sink: Sink) -> None:
        self.dsn = dsn
        self.conn = conn
        self.sink = sink

    @property
    def env(self) -> dict[str, str]:
        return {"SINK": str(self.sink.folder)}

    async def rows(self, query: str, *parameters: Any) -> list[dict[str, Any]]:
        async with self.conn.cursor(row_factory=dict_row) as cursor:
            return await (await cursor.execute(query.encode(), parameters)).fetchall()

    async def value(self, query: str, *parameters: Any) -> Any:
        found = await self.rows(query, *parameters)
        return next(iter(found[0].values())) if found else None

    async def add(self, type: str, payload: Any, **options: Any) -> int:
        from psycopg.types.json import Jsonb

        names = "".join(f", {name} => %s" for name in options)
        query = f"SELECT id FROM pgqueue.add_job(%s, %s{names})"
        return int(await self.value(query, type, Jsonb(payload), *options.values()))

    async def job(self, id: int) -> dict[str, Any]:
        [job] = await self.rows("SELECT * FROM pgqueue.jobs WHERE id = %s", id)
        return job

    async def ended(self, *ids: int, within: float = 30, processes: tuple[Process, ...] = ()) -> list[dict[str, Any]]:
        """The jobs, once they have all ended."""
        deadline = time.monotonic() + within
        # Asking for the whole of pgqueue.jobs each time would cost more than the workers do.
        left = "SELECT id, status, lost, attempt, run_at, lease_token FROM pgqueue.jobs_live WHERE id = ANY(%s)"
        while unended := await self.rows(left, list(ids)):
            if time.monotonic() > deadline:
                logs = "\n".join(one.told() for one in processes)
                raise AssertionError(f"not ended: {unended}\n{logs}")
            await asyncio.sleep(0.05)
        jobs = await self.rows("SELECT * FROM pgqueue.jobs WHERE id = ANY(%s) ORDER BY id", list(ids))
        assert len(jobs) == len(set(ids)), f"of {ids} only {[job['id'] for job in jobs]} are left"
        return jobs

    async def declare_dead(self, but: UUID | None = None) -> None:
        """The leases of all workers but this one are over, as if they had been silent for long."""
        dead = "UPDATE pgqueue.workers SET expires_at = now() - interval '1 s' WHERE id IS DISTINCT FROM %s"
        await self.conn.execute(dead, [but])

    async def cut_off_handlers(self) -> int:
        """How many connections of handlers there were; on return PostgreSQL has none of them any more."""
        query = """
            SELECT count(*) FILTER (WHERE pg_terminate_backend(pid, 5000)) FROM pg_stat_activity
            WHERE application_name LIKE 'pgqueue-handlers%%' AND datname = current_database()
        """
        return int(await self.value(query))

    async def effects(self, mode: str, key: str) -> int:
        if mode == "in_transaction":
            return int(await self.value("SELECT count(*) FROM public.seen WHERE key = %s", key))
        return self.sink.count("effects", key)


@contextmanager
def started_arena(settings: dict[str, str] | None = None, port: int | None = None) -> Iterator[Arena]:
    with tempfile.TemporaryDirectory(prefix="pgqueue-once-", dir=_ram_disk()) as directory:
        Path(directory).chmod(0o711)
        server = start_postgres(
            Path(directory) / "pg", fast=True, port=port, settings={"max_connections": "400"} | (settings or {})
        )
        try:
            arena = Arena(server, Path(directory))
            arena._execute(f"CREATE DATABASE {TEMPLATE}")
            migrate.up(arena.dsn(TEMPLATE))
            with psycopg.connect(arena.dsn(TEMPLATE), autocommit=True) as conn:
                conn.execute(handlers.SEEN)
            yield arena
        finally:
            server.stop()


@contextmanager
def started_valkey() -> Iterator[ValkeyServer]:
    with tempfile.TemporaryDirectory(prefix="pgqueue-valkey-") as directory:
        server = start_valkey(Path(directory))
        try:
            yield server
        finally:
            server.stop()
