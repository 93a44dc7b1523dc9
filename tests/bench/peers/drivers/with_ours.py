"""pgqueue: its Python API, its worker as its command line starts it."""

from __future__ import annotations

import asyncio
import os
from datetime import UTC, datetime

from pgqueue import Context, PgQueue
from tests.bench.peers.drivers import driver

app = PgQueue(os.environ.get("DATABASE_URL"))


@app.job
async def noop() -> None: ...


@app.job
async def count() -> None:
    driver.count()


@app.job
async def stamp(number: int) -> None:
    driver.stamp(number)


@app.job
async def hold(number: int) -> None:
    driver.stamp(number)
    await asyncio.sleep(driver.HELD)


@app.job
async def result() -> dict[str, int]:
    return {"answer": 42}


@app.job
async def step(ctx: Context) -> None:
    await ctx.step("first", lambda: 42)


@app.job
async def transaction(ctx: Context) -> None:
    async with ctx.transaction() as conn:
        await conn.execute("SELECT 1")


@app.job(at_most_once=True)
async def at_most_once() -> None: ...


TYPES = {"noop": noop, "stamp": stamp, "hold": hold}


class Producer:
    async def open(self) -> None: ...

    async def add(self, job: str, number: int) -> None:
        await TYPES[job].enqueue(**({} if job == "noop" else {"number": number}))

    async def add_many(self, job: str, jobs: int) -> None:
        await TYPES[job].enqueue_many({} for _ in range(jobs))

    async def add_at(self, job: str, number: int, at: float) -> None:
        await TYPES[job].using(run_at=datetime.fromtimestamp(at, UTC)).enqueue(number=number)

    async def close(self) -> None:
        await app.close()


if __name__ == "__main__":
    driver.main(Producer())
