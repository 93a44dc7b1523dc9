"""Side by side with other job queues: `python -m tests.bench.peers`, a few minutes; with --full everything.

Peers are installed once, into environments of their own under `.bench`.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from tests.bench.common import benchmark_server, machine
from tests.bench.peers import report, runner
from tests.bench.peers.peer import ENVIRONMENTS
from tests.bench.peers.registry import PEERS, STRONGEST

SHORT = ENVIRONMENTS / "short.json"


def run(names: list[str], sizes: runner.Sizes) -> dict[str, Any]:
    results = runner.Results()
    peers = runner.install([PEERS[name] for name in names], results)
    with benchmark_server() as server, runner.sites(server, peers) as sites:
        runner.main_measures(sites, sizes, results)
        about = machine(server)
    return {
        "at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "machine": about,
        "peers": {name: {"version": PEERS[name].version, "settings": PEERS[name].settings} for name in names},
        "missing": results.missing,
        "figures": results.figures,
    }


def show(found: dict[str, Any]) -> None:
    for table in report.tables(found["figures"]):
        table.print()
    for what, why in found["missing"].items():
        print(f"missing: {what}: {why}")


def keep(found: dict[str, Any], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", help="such as pgqueue,floor,pgboss")
    parser.add_argument("--tiny", action="store_true", help="so small that it only shows that it works")
    options = parser.parse_args()
    names = options.peers.split(",") if options.peers else list(STRONGEST)
    found = run(names, runner.TINY if options.tiny else runner.Sizes())
    keep(found, SHORT)
    show(found)


if __name__ == "__main__":
    main()
