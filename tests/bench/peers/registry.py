"""All peers, ours first."""

from __future__ import annotations

from tests.bench.peers import (
    arq,
    celery,
    chancy,
    dramatiq,
    floor,
    graphile,
    ours,
    pgboss,
    pgqueuer,
    procrastinate,
    rq,
)
from tests.bench.peers.peer import Peer

PEERS: dict[str, Peer] = {
    peer.name: peer
    for module in (ours, floor, graphile, pgboss, pgqueuer, chancy, procrastinate, dramatiq, arq, celery, rq)
    for peer in module.PEERS
}
STRONGEST = ("pgqueue", "floor", "graphile-batched", "pgboss", "pgqueuer-asyncpg")
"""What the short run measures."""
