"""What database tests share: a worker in miniature, and shortcuts that read like the story they tell."""

import time
from typing import Any
from uuid import uuid4

from pgqueue import claim, finish, workers
from pgqueue.claim import Claimant, Claimed, Lanes
from pgqueue.db import Connection
from pgqueue.enqueue import add_jobs
from pgqueue.job import NewJob


class MiniWorker:
    """Registered, and claims like a real one; what it does with the jobs is up to the test."""

    def __init__(self, conn: Connection, **what: Any) -> None:
        self.conn = conn
        self.who = Claimant(uuid4(), **{"threads": 8} | what)
        self.lanes = Lanes()
        self.tokens: dict[int, str] = {}

    async def register(self, lease_timeout: float = 30, listening: bool = False) -> "MiniWorker":
        self.worker = workers.Worker(
            id=self.who.worker_id,
            name=f"mini-{self.who.worker_id.hex[:4]}",
            host="test",
            pid=1,
            version="0",
            queues=self.who.queues,
            types=self.who.types,
            threads=self.who.threads,
            listening=listening,
            lease_timeout=lease_timeout,
        )
        await workers.register(self.conn, self.worker)
        return self

    async def claim(self, limit: int = 100) -> list[Claimed]:
        jobs = []
        # On a machine that is slow today a sweep is not cheap, and the next one would have to wait.
        self.lanes.next_sweep = 0.0
        for one in await claim.claim_next(self.conn, self.who, self.lanes, limit):
            for job in one.jobs:
                if not job.parked:
                    self.tokens[job.id] = one.lease_token
                    jobs.append(job)
        return jobs

    async def complete(self, jobs: list[Claimed], result: str | None = None) -> set[int]:
        now = time.monotonic()
        return await finish.complete(
            self.conn, [finish.Completed(job.id, self.tokens[job.id], now, now, 1, result) for job in jobs]
        )

    async def fail(self, jobs: list[Claimed], delay: float | None = 0.0, **what: str) -> dict[int, finish.Fate]:
        now = time.monotonic()
        error = {"reason": "error", "error_type": "ValueError", "error": "no"} | what
        return await finish.fail(
            self.conn, [finish.Failed(job.id, self.tokens[job.id], now, now, 1, delay, **error) for job in jobs]
        )


async def add(conn: Connection, *jobs: NewJob) -> list[int]:
    return [added.id for added in await add_jobs(conn, jobs)]


async def statuses(conn: Connection) -> dict[str, int]:
    cursor = await conn.execute("SELECT status::text, count(*) FROM pgqueue.jobs GROUP BY 1")
    return dict(await cursor.fetchall())


async def value(conn: Connection, query: str, *parameters: Any) -> Any:
    row = await (await conn.execute(query, parameters)).fetchone()
    return row[0] if row else None
