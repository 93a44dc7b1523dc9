"""A peer that is set up: its database, its workers, its producer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
import redis

from tests.bench.peers import usage
from tests.bench.peers.peer import ROOT, InPostgres, InRedis, Peer, environ

PATIENCE = 120.0


class TooSlow(Exception):
    """It did not finish, or not even start, in time."""


@dataclass
class Servers:
    """The PostgreSQL and the Valkey that all of them share."""

    dsn: str
    redis_url: str


@dataclass
class Workers:
    roots: list[int]
    processes: list[subprocess.Popen[bytes]]

    def alive(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def kill(self) -> None:
        """As kill -9 does: nothing is given back."""
        for pid in usage.tree(self.roots):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in self.processes:
            process.wait()


@dataclass
class Site:
    peer: Peer
    dsn: str
    redis_url: str
    folder: Path
    lease: float | None = None
    """Seconds; None: as the peer ships."""
    part: int = 1000
    """After how many jobs of the type count the handler notes the time."""
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.stamps = self.folder / "stamps"
        self.counts = self.folder / "counts"
        self.log = self.folder / "log"
        self.conn = psycopg.connect(self.dsn, autocommit=True)
        self.redis = redis.Redis.from_url(self.redis_url)
        self.server = usage.parent(self.conn.info.backend_pid)
        if isinstance(self.peer.store, InRedis):
            self.server = int(self.redis.info("server")["process_id"])  # type: ignore[index]

    def close(self) -> None:
        self.conn.close()
        self.redis.close()

    def setup(self) -> None:
        for command in self.peer.setup():
            self._run(command)

    def _environ(self) -> dict[str, str]:
        more = {
            "DATABASE_URL": self.dsn,
            "PGDSN": self.dsn,
            "BENCH_STAMPS": str(self.stamps),
            "BENCH_COUNTS": str(self.counts),
            "BENCH_PART": str(self.part),
        }
        if isinstance(self.peer.store, InRedis):
            more["REDIS_URL"] = self.redis_url
        if self.lease is not None:
            more["BENCH_LEASE"] = str(round(self.lease))
        return environ(self.peer, **more)

    def _run(self, command: list[str]) -> str:
        done = subprocess.run(command, cwd=ROOT, env=self._environ(), capture_output=True, text=True, timeout=PATIENCE)
        if done.returncode:
            raise RuntimeError(f"{self.peer.name}: {' '.join(command[:3])} …: {(done.stderr or done.stdout)[-2000:]}")
        return done.stdout

    def produce(self, *arguments: object) -> dict[str, Any]:
        """A measure of the producer, in a process of its own."""
        lines = self._run(self.peer.produce(*(str(argument) for argument in arguments))).splitlines()
        found: dict[str, Any] = json.loads(lines[-1])
        return found

    def numbers(self, jobs: int) -> int:
        """The first of so many numbers that no job had before."""
        first = next(self._numbers)
        for _ in range(jobs - 1):
            next(self._numbers)
        return first

    @contextmanager
    def working(self, processes: int = 1) -> Iterator[Workers]:
        """Workers that have already run a job, each of them, or at least most likely."""
        with self.started(processes) as workers:
            self._warm(workers, processes)
            yield workers

    @contextmanager
    def started(self, processes: int = 1) -> Iterator[Workers]:
        with ExitStack() as stack:
            log = stack.enter_context(self.log.open("ab"))
            all = [
                subprocess.Popen(command, cwd=ROOT, env=self._environ(), stdout=log, stderr=log, start_new_session=True)
                for command in self.peer.workers(processes)
            ]
            workers = Workers([process.pid for process in all], all)
            try:
                yield workers
            finally:
                _stop(workers)

    def _warm(self, workers: Workers, processes: int) -> None:
        if not self.peer.handlers:
            time.sleep(1.5)
            return
        deadline = time.monotonic() + PATIENCE
        seen: set[int] = set()
        enough: float | None = None
        while len(seen) < processes and (enough is None or time.monotonic() < enough):
            first = self.numbers(20)
            self.produce("stamps", 20, first, 0)
            self.wait(lambda first=first: len(self.starts(first, first + 20)) == 20, deadline, workers)
            seen = {pid for _, pid in self.starts().values()}
            enough = enough or time.monotonic() + 2
        self.wait(self.empty, deadline, workers)

    def wait(self, condition: Callable[[], bool], deadline: float, workers: Workers | None = None) -> None:
        """Looking may not cost more than a twentieth of the time."""
        while True:
            started = time.monotonic()
            if condition():
                return
            now = time.monotonic()
            if workers is not None and not workers.alive():
                raise RuntimeError(f"{self.peer.name}: a worker ended: {self.log.read_text()[-2000:]}")
            if now > deadline:
                raise TooSlow(f"{self.peer.name}: {self.log.read_text()[-500:]}")
            time.sleep(max(0.01, 20 * (now - started)))

    def starts(self, first: int = 0, end: int = 2**62) -> dict[int, tuple[float, int]]:
        """Of each numbered job in the range its last start and process."""
        found = {}
        if self.stamps.exists():
            for line in self.stamps.read_text().splitlines():
                number, at, pid = line.split()
                if first <= int(number) < end:
                    found[int(number)] = (float(at), int(pid))
        return found

    def clear(self) -> None:
        store = self.peer.store
        if isinstance(store, InPostgres):
            self.conn.execute(f"TRUNCATE {store.tables} CASCADE".encode())
            self.conn.execute("CHECKPOINT")
        else:
            self.redis.flushdb()
        self.stamps.unlink(missing_ok=True)
        self.counts.unlink(missing_ok=True)

    @contextmanager
    def filled(self, job: str, jobs: int) -> Iterator[Callable[[], None]]:
        """Pending jobs that nobody sees until the function is called; then all of them are there at once."""
        store = self.peer.store
        if isinstance(store, InPostgres):
            with psycopg.connect(self.dsn) as conn:
                conn.execute(store.fill.encode(), {"job": job, "jobs": jobs})
                conn.execute(f"ANALYZE {store.tables.split(',')[0]}".encode())
                yield conn.commit
        else:
            self.produce("hidden", jobs)
            yield lambda: self._reveal(store)

    def _reveal(self, store: InRedis) -> None:
        with self.redis.pipeline(transaction=True) as pipe:
            for source, target in store.keys:
                pipe.rename(source, target)
            pipe.execute()

    def empty(self) -> bool:
        store = self.peer.store
        if isinstance(store, InPostgres):
            row = self.conn.execute(store.empty.encode()).fetchone()
            return bool(row and row[0])
        return not any(self.redis.execute_command(*command) for command in store.left)

    def written(self) -> float:
        """The position in the write-ahead log, in bytes."""
        row = self.conn.execute("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')").fetchone()
        return float(row[0]) if row else 0.0


def _stop(workers: Workers) -> None:
    for process in workers.processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + 5
    for process in workers.processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            break
    for process in workers.processes:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    for process in workers.processes:
        process.wait()
