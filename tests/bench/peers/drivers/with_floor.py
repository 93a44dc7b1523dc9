"""The floor: our SQL without our worker. `… with_floor worker` claims and completes until it is stopped."""

from __future__ import annotations

import asyncio
import sys

import psycopg

from pgqueue import claim, finish
from pgqueue.db import connect
from tests.bench.common import Drain, completed
from tests.bench.peers.drivers import driver


async def work() -> None:
    """As in a worker the next claim runs while the last one is completed; with nothing to do it looks every 5 ms."""
    claims: asyncio.Queue[claim.Claim] = asyncio.Queue(maxsize=2)
    drain = Drain(driver.DSN)
    await drain.open()
    finisher = await connect(driver.DSN)

    async def claiming() -> None:
        while True:
            taken = await drain.claim()
            if taken.jobs:
                await claims.put(taken)
            else:
                drain.lanes.floors[drain.lane] = 0
                await asyncio.sleep(0.005)

    async def finishing() -> None:
        while True:
            taken = await claims.get()
            await finish.complete(finisher, completed(taken))

    await asyncio.gather(claiming(), finishing())


class Producer:
    def open(self) -> None:
        self.conn = psycopg.connect(driver.DSN, autocommit=True)

    def add(self, job: str, number: int) -> None:
        self.conn.execute("INSERT INTO pgqueue.jobs (type) VALUES (%s)", [job])

    def add_many(self, job: str, jobs: int) -> None:
        with self.conn.cursor() as cursor, cursor.copy("COPY pgqueue.jobs (type) FROM STDIN") as rows:
            for _ in range(jobs):
                rows.write_row((job,))

    def add_at(self, job: str, number: int, at: float) -> None:
        raise driver.NoSuchCall

    def close(self) -> None:
        self.conn.close()


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        asyncio.run(work())
    else:
        driver.main(Producer())
