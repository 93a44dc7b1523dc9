"""Does a held snapshot slow the queue down as it drains? With floors it should not.

No-op jobs are claimed and completed in batches, in three databases in turn: one where nothing holds back the vacuum,
one where a REPEATABLE READ snapshot is held from before the first claim to the end, and one where it is held and the
claims have no floors.
"""

from __future__ import annotations

import argparse
import asyncio
from contextlib import AsyncExitStack
from itertools import pairwise
from statistics import median

from pgqueue.db import connect
from pgqueue.embedded import PostgresServer
from tests.bench.common import Drain, benchmark_server, database, fill, print_json, print_table

VARIANTS = {"free": (False, True), "snapshot held": (True, True), "snapshot held, no floors": (True, False)}
"""Whether a snapshot is held, and whether there are floors."""


def run(server: PostgresServer, jobs: int = 200_000, part: int = 20_000, batch: int = 500) -> dict[str, list[float]]:
    with database(server) as one, database(server) as two, database(server) as three:
        figures = asyncio.run(measure(dict(zip(VARIANTS, (one, two, three), strict=True)), jobs, part, batch))
    head = [
        "jobs/s from job",
        *(f"{start // 1000}k" for start in range(0, jobs, part)),
        "last / first",
        "last third / free",
    ]
    last = {name: round(rates[-1] / rates[0], 3) for name, rates in figures.items()}
    beside = {name: round(late(rates, figures["free"]), 3) for name, rates in figures.items()}
    rows = [
        [name, *(f"{rate:,.0f}" for rate in rates), f"{last[name]:.2f}", f"{beside[name]:.2f}"]
        for name, rates in figures.items()
    ]
    print_table(f"floors: {jobs:,} jobs, claims of {batch}, then complete", head, rows)
    rounded = {name: [round(rate) for rate in rates] for name, rates in figures.items()}
    ratios = {"last_to_first": last, "last_third_to_free": beside}
    print_json("floors", {"jobs": jobs, "batch": batch, "jobs_per_second": rounded, **ratios})
    return figures


def late(rates: list[float], free: list[float]) -> float:
    """What is left at the end, beside what the same machine did freely at that time: a slow minute hits both."""
    third = max(1, len(rates) // 3)
    return median(rate / beside for rate, beside in zip(rates[-third:], free[-third:], strict=True))


async def measure(databases: dict[str, str], jobs: int, part: int, batch: int) -> dict[str, list[float]]:
    figures: dict[str, list[float]] = {name: [] for name in databases}
    async with AsyncExitStack() as stack:
        drains = {}
        for name, dsn in databases.items():
            held, floors = VARIANTS[name]
            drain = drains[name] = Drain(dsn, batch, floors)
            await drain.open()
            stack.push_async_callback(drain.close)
            await fill(drain.conn, jobs)
            if held:
                holder = await connect(dsn)
                stack.push_async_callback(holder.close)
                await holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
                await holder.execute("SELECT 1 FROM pgqueue.jobs LIMIT 1")
        for start, end in pairwise(range(0, jobs + 1, part)):
            for name, drain in drains.items():
                figures[name].append(await drain.run(end - start))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=200_000)
    parser.add_argument("--batch", type=int, default=500)
    options = parser.parse_args()
    with benchmark_server() as server:
        run(server, options.jobs, options.jobs // 10, options.batch)


if __name__ == "__main__":
    main()
