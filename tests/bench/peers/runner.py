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
from tests.bench.peers import measures, rarer
from tests.bench.peers.peer import CannotInstall, InPostgres, InRedis, Peer
from tests.bench.peers.registry import STRONGEST
from tests.bench.peers.site import Site

CLIENTS = 32


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
    held: int = 200_000
    inserting: int = 5
    """Seconds."""
    scheduled: int = 200
    backlog: int = 5_000_000
    patience: float = 150.0
    """How long a dead worker's job is waited for."""
    lease: float = 30.0
    """Seconds, where the peers are set alike."""


TINY = Sizes(
    rounds=1,
    jobs=200,
    seconds=0.05,
    singles=20,
    bulk=200,
    idle=10,
    loaded=50,
    held=200,
    inserting=1,
    scheduled=10,
    backlog=500,
    patience=40,
    lease=10,
)


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


@dataclass
class Run:
    """The measures over the sites, round by round; what fails is noted, and the others go on."""

    sites: list[Site]
    sizes: Sizes
    results: Results = field(default_factory=Results)
    jobs: dict[str, int] = field(default_factory=dict)
    """How many jobs each peer gets in a drain."""

    def attempt(self, measure: str, site: Site, what: Callable[[Site], None]) -> None:
        began = time.monotonic()
        try:
            what(site)
        except Exception as error:
            self.results.fail(measure, site.peer.name, error)
        print(f"  {site.peer.name}: {measure}, {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)

    def rounds(self, measure: str, what: Callable[[Site], None], sites: list[Site], times: int) -> None:
        """Every site in every round, forth and back, so that a slow minute of the machine hits all of them."""
        for turn in range(times):
            for site in sites if turn % 2 == 0 else reversed(sites):
                self.attempt(measure, site, what)

    def short(self) -> None:
        """Drains, enqueues and latency, after a calibration that says how many jobs each peer gets."""
        self.rounds("calibration", self._calibrate, self.sites, 1)
        self.calibrated()

    def calibrated(self) -> None:
        ready = [site for site in self.sites if site.peer.name in self.jobs]
        for turn in range(self.sizes.rounds):
            for site in ready if turn % 2 == 0 else reversed(ready):
                self.attempt("drain, 1 process", site, self._with_one)
                self.attempt("drain, 2 processes", site, self._with_two)
                self.attempt("enqueue", site, self._enqueue)

    def _calibrate(self, site: Site) -> None:
        with site.working() as workers:
            rate = measures.drain(site, workers, max(20, int(site.peer.hint * self.sizes.seconds / 4)))["jobs/s"]
        self.jobs[site.peer.name] = measures.size(rate, self.sizes.jobs, self.sizes.seconds)

    def _with_one(self, site: Site) -> None:
        name, sizes = site.peer.name, self.sizes
        site.clear()
        with site.working() as workers:
            self.results.add("drain, 1 process", name, measures.drain(site, workers, self.jobs[name]))
            if site.peer.handlers:
                self.results.add("latency, idle", name, measures.latency(site, sizes.idle, 0))
                self.results.add("latency, loaded", name, measures.latency(site, sizes.loaded, sizes.rate))

    def _with_two(self, site: Site) -> None:
        name = site.peer.name
        site.clear()
        with site.working(2) as workers:
            self.results.add("drain, 2 processes", name, measures.drain(site, workers, self.jobs[name]))

    def _enqueue(self, site: Site) -> None:
        name = site.peer.name
        site.clear()
        self.results.add("enqueue, one at a time", name, measures.enqueue(site, self.sizes.singles))
        self.results.add("enqueue, many", name, measures.enqueue_many(site, self.sizes.bulk))

    def rest(self) -> None:
        """What the full run measures besides."""
        handlers = [site for site in self.sites if site.peer.handlers]
        postgres = [site for site in handlers if isinstance(site.peer.store, InPostgres)]
        strongest = [site for site in postgres if site.peer.name in STRONGEST]
        busy = [site for site in postgres if site.peer.slots]
        self.rounds("scheduled", self._scheduled, handlers, 1)
        self.rounds("held snapshot", self._held, postgres, 1)
        self.rounds("inserters, idle worker", self._inserters, postgres, self.sizes.rounds)
        self.rounds("inserters, busy worker", self._busy_inserters, busy, self.sizes.rounds)
        self.rounds("features", self._features, [site for site in self.sites if site.peer.name == "pgqueue"], 1)
        self.rounds("backlog", self._backlog, strongest, 1)

    def _scheduled(self, site: Site) -> None:
        site.clear()
        with site.working():
            late = measures.lateness(site, self.sizes.scheduled, 5 if self.sizes.scheduled > 20 else 1)
        self.results.add("scheduled", site.peer.name, late)

    def _held(self, site: Site) -> None:
        jobs = min(self.sizes.held, 2 * self.jobs.get(site.peer.name, 20))
        self.results.add("held snapshot", site.peer.name, rarer.held(site, jobs))

    def _inserters(self, site: Site) -> None:
        rate = rarer.inserters(site, CLIENTS, self.sizes.inserting, busy=False)
        self.results.add("inserters, idle worker", site.peer.name, rate)

    def _busy_inserters(self, site: Site) -> None:
        rate = rarer.inserters(site, CLIENTS, self.sizes.inserting, busy=True)
        self.results.add("inserters, busy worker", site.peer.name, rate)

    def _features(self, site: Site) -> None:
        for name, figures in rarer.features(site, self.jobs.get(site.peer.name, 20)).items():
            self.results.add("features", name, figures)

    def _backlog(self, site: Site) -> None:
        seconds = 10 if self.sizes.backlog > 1_000_000 else 1
        self.results.add("backlog", site.peer.name, rarer.backlog(site, self.sizes.backlog, seconds))

    def recoveries(self, sites: list[Site], measure: str) -> None:
        for name, seconds in rarer.recoveries(sites, self.sizes.patience).items():
            if isinstance(seconds, Exception):
                self.results.fail(measure, name, seconds)
            else:
                self.results.add(measure, name, {"seconds": seconds, "limit": self.sizes.patience})


def recoveries(server: PostgresServer, peers: list[Peer], sizes: Sizes, results: Results) -> None:
    """As the peers ship, and then with leases that are alike; mostly waiting, so all of them at the same time."""
    peers = [peer for peer in peers if peer.handlers]
    with sites(server, peers) as shipped:
        Run(shipped, sizes, results).recoveries(shipped, "recovery, as shipped")
    with sites(server, [peer for peer in peers if peer.alike], sizes.lease) as alike:
        Run(alike, sizes, results).recoveries(alike, "recovery, alike")
