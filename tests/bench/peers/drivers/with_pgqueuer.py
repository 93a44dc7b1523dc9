"""PgQueuer: over asyncpg or psycopg, whichever BENCH_DRIVER names, its worker run from Python."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from datetime import timedelta
from typing import Any

import driver
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver, AsyncpgPoolDriver, PsycopgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries


async def connected() -> Any:
    if os.environ["BENCH_DRIVER"] == "asyncpg":
        import asyncpg

        return AsyncpgDriver(await asyncpg.connect(dsn=driver.DSN))
    import psycopg

    return PsycopgDriver(await psycopg.AsyncConnection.connect(driver.DSN, autocommit=True))


async def work() -> None:
    pgq = PgQueuer(await connected())

    @pgq.entrypoint("noop")
    async def noop(job: Job) -> None: ...

    @pgq.entrypoint("count")
    async def count(job: Job) -> None:
        driver.count()

    @pgq.entrypoint("stamp")
    async def stamp(job: Job) -> None:
        driver.stamp(int(job.payload or b"0"))

    @pgq.entrypoint("hold")
    async def hold(job: Job) -> None:
        driver.stamp(int(job.payload or b"0"))
        await asyncio.sleep(driver.HELD)

    await pgq.run(batch_size=int(os.environ["BENCH_BATCH"]), dequeue_timeout=timedelta(seconds=1))


class Producer:
    async def open(self) -> None:
        if os.environ["BENCH_DRIVER"] == "asyncpg":
            import asyncpg

            self.pool = await asyncpg.create_pool(dsn=driver.DSN, min_size=1, max_size=driver.SENDERS)
            self.queries = Queries(AsyncpgPoolDriver(self.pool))
        else:
            self.pool = None
            self.queries = Queries(await connected())

    async def add(self, job: str, number: int) -> None:
        await self.queries.enqueue(job, str(number).encode())

    async def add_many(self, job: str, jobs: int) -> None:
        for size in driver.chunks(jobs, 1000):
            await self.queries.enqueue([job] * size, [None] * size, [0] * size)

    async def add_at(self, job: str, number: int, at: float) -> None:
        await self.queries.enqueue(job, str(number).encode(), execute_after=timedelta(seconds=at - time.time()))

    async def close(self) -> None:
        if self.pool is not None:
            await self.pool.close()
        else:
            await self.queries.driver._connection.close()


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        uvloop.run(work())
    else:
        driver.main(Producer())
