"""Side by side with other job queues: `python -m tests.bench.peers`, a few minutes; with --full everything.

Peers are installed once, into environments of their own under `.bench`. The full run writes its figures into the docs.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from pgqueue.embedded import PostgresServer
from tests.bench.common import benchmark_server, machine
from tests.bench.peers import docs, report, runner
from tests.bench.peers.peer import ENVIRONMENTS, Peer
from tests.bench.peers.registry import PEERS, STRONGEST

SHORT = ENVIRONMENTS / "short.json"


def run(server: PostgresServer, names: list[str], sizes: runner.Sizes, *, full: bool) -> dict[str, Any]:
    results = runner.Results()
    peers = runner.install([PEERS[name] for name in names], results)
    with runner.sites(server, peers) as sites:
        measures = runner.Run(sites, sizes, results)
        measures.short()
        if full:
            measures.rest()
    if full:
        runner.recoveries(server, peers, sizes, results)
    return {
        "at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "machine": machine(server),
        "peers": {name: about(PEERS[name]) for name in names},
        "missing": results.missing,
        "figures": results.figures,
    }


def about(peer: Peer) -> dict[str, str]:
    return {"version": peer.version, "settings": peer.settings}


def show(found: dict[str, Any]) -> None:
    for table in report.tables(found["figures"]):
        table.print()
    for what, why in found["missing"].items():
        print(f"missing: {what}: {why}")


def keep(found: dict[str, Any], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    print(f"\nkept in {file}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="all peers and all measures")
    parser.add_argument("--peers", help="such as pgqueue,floor,pgboss")
    parser.add_argument("--tiny", action="store_true", help="so small that it only shows that it works")
    options = parser.parse_args()
    chosen = options.peers.split(",") if options.peers else list(PEERS if options.full else STRONGEST)
    with benchmark_server() as server:
        found = run(server, chosen, runner.TINY if options.tiny else runner.Sizes(), full=options.full)
    show(found)
    if options.tiny or not options.full:
        keep(found, SHORT)
    else:
        keep(found, docs.FULL)
        docs.write(found)


if __name__ == "__main__":
    main()
