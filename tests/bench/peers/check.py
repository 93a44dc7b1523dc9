"""Did ours become slower? `python -m tests.bench.peers.check` compares ours beside the floor with the ratios kept.

Figures belong to machines, but ours and the floor run the same SQL on the same server within the same minute: what is
left is what our own code costs. Of each the best of the rounds counts, since noise only ever slows down.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from tests.bench.common import benchmark_server
from tests.bench.peers import runner
from tests.bench.peers.docs import HERE
from tests.bench.peers.registry import PEERS
from tests.bench.peers.report import Column

KEPT = HERE / "ratios.json"
ALLOWED = 0.8
SIZES = runner.Sizes(rounds=5, jobs=50_000, seconds=1.0, singles=400, bulk=20_000, idle=20, loaded=100)
COLUMNS = [
    Column("drain, 1 process", "drain, 1 process", "jobs/s"),
    Column("drain, 2 processes", "drain, 2 processes", "jobs/s"),
    Column("enqueue, one at a time", "enqueue, one at a time"),
    Column("enqueue, many", "enqueue, many"),
]


def ratios(figures: dict[str, Any]) -> dict[str, float]:
    """Ours beside the floor."""
    return {
        column.head: round(max(column.values(figures, "pgqueue")) / max(column.values(figures, "floor")), 3)
        for column in COLUMNS
    }


def fallen(found: dict[str, float], kept: dict[str, float]) -> list[str]:
    """What fell by more than a fifth."""
    return [name for name, ratio in kept.items() if found[name] < ratio * ALLOWED]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true", help="keep the ratios of this run")
    options = parser.parse_args()
    results = runner.Results()
    with benchmark_server() as server, runner.sites(server, [PEERS["pgqueue"], PEERS["floor"]]) as sites:
        runner.Run(sites, SIZES, results).short()
    found = ratios(results.figures)
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for name, ratio in found.items():
        print(f"{name}: {ratio:.2f} of the floor, kept {kept.get(name, '–')}")
    if options.keep:
        KEPT.write_text(json.dumps(found, indent=1) + "\n")
    elif not kept:
        sys.exit("no ratios are kept yet: python -m tests.bench.peers.check --keep, on a quiet machine")
    elif slower := fallen(found, kept):
        sys.exit(f"slower by more than a fifth: {', '.join(slower)}")


if __name__ == "__main__":
    main()
