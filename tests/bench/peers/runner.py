"""Runs the measures over the peers in turn, and keeps what was found."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import redis

from pgqueue.embedded import PostgresServer, start_valkey
from tests.bench.peers import measures
from tests.bench.peers.peer import CannotInstall, InRedis, Peer
from tests.bench.peers.site import Site


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much of everything; `rounds` times over all peers."""

    rounds: int = 3
    jobs: int = 100_000
    seconds: float = 3.0
    """A drain takes this long at least, and as a rule at most twice as long."""
    singles: int = 400
    bulk: int = 20_000
    idle: int = 60
    loaded: int = 1_500
    rate: float = 1_000.0


TINY = Sizes(rounds=1, jobs=200, seconds=0.05, singles=20, bulk=200, idle=10, loaded=50)


@dataclass
class Results:
    """Of each measure and peer the figures of every round."""

    figures: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    """Peers that could not be installed, or failed, and why."""

    def add(self, measure: str, peer: str, figures: Any) -> None:
        if figures is not None:
            self.figures.setdefault(measure, {}).setdefault(peer, []).append(figures)

    def fail(self, measure: str, peer: str, error: Exception) -> None:
        why = f"{type(error).__name__}: {error}".strip()
        print(f"{peer}, {measure}: {why}", file=sys.stderr, flush=True)
        self.missing.setdefault(f"{peer}: {measure}", why.splitlines()[0][:300])


def install(peers: list[Peer], results: Results) -> list[Peer]:
    """Those that could be installed; the others are among the missing."""
    ready = []
    for peer in peers:
        try:
            peer.install()
            ready.append(peer)
        except CannotInstall as error:
            results.fail("installation", peer.name, error)
    return ready


@contextmanager
def broker() -> Iterator[str]:
    """A Valkey that evicts nothing and writes nothing to the disk."""
    with tempfile.TemporaryDirectory(prefix="pgqueue-bench-") as directory:
        server = start_valkey(Path(directory))
        try:
            with redis.Redis.from_url(server.url) as client:
                client.config_set("maxmemory", 0)
                client.config_set("maxmemory-policy", "noeviction")
            yield server.url
        finally:
            server.stop()


@contextmanager
def sites(server: PostgresServer, peers: list[Peer], lease: float | None = None) -> Iterator[list[Site]]:
    """Every peer set up, each with a database of its own."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pgqueue-peers-")))
        url = stack.enter_context(broker()) if any(isinstance(peer.store, InRedis) for peer in peers) else None
        found = []
        for number, peer in enumerate(peers):
            dsn = stack.enter_context(_database(server, peer))
            broker_url = urlsplit(url)._replace(path=f"/{number}").geturl() if url else "redis://"
            site = Site(peer, dsn, broker_url, folder / peer.name, lease)
            stack.callback(site.close)
            site.setup()
            found.append(site)
        yield found


@contextmanager
def _database(server: PostgresServer, peer: Peer) -> Iterator[str]:
    name = f"peer_{peer.name}_{time.monotonic_ns()}".replace("-", "_")
    with psycopg.connect(server.dsn, autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}".encode())
        try:
            yield urlsplit(server.dsn)._replace(path=f"/{name}").geturl()
        finally:
            admin.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def rounds(all: list[Site], times: int, one: Callable[[Site], None]) -> None:
    """Every site in every round, forth and back, so that a slow minute of the machine hits all of them."""
    for turn in range(times):
        for site in all if turn % 2 == 0 else reversed(all):
            one(site)


def main_measures(all: list[Site], sizes: Sizes, results: Results) -> None:
    """Drains, enqueues and latency, after a calibration that says how many jobs each peer gets."""
    jobs: dict[str, int] = {}

    def attempt(measure: str, site: Site, what: Callable[[], None]) -> None:
        began = time.monotonic()
        try:
            what()
        except Exception as error:
            results.fail(measure, site.peer.name, error)
        print(f"  {site.peer.name}: {measure}, {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)

    def calibrate(site: Site) -> None:
        with site.working() as workers:
            rate = measures.drain(site, workers, max(20, int(site.peer.hint * sizes.seconds / 4)))["jobs/s"]
        jobs[site.peer.name] = measures.size(rate, sizes.jobs, sizes.seconds)

    def with_one(site: Site) -> None:
        site.clear()
        with site.working() as workers:
            results.add("drain, 1 process", site.peer.name, measures.drain(site, workers, jobs[site.peer.name]))
            if site.peer.handlers:
                results.add("latency, idle", site.peer.name, measures.latency(site, sizes.idle, 0))
                results.add("latency, loaded", site.peer.name, measures.latency(site, sizes.loaded, sizes.rate))

    def with_two(site: Site) -> None:
        site.clear()
        with site.working(2) as workers:
            results.add("drain, 2 processes", site.peer.name, measures.drain(site, workers, jobs[site.peer.name]))

    def enqueues(site: Site) -> None:
        site.clear()
        results.add("enqueue, one at a time", site.peer.name, measures.enqueue(site, sizes.singles))
        results.add("enqueue, many", site.peer.name, measures.enqueue_many(site, sizes.bulk))

    def everything(site: Site) -> None:
        if site.peer.name not in jobs:
            return
        attempt("drain, 1 process", site, lambda: with_one(site))
        attempt("drain, 2 processes", site, lambda: with_two(site))
        attempt("enqueue", site, lambda: enqueues(site))

    rounds(all, 1, lambda site: attempt("calibration", site, lambda: calibrate(site)))
    rounds(all, sizes.rounds, everything)
