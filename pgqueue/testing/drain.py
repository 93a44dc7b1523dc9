"""Running jobs without a worker: claimed and finished as a worker does, one after the other."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from pgqueue import db, promote, workers
from pgqueue.app import JobType, PgQueue
from pgqueue.claim import Claimant, Claimed, Lanes, claim_next
from pgqueue.context import Context
from pgqueue.db import Connection
from pgqueue.errors import JobFailed
from pgqueue.finish import Failed

if TYPE_CHECKING:
    from pgqueue.testing.harness import Harness
    from pgqueue.worker.executors import Executors

CHUNKS = 4
"""Threads for handlers and their chunks."""
MOST_THREADS = 1024


async def drain(
    harness: Harness, apps: Sequence[PgQueue], *, advance: bool, raise_errors: bool, limit: int
) -> list[int]:
    """Runs what is due until nothing is. The ids, one for each attempt."""
    handlers: dict[str, tuple[PgQueue, JobType[..., Any]]] = {}
    for app in _mains(apps):
        handlers |= {name: (app, job_type) for name, job_type in app.types.items()}
    who = Claimant(uuid4(), types=list(handlers), threads=MOST_THREADS)
    ran: list[int] = []
    async with await db.connect(harness.dsn, application_name="pgqueue-test") as conn, _executors(harness.dsn) as here:
        await _register(conn, who)
        while True:
            await promote.promote(conn, promote.DueFloor())
            # Lanes of its own each time: a job that was added below a floor must not wait for the next sweep.
            claimed = await claim_next(conn, who, Lanes(), 1)
            if any(not job.parked for one in claimed for job in one.jobs):
                if len(ran) == limit:
                    raise RuntimeError(f"after {limit} attempts there is still a job to run: do jobs add themselves?")
                for one in claimed:
                    for job in one.jobs:
                        ran.append(job.id)
                        error = await _attempt(conn, job, one.lease_token, *handlers[job.type], here)
                        if error is not None and raise_errors:
                            raise error
            elif advance and (wait := await promote.seconds_until_due(conn, promote.DueFloor())) is not None:
                harness.advance(max(wait, 0) + 0.001)
            else:
                return ran


@asynccontextmanager
async def _executors(dsn: str) -> AsyncIterator[Executors]:
    from pgqueue.worker.executors import Executors
    from pgqueue.worker.host import WorkerHost
    from pgqueue.worker.once import Once

    host = WorkerHost(dsn, CHUNKS, "test")
    host.loop = asyncio.get_running_loop()
    executors = Executors(CHUNKS, host, Once(host, None))
    executors.ending = True  # the task is the test's own
    try:
        yield executors
    finally:
        await host.close()
        executors.close()


def _mains(apps: Sequence[PgQueue]) -> list[PgQueue]:
    """Those that no other includes: they have the others' handlers and middlewares, too."""
    included = {id(each) for app in apps for each in app.included}
    return [app for app in apps if id(app) not in included]


async def _register(conn: Connection, who: Claimant) -> None:
    worker = workers.Worker(
        id=who.worker_id,
        name="test",
        host="test",
        pid=os.getpid(),
        version="test",
        queues=who.queues,
        types=who.types,
        threads=who.threads,
        listening=False,
        lease_timeout=3600,
    )
    await workers.register(conn, worker)


async def _attempt(
    conn: Connection, job: Claimed, token: str, app: PgQueue, handler: JobType[..., Any], executors: Executors
) -> BaseException | None:
    """Runs the job and ends it, with the worker's own parts. The error, if the attempt failed."""
    from pgqueue.worker import attempt, finisher

    raised: list[BaseException] = []

    async def catching(ctx: Context, call_next: Callable[[], Awaitable[Any]]) -> Any:
        try:
            return await call_next()
        except BaseException as error:
            raised.append(error)
            raise

    task = asyncio.current_task()
    assert task is not None
    middlewares = [*app.middlewares, catching]
    outcome, effect = await attempt.run(job, token, job.thread_demand, handler, middlewares, executors, {}, task)
    if effect is None:
        await finisher.end(conn, [outcome])
    else:
        await finisher.settle(conn, outcome, effect)
    if isinstance(outcome, Failed):
        return raised[0] if raised else JobFailed(job.id, outcome.reason, f"{outcome.error_type}: {outcome.error}")
    return None
