"""The benchmarks run. What they find is not tested: figures belong to machines."""

import pytest

from pgqueue.embedded import PostgresServer
from tests.bench import floors, inserters, statements, worker
from tests.bench.peers import check, docs, registry, report, runner
from tests.bench.peers.peer import Here

pg18 = pytest.mark.parametrize("server", ["pg18"], indirect=True)


@pg18
def test_floors(server: PostgresServer) -> None:
    figures = floors.run(server, jobs=400, part=200, batch=100)
    assert [len(rates) for rates in figures.values()] == [2, 2, 2]


@pg18
def test_inserters(server: PostgresServer) -> None:
    figures = inserters.run(server, clients=2, seconds=1, rounds=1)
    assert all(rates[0] > 0 for rates in figures.values())


@pg18
def test_statements(server: PostgresServer) -> None:
    figures = statements.run(server, jobs=1000, singles=10, rounds=1)
    assert len(figures) == 11


@pg18
def test_worker(server: PostgresServer) -> None:
    figures = worker.run(server, jobs=500, rounds=1, samples=20, seconds=0.5, memory=400)
    assert [len(rates) for rates in figures["jobs_per_second"].values()] == [1, 1, 1]
    assert all(size > 0 for size in figures["memory_mb"])


@pg18
def test_peers(server: PostgresServer) -> None:
    """Ours, the floor, and one of the others if it happens to be installed."""
    others = [peer for peer in registry.PEERS.values() if peer.installed and not isinstance(peer, Here)]
    peers = [registry.PEERS["pgqueue"], registry.PEERS["floor"], *others[:1]]
    with runner.sites(server, peers) as sites:
        run = runner.Run(sites, runner.TINY, jobs={peer.name: 100 for peer in peers})
        run.calibrated()
    assert not run.results.missing
    assert all(run.results.figures["drain, 2 processes"][peer.name][0]["jobs/s"] > 0 for peer in peers)
    assert len(report.tables(run.results.figures)) == report.SHORT
    assert "<svg" in docs.drawn(run.results.figures)["drain"]


def test_what_fell_by_more_than_a_fifth_is_found() -> None:
    assert check.fallen({"drain": 0.79, "enqueue": 0.81}, {"drain": 1.0, "enqueue": 1.0}) == ["drain"]
