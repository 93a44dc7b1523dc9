"""arq: its worker as its command line starts it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import driver
from arq import create_pool
from arq.connections import RedisSettings


async def noop(ctx: Any) -> None: ...


async def stamp(ctx: Any, number: int) -> None:
    driver.stamp(number)


async def hold(ctx: Any, number: int) -> None:
    driver.stamp(number)
    await asyncio.sleep(driver.HELD)


class WorkerSettings:
    functions = (noop, stamp, hold)
    redis_settings = RedisSettings.from_dsn(driver.REDIS or "redis://")
    max_jobs = 200
    poll_delay = 0.01
    keep_result = 0
    job_timeout = int(driver.LEASE) - 10 if driver.LEASE else 300
    """A job whose worker died is taken again ten seconds after this."""


class Producer:
    async def open(self) -> None:
        self.pool = await create_pool(WorkerSettings.redis_settings)

    async def add(self, job: str, number: int) -> None:
        await self.pool.enqueue_job(job, *(() if job == "noop" else (number,)))

    async def add_many(self, job: str, jobs: int) -> None:
        raise driver.NoSuchCall

    async def add_at(self, job: str, number: int, at: float) -> None:
        await self.pool.enqueue_job(job, number, _defer_until=datetime.fromtimestamp(at, UTC))

    async def add_hidden(self, jobs: int) -> None:
        for size in driver.chunks(jobs, 100):
            await asyncio.gather(*(self.pool.enqueue_job("noop", _queue_name="hidden") for _ in range(size)))

    async def close(self) -> None:
        await self.pool.aclose()


if __name__ == "__main__":
    driver.main(Producer())
