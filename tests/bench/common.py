"""What the benchmarks share: the server, its databases, the miniature worker's loop, and how figures are printed."""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import psycopg

from pgqueue import claim, finish, migrate
from pgqueue.db import Connection, connect
from pgqueue.embedded import PostgresServer, start_postgres

SETTINGS = {"shared_buffers": "256MB", "max_wal_size": "4GB", "shared_preload_libraries": "pg_stat_statements"}
SHOWN = ("shared_buffers", "max_wal_size", "fsync", "synchronous_commit", "full_page_writes", "wal_sync_method")
TEMPLATE = "bench_template"

_numbers = count(1)


@contextmanager
def benchmark_server() -> Iterator[PostgresServer]:
    """A PostgreSQL that syncs to the disk, as in production; it goes with its data."""
    with tempfile.TemporaryDirectory(prefix="pgqueue-bench-") as directory:
        Path(directory).chmod(0o711)  # as root the server runs as another user, who must get in
        server = start_postgres(Path(directory), settings=SETTINGS)
        try:
            print_machine(server)
            yield server
        finally:
            server.stop()


@contextmanager
def database(server: PostgresServer) -> Iterator[str]:
    """The DSN of a fresh, migrated database, dropped afterwards."""
    name = f"bench_{next(_numbers)}_{uuid4().hex[:8]}"
    with psycopg.connect(server.dsn, autocommit=True) as admin:
        if admin.execute("SELECT FROM pg_database WHERE datname = %s", [TEMPLATE]).fetchone() is None:
            admin.execute(f"CREATE DATABASE {TEMPLATE}")
            migrate.up(_named(server, TEMPLATE))
        admin.execute(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}")
        try:
            yield _named(server, name)
        finally:
            admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


def _named(server: PostgresServer, name: str) -> str:
    return urlsplit(server.dsn)._replace(path=f"/{name}").geturl()


async def fill(conn: Connection, jobs: int) -> None:
    """Pending jobs that carry little, with statistics, and nothing left to write of them."""
    await conn.execute(
        "INSERT INTO pgqueue.jobs (type, payload)"
        " SELECT 'noop', jsonb_build_object('n', n) FROM generate_series(1, %s) n",
        [jobs],
    )
    await conn.execute("ANALYZE pgqueue.jobs_live")
    await conn.execute("CHECKPOINT")


@dataclass
class Drain:
    """Claims and completes no-op jobs, as a worker whose handlers cost nothing."""

    dsn: str
    batch: int = 500
    floors: bool = True
    """Without them every claim looks from the beginning of its lane on."""
    who: claim.Claimant = field(default_factory=lambda: claim.Claimant(uuid4()))
    lanes: claim.Lanes = field(default_factory=claim.Lanes)

    async def open(self) -> None:
        self.conn = await connect(self.dsn)
        self.lane = ("default", 0)
        self.lanes.floors[self.lane] = 0

    async def close(self) -> None:
        await self.conn.close()

    async def claim(self) -> claim.Claim:
        if not self.floors:
            self.lanes.floors[self.lane] = 0
        return await claim.claim(self.conn, self.who, self.lanes, self.batch)

    async def run(self, jobs: int) -> float:
        """Jobs per second."""
        started, done = time.perf_counter(), 0
        while done < jobs:
            taken = await self.claim()
            done += len(await finish.complete(self.conn, completed(taken)))
            if not taken.jobs:
                raise RuntimeError(f"only {done} of {jobs} jobs were there")
        return done / (time.perf_counter() - started)


def completed(taken: claim.Claim) -> list[finish.Completed]:
    now = time.monotonic()
    return [finish.Completed(job.id, taken.lease_token, now, now, 1, None) for job in taken.jobs]


def alternate(rounds: int, variants: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Every variant in every round, forth and back, so that a slow minute of the machine hits all of them."""
    figures: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds):
        for name in list(variants) if turn % 2 == 0 else reversed(variants):
            figures[name].append(variants[name]())
    return figures


def spread(figures: Sequence[float]) -> str:
    """The median, and from where to where they went."""
    if len(figures) == 1:
        return f"{figures[0]:,.0f}"
    return f"{median(figures):,.0f} ({min(figures):,.0f} to {max(figures):,.0f})"


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(line[place]) for line in (head, *rows)) for place in range(len(head))]
    print(f"\n{title}")
    for line in (head, *rows):
        cells = [
            text.ljust(width) if place == 0 else text.rjust(width)
            for place, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  " + "  ".join(cells).rstrip(), flush=True)


def print_json(name: str, figures: dict[str, Any]) -> None:
    print(json.dumps({"benchmark": name, **figures}), flush=True)


def machine(server: PostgresServer) -> dict[str, Any]:
    """What the figures were measured on."""
    with psycopg.connect(server.dsn) as conn:
        row = conn.execute("SELECT version()").fetchone()
        settings = dict(
            conn.execute("SELECT name, current_setting(name) FROM pg_settings WHERE name = ANY (%s)", [list(SHOWN)])
        )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    hardware = f"{platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB"
    return {
        "machine": f"{hardware}, Python {platform.python_version()}",
        "postgres": str(row[0] if row else "").partition(" on ")[0],
        "settings": settings,
    }


def print_machine(server: PostgresServer) -> None:
    about = machine(server)
    print(about["machine"])
    print(f"{about['postgres']}: " + ", ".join(f"{k} {v}" for k, v in about["settings"].items()), flush=True)
