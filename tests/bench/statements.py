"""How fast are the bare statements? Draining with one connection and with two, and the ways to enqueue.

With one connection claims and completions take turns; with two the next claim runs while the last one is completed, as
in a worker. One Python process asks; PostgreSQL syncs completions and enqueues to the disk.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from statistics import median
from typing import Any

from pgqueue import claim, finish
from pgqueue.db import Connection, connect
from pgqueue.embedded import PostgresServer
from pgqueue.enqueue import add_job, add_jobs
from pgqueue.job import NewJob
from tests.bench.common import (
    Drain,
    alternate,
    benchmark_server,
    completed,
    database,
    fill,
    print_json,
    print_table,
    spread,
)

BATCHES = (100, 200, 500, 1000)
JOB = NewJob(type="noop", payload='{"n": 1}')


async def in_turn(dsn: str, batch: int, jobs: int) -> float:
    drain = Drain(dsn, batch)
    await drain.open()
    try:
        return await drain.run(jobs)
    finally:
        await drain.close()


async def overlapped(dsn: str, batch: int, jobs: int) -> float:
    drain = Drain(dsn, batch)
    await drain.open()
    finisher = await connect(dsn)
    claims: asyncio.Queue[claim.Claim] = asyncio.Queue(maxsize=1)

    async def take() -> None:
        for _ in range(jobs // batch):
            await claims.put(await drain.claim())

    async def end() -> None:
        done = 0
        while done < jobs:
            taken = await claims.get()
            ended = await finish.complete(finisher, completed(taken))
            if len(ended) != batch:
                raise RuntimeError(f"{len(ended)} of {batch} jobs were completed")
            done += len(ended)

    try:
        started = time.perf_counter()
        await asyncio.gather(take(), end())
        return jobs / (time.perf_counter() - started)
    finally:
        await finisher.close()
        await drain.close()


async def bulk(conn: Connection, jobs: int) -> None:
    for _ in range(jobs // 1000):
        await add_jobs(conn, [JOB] * 1000)


async def copy(conn: Connection, jobs: int) -> None:
    async with conn.cursor() as cursor, cursor.copy("COPY pgqueue.jobs (type, payload) FROM STDIN") as rows:
        for _ in range(jobs):
            await rows.write_row((JOB.type, JOB.payload))


async def single(conn: Connection, jobs: int) -> None:
    for _ in range(jobs):
        await add_job(conn, JOB)


def run(server: PostgresServer, jobs: int = 40_000, singles: int = 1_000, rounds: int = 3) -> dict[str, list[float]]:
    with database(server) as dsn:
        drains = {
            f"{how.__name__.replace('_', ' ')}, claims of {batch}": draining(dsn, how, batch, jobs)
            for how in (in_turn, overlapped)
            for batch in BATCHES
            if batch <= jobs
        }
        enqueues = {
            "add_jobs, 1000 at a time": enqueuing(dsn, bulk, jobs),
            "COPY": enqueuing(dsn, copy, jobs),
            "add_job, one at a time": enqueuing(dsn, single, singles),
        }
        figures = alternate(rounds, drains | enqueues)
    rows = [[name, spread(rates)] for name, rates in figures.items()]
    print_table(f"statements: {jobs:,} no-op jobs, {rounds} rounds", ["", "jobs/s"], rows)
    medians = {name: round(median(rates)) for name, rates in figures.items()}
    print_json("statements", {"jobs": jobs, "rounds": rounds, "jobs_per_second": medians})
    return figures


def draining(dsn: str, how: Callable[[str, int, int], Awaitable[float]], batch: int, jobs: int) -> Callable[[], float]:
    async def measure() -> float:
        await prepare(dsn, jobs)
        return await how(dsn, batch, jobs)

    return lambda: asyncio.run(measure())


def enqueuing(dsn: str, how: Callable[[Connection, int], Coroutine[Any, Any, None]], jobs: int) -> Callable[[], float]:
    async def measure() -> float:
        await prepare(dsn, 0)
        conn = await connect(dsn)
        try:
            started = time.perf_counter()
            await how(conn, jobs)
            return jobs / (time.perf_counter() - started)
        finally:
            await conn.close()

    return lambda: asyncio.run(measure())


async def prepare(dsn: str, jobs: int) -> None:
    conn = await connect(dsn)
    try:
        await conn.execute("TRUNCATE pgqueue.jobs")
        await fill(conn, jobs)
    finally:
        await conn.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=40_000)
    parser.add_argument("--singles", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with benchmark_server() as server:
        run(server, options.jobs, options.singles, options.rounds)


if __name__ == "__main__":
    main()
