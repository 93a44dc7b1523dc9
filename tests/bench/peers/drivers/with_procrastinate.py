"""Procrastinate: its async connector, its worker as its command line starts it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import driver
import procrastinate

app = procrastinate.App(
    connector=procrastinate.PsycopgConnector(conninfo=driver.DSN, min_size=1, max_size=20),
    worker_defaults={"concurrency": 20},
)


@app.task(name="noop")
async def noop() -> None: ...


@app.task(name="count")
async def count() -> None:
    driver.count()


@app.task(name="stamp")
async def stamp(number: int) -> None:
    driver.stamp(number)


@app.task(name="hold")
async def hold(number: int) -> None:
    driver.stamp(number)
    await asyncio.sleep(driver.HELD)


if driver.LEASE:

    @app.periodic(cron="* * * * * */5")
    @app.task(name="rescue", pass_context=True, queueing_lock="rescue")
    async def rescue(context: procrastinate.JobContext, timestamp: int) -> None:
        """What its documentation recommends: nothing rescues jobs by itself."""
        manager = context.app.job_manager
        for job in await manager.get_stalled_jobs(seconds_since_heartbeat=float(driver.LEASE or 30)):
            await manager.retry_job(job)


TASKS = {"noop": noop, "stamp": stamp, "hold": hold}


class Producer:
    async def open(self) -> None:
        await app.open_async()

    async def add(self, job: str, number: int) -> None:
        await TASKS[job].defer_async(**({} if job == "noop" else {"number": number}))

    async def add_many(self, job: str, jobs: int) -> None:
        for size in driver.chunks(jobs, 1000):
            await TASKS[job].batch_defer_async(*({} for _ in range(size)))

    async def add_at(self, job: str, number: int, at: float) -> None:
        await TASKS[job].configure(schedule_at=datetime.fromtimestamp(at, UTC)).defer_async(number=number)

    async def close(self) -> None:
        await app.close_async()


if __name__ == "__main__":
    driver.main(Producer())
