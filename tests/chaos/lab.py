"""What a scenario works with: servers and databases of its own, workers that really die, producers, a ledger.

    @scenario("C0", "…", invariant="…")
    async def c0(lab: Lab) -> Verdict:
        ground = await lab.ground()
        lab.worker(ground)
        await lab.produce(ground, [("effect", {"key": key}) for key in lab.keys(100)])
        await ground.settled()
        return await judge(lab, ground)

Everything that a lab has started ends with it.
"""

import asyncio
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeVar
from uuid import UUID

import psycopg
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from pgqueue.embedded import PostgresServer, ValkeyServer, start_valkey
from tests.chaos.door import Door
from tests.chaos.handlers import EFFECTS
from tests.chaos.ledger import Ledger
from tests.chaos.monitor import AUDIT, Monitor
from tests.chaos.sink import Sink
from tests.chaos.verdict import Verdict
from tests.chaos.wire import Wire
from tests.once.arena import Arena, Place, started_arena
from tests.once.nursery import Nursery, Process

Scale = Literal["minute", "normal", "long"]
T = TypeVar("T")

LEASE = 2.0
RESCUE = 0.3
POLL = 0.3
HEARTBEAT = 0.4
SETTINGS = {
    "PGQUEUE_LEASE_TIMEOUT": str(LEASE),
    "PGQUEUE_HEARTBEAT_INTERVAL": str(HEARTBEAT),
    "PGQUEUE_RESCUE_INTERVAL": str(RESCUE),
    "PGQUEUE_POLL_INTERVAL": str(POLL),
    "PGQUEUE_SHUTDOWN_GRACE": "4",
}
# A crash of PostgreSQL must not cost what it had acknowledged, so nothing is switched off that protects it.
DURABLE = {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"}


class Ground(Place):
    """A database, seen from outside; the connection is made anew when the server was away."""

    server: PostgresServer
    audited: bool
    """Whether triggers note what jobs may not do."""

    async def rows(self, query: str, *parameters: Any) -> list[dict[str, Any]]:
        while True:
            try:
                async with self.conn.cursor(row_factory=dict_row) as cursor:
                    await cursor.execute(query.encode(), parameters or None)
                    return await cursor.fetchall() if cursor.description else []
            except (psycopg.OperationalError, psycopg.InternalError):
                await self._connect_again()

    async def _connect_again(self) -> None:
        await self.conn.close()
        self.conn = await connected(self.dsn)
        await self.conn.set_autocommit(True)

    async def settled(self, within: float = 300) -> None:
        """Until every job has ended. How long that takes is not what is tested, and the machine may have other work."""
        deadline = time.monotonic() + within
        query = "SELECT status::text, count(*)::int FROM pgqueue.jobs_live GROUP BY 1"
        while left := await self.rows(query):
            assert time.monotonic() < deadline, f"not ended within {within:g} s: {left}"
            await asyncio.sleep(0.1)

    async def statuses(self) -> dict[str, int]:
        rows = await self.rows("SELECT status::text, count(*)::int FROM pgqueue.jobs GROUP BY 1")
        return {row["status"]: row["count"] for row in rows}

    async def worker_of(self, process: Process, within: float = 120) -> UUID:
        """Its id, once it has registered."""
        query = "SELECT id FROM pgqueue.workers WHERE pid = %s ORDER BY started_at DESC LIMIT 1"
        found: UUID = await until(lambda: self.value(query, process.pid), f"{process.pid} is registered", within)
        return found


class Suite:
    """What all scenarios share: the process that forks workers, and a PostgreSQL that nobody breaks."""

    def __init__(self, folder: Path, nursery: Nursery, arena: Arena) -> None:
        self.folder = folder
        self.nursery = nursery
        self.arena = arena
        self.minutes = 3.0
        """Of a soak."""
        self.failed = False
        """Whether the logs are worth keeping."""

    @classmethod
    @asynccontextmanager
    async def started(cls) -> AsyncIterator["Suite"]:
        # A socket's path must be short.
        folder = Path(tempfile.mkdtemp(prefix="chaos-"))
        logs = folder / "logs"
        logs.mkdir()
        nursery = Nursery(logs)
        arena = started_arena(DURABLE, free_port())
        try:
            suite = cls(folder, nursery, await asyncio.to_thread(arena.__enter__))
            yield suite
        finally:
            nursery.close()
            await asyncio.to_thread(arena.__exit__, None, None, None)
            if suite.failed:
                print(f"what went wrong is in {folder}", file=sys.stderr)
            else:
                shutil.rmtree(folder, ignore_errors=True)


class Lab:
    def __init__(self, suite: Suite, name: str, scale: Scale, seed: int, stack: AsyncExitStack) -> None:
        self.suite = suite
        self.scale = scale
        self.seed = seed
        self.random = random.Random(f"{name} {seed}")
        self.folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=suite.folder))
        self.ledger = Ledger(self.folder)
        self.processes: list[Process] = []
        self.refused: Counter[str] = Counter()
        """What producers were told instead of an acknowledgement, by SQLSTATE."""
        self.stack = stack
        self._sink: Sink | None = None
        self._numbers = count(1)
        stack.callback(self.ledger.close)
        stack.callback(self.kill_all)

    @classmethod
    @asynccontextmanager
    async def opened(cls, suite: Suite, name: str, scale: Scale, seed: int) -> AsyncIterator["Lab"]:
        async with AsyncExitStack() as stack:
            yield cls(suite, name, scale, seed, stack)

    def size(self, minute: T, normal: T, long: T) -> T:
        """The one for this run."""
        return {"minute": minute, "normal": normal, "long": long}[self.scale]

    # Servers

    async def ground(self, settings: dict[str, str] | None = None, *, own: bool = False, audit: bool = True) -> Ground:
        """A database with effects, on the shared server, or on one of its own that may be broken."""
        arena = await self.arena(settings) if own or settings else self.suite.arena
        place = await self.stack.enter_async_context(arena.place())
        ground = Ground(place.dsn, place.conn, place.sink)
        ground.server, ground.audited = arena.server, audit
        self.stack.push_async_callback(self._close, ground)
        await ground.conn.execute(EFFECTS.encode())
        if audit:
            await ground.conn.execute(AUDIT.encode())
        return ground

    async def arena(self, settings: dict[str, str] | None = None) -> Arena:
        """A PostgreSQL of its own. Its port is not one that the kernel gives to anybody while it is down."""
        starting = started_arena(DURABLE | (settings or {}), free_port())
        arena = await asyncio.to_thread(starting.__enter__)

        async def stop() -> None:
            # Dropping databases needs a server that runs.
            await asyncio.to_thread(starting.__exit__, None, None, None)

        self.stack.push_async_callback(stop)
        return arena

    async def valkey(self) -> ValkeyServer:
        server = await asyncio.to_thread(start_valkey, self.folder / "valkey")
        self.stack.push_async_callback(asyncio.to_thread, server.stop)
        return server

    async def wire(self, ground: Ground) -> Wire:
        """A proxy before it: workers and producers that use its dsn have their connections cut by chance."""
        return await self.stack.enter_async_context(Wire(ground.dsn, self.random).running())

    async def monitor(self, ground: Ground, *, lease: float = LEASE, rescue: float = RESCUE) -> Monitor:
        watched = Monitor(ground.dsn, lambda: [one.pid for one in self.alive], lease=lease, rescue=rescue)
        return await self.stack.enter_async_context(watched.watching())

    async def door(self, dsn: str, **environ: str) -> Door:
        """The API, on this database."""
        return await self.stack.enter_async_context(Door.opened(self, dsn, **environ))

    # Workers

    def worker(
        self,
        ground: Ground,
        *,
        app: str = "tests.chaos.handlers",
        dsn: str | None = None,
        threads: int = 8,
        level: str = "warning",
        queues: list[str] | None = None,
        **env: str,
    ) -> Process:
        """A real process, forked from one that has everything imported."""
        if self._sink is not None:
            env = {"CHAOS_SINK": str(self._sink.address)} | env
        process = self.suite.nursery.worker(
            dsn or ground.dsn, app, threads=threads, queues=queues, level=level, **SETTINGS | env
        )
        self.processes.append(process)
        return process

    @property
    def alive(self) -> list[Process]:
        return [process for process in self.processes if process.code is None]

    def said(self, event: str) -> int:
        """How often workers logged it."""
        return sum(len(process.said(event)) for process in self.processes)

    async def freeze(self, process: Process, seconds: float) -> None:
        process.send(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        process.send(signal.SIGCONT)

    # The outside

    def sink(self) -> Sink:
        """Before workers start: they are told where it is."""
        if self._sink is None:
            self._sink = Sink(self.folder)
            self.stack.callback(self._sink.close)
        return self._sink

    def sink_calls(self) -> list[dict[str, Any]]:
        return [] if self._sink is None else self._sink.calls()

    # Producers

    def keys(self, number: int) -> list[str]:
        return [f"k{next(self._numbers)}" for _ in range(number)]

    async def produce(
        self, ground: Ground, jobs: Sequence[tuple[str, dict[str, Any]]], *, dsn: str | None = None, batch: int = 50
    ) -> None:
        """Adds jobs by SQL, a transaction a batch, and keeps the ledger. What is not acknowledged is not repeated."""
        conn: psycopg.AsyncConnection | None = None
        for start in range(0, len(jobs), batch):
            some = jobs[start : start + batch]
            keys = [payload["key"] for _, payload in some]
            rows = [(type, Jsonb(payload)) for type, payload in some]
            if conn is None or conn.closed:
                conn = await connected(dsn or ground.dsn)
            self.ledger.attempt(keys)
            try:
                async with conn.cursor() as cursor:
                    await cursor.executemany(
                        b"INSERT INTO pgqueue.jobs (type, payload, max_attempts) VALUES (%s, %s, 20)", rows
                    )
                await conn.commit()
                self.ledger.acknowledge(keys)
            except (psycopg.OperationalError, psycopg.InternalError) as error:
                self.refused[error.sqlstate or "cut"] += 1
                await conn.close()
        if conn is not None:
            await conn.close()

    # Ends

    async def _close(self, ground: Ground) -> None:
        self.kill_all()
        await ground.conn.close()
        if not ground.server._main_pid():
            await asyncio.to_thread(ground.server.restart)  # its databases are dropped next

    def kill_all(self) -> None:
        for process in self.alive:
            process.send(signal.SIGCONT)
            process.kill()


async def connected(dsn: str, within: float = 60) -> psycopg.AsyncConnection:
    """A connection, as soon as there can be one."""
    deadline = time.monotonic() + within
    while True:
        try:
            return await psycopg.AsyncConnection.connect(dsn, connect_timeout=5, prepare_threshold=None)
        except psycopg.OperationalError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.1)


def observed(verdict: Verdict, monitor: Monitor) -> None:
    """What the monitor saw goes into the verdict."""
    verdict.recovery += monitor.recovery
    verdict.problems += sorted(monitor.problems)
    verdict.figures |= {
        "connections_max": int(monitor.highest("connections")),
        "xmin_age_max": int(monitor.highest("xmin_age")),
        "rss_mb_max": round(monitor.highest("rss") / 1024),
        "fds_max": int(monitor.highest("fds")),
        "overdue_max": round(monitor.highest("overdue"), 2),
    }


async def until(ask: Callable[[], Any], what: str, within: float = 120, every: float = 0.02) -> Any:
    """Asks until the answer is true, and returns it."""
    deadline = time.monotonic() + within
    while True:
        answer = ask()
        if asyncio.iscoroutine(answer):
            answer = await answer
        if answer:
            return answer
        assert time.monotonic() < deadline, f"not within {within:g} s: {what}"
        await asyncio.sleep(every)


def free_port() -> int:
    """Below those that the kernel hands out: while a server is down, an outgoing connection could take its port."""
    while True:
        port = random.SystemRandom().randrange(18000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
