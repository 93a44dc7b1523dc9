"""What a fault stands on: a PostgreSQL of its own that fsyncs, workers with short leases, a sink for what they call."""

import asyncio
import math
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from pgqueue import migrate
from pgqueue.embedded import PostgresServer, start_postgres
from tests.chaos.registry import scenario
from tests.chaos.verdict import Skipped, Verdict
from tests.once.handlers import Sink
from tests.worker.processes import SHORT_LEASE, Database, Fleet, WorkerProcess

ROOT = Path(__file__).parents[2]
APP = "tests.chaos.site_app"
_told: ContextVar[list[str]] = ContextVar("told")
"""The last that the workers of a scenario said; it is shown if the scenario fails."""


def fault(
    name: str, title: str, *, invariant: str, **options: Any
) -> Callable[[Callable[[Verdict, bool], None]], None]:
    """A scenario that waits more than it works, written without async. It is told whether the run is a small one. Its
    faults come in a fixed order, whatever the seed."""

    def register(body: Callable[[Verdict, bool], None]) -> None:
        @scenario(name, title, invariant=invariant, **options)
        async def run(lab: Any) -> Verdict:
            verdict = Verdict()
            told: list[str] = []
            _told.set(told)
            try:
                await asyncio.to_thread(body, verdict, lab.scale != "long")
            except Skipped:
                raise
            except Exception as error:
                verdict.problems.append(f"{type(error).__name__}: {error}"[:2000])
                told.append(traceback.format_exc())
            if verdict.problems:
                print(f"{name}:", *told, sep="\n", file=sys.stderr)
            return verdict

    return register


@dataclass
class Site:
    folder: Path
    server: PostgresServer
    db: Database
    fleet: Fleet
    sink: Sink

    def worker(self, name: str, *, dsn: str | None = None, ready: bool = True, **settings: Any) -> WorkerProcess:
        env = {"PYTHONPATH": str(ROOT), "SINK": str(self.sink.folder)} | settings.pop("env", {})
        if dsn is not None:
            env["DATABASE_URL"] = dsn
        return self.fleet.start(name, app=APP, ready=ready, **settings, **SHORT_LEASE | env)

    def events(self, event: str) -> int:
        return sum(len(worker.events(event)) for worker in self.fleet.workers)


@contextmanager
def site(settings: dict[str, str] | None = None, *, bin_dir: Path | None = None) -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="pgqueue-chaos-") as directory:
        folder = Path(directory)
        folder.chmod(0o711)  # as root the server runs as another user, who must get in
        server = start_postgres(folder / "pg", bin_dir=bin_dir, settings=settings)
        try:
            with on(server, folder) as made:
                yield made
        finally:
            server.stop("immediate")


@contextmanager
def on(server: PostgresServer, folder: Path) -> Iterator[Site]:
    migrate.up(server.dsn)
    with psycopg.connect(server.dsn, autocommit=True) as conn:
        conn.execute("ALTER ROLE CURRENT_USER SET search_path = public")
    db = Database(server.dsn)
    logs, sink = folder / "logs", folder / "sink"
    logs.mkdir()
    sink.mkdir()
    fleet = Fleet(server.dsn, logs, db)
    try:
        yield Site(folder, server, db, fleet, Sink(str(sink)))
    finally:
        _told.get([]).append(fleet.told())
        fleet.end()
        db.close()


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def tool(path: str, why: str) -> Path:
    """The first that is there of `a:b:c`, or the scenario is skipped."""
    for each in path.split(":"):
        if os.path.exists(each):
            return Path(each)
    raise Skipped(f"no {why}")
