"""Chancy: the async executor, its worker run from Python as its documentation does."""

from __future__ import annotations

import asyncio
import logging
import sys
from datetime import UTC, datetime
from typing import Any

import driver
import uvloop
from chancy import Chancy, Queue, Worker, job
from chancy.plugins.recovery import Recovery

CONCURRENCY = 500


@job(queue="default")
async def noop() -> None: ...


@job(queue="default")
async def count() -> None:
    driver.count()


@job(queue="default")
async def stamp(*, number: int) -> None:
    driver.stamp(number)


@job(queue="default")
async def hold(*, number: int) -> None:
    driver.stamp(number)
    await asyncio.sleep(driver.HELD)


TYPES: dict[str, Any] = {"noop": noop, "stamp": stamp, "hold": hold}


def chancy() -> Chancy:
    log = logging.getLogger("chancy")
    log.setLevel(logging.ERROR)
    plugins = [Recovery(poll_interval=5)] if driver.LEASE else []
    return Chancy(driver.DSN, plugins=plugins, log=log, max_connection_pool_size=driver.SENDERS)


async def work() -> None:
    lease = int(driver.LEASE) if driver.LEASE else None
    options = {"heartbeat_timeout": lease, "heartbeat_poll_interval": lease // 3} if lease else {}
    async with chancy() as app, Worker(app, **options) as worker:
        await worker.wait_for_shutdown()


class Producer:
    async def open(self) -> None:
        self.app = chancy()
        await self.app.__aenter__()
        if sys.argv[1] == "setup":
            await self.app.migrate()
            queue = Queue(
                "default",
                concurrency=CONCURRENCY,
                executor="chancy.executors.asyncex.AsyncExecutor",
                polling_interval=1,
                eager_polling=True,
            )
            await self.app.declare(queue, upsert=True)

    async def add(self, job: str, number: int) -> None:
        await self.app.push(self._job(job, number))

    async def add_many(self, job: str, jobs: int) -> None:
        async for _ in self.app.push_many([TYPES[job].job] * jobs):
            pass

    async def add_at(self, job: str, number: int, at: float) -> None:
        await self.app.push(self._job(job, number).with_scheduled_at(datetime.fromtimestamp(at, UTC)))

    def _job(self, job: str, number: int) -> Any:
        return TYPES[job].job.with_kwargs(**({} if job == "noop" else {"number": number}))

    async def close(self) -> None:
        await self.app.__aexit__(None, None, None)


if __name__ == "__main__":
    # Jobs name their function by its module: the same for the producer and the worker.
    import with_chancy

    if sys.argv[1] == "worker":
        uvloop.run(with_chancy.work())
    else:
        driver.main(with_chancy.Producer())
