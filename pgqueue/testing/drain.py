"""Running jobs without a worker: claimed and finished as a worker does, one after the other."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast
from uuid import uuid4

import psycopg

from pgqueue import callers, db, enqueue, finish, promote, workers
from pgqueue.app import BoundJob, JobRef, JobType, PgQueue
from pgqueue.claim import Claimant, Claimed, Lanes, claim_next
from pgqueue.context import Context, Host
from pgqueue.db import Connection
from pgqueue.errors import JobFailed
from pgqueue.finish import Cancelled, Completed, Failed, Snoozed
from pgqueue.sql import SQL

if TYPE_CHECKING:
    from pgqueue.testing.harness import Harness
    from pgqueue.worker.attempt import Attempt
    from pgqueue.worker.executors import Executors

T = TypeVar("T")
C = TypeVar("C")

MOST_THREADS = 1024


async def drain(
    harness: Harness, apps: Sequence[PgQueue], *, advance: bool, raise_errors: bool, limit: int
) -> list[int]:
    """Runs what is due until nothing is. The ids, one for each attempt."""
    handlers: dict[str, tuple[PgQueue, JobType[..., Any]]] = {}
    for app in _mains(apps):
        handlers |= {name: (app, job_type) for name, job_type in app.types.items()}
    who = Claimant(uuid4(), types=list(handlers), threads=MOST_THREADS, largest=MOST_THREADS)
    ran: list[int] = []
    async with await db.connect(harness.dsn, application_name="pgqueue-test") as conn:
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
                        error = await _attempt(conn, job, one.lease_token, *handlers[job.type], harness.dsn)
                        if error is not None and raise_errors:
                            raise error
            elif advance and (wait := await promote.seconds_until_due(conn, promote.DueFloor())) is not None:
                harness.advance(max(wait, 0) + 0.001)
            else:
                return ran


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
    conn: Connection, job: Claimed, token: str, app: PgQueue, handler: JobType[..., Any], dsn: str
) -> BaseException | None:
    """Runs the job and ends it. The error, if the attempt failed."""
    from pgqueue.worker import attempt

    task = asyncio.current_task()
    assert task is not None
    here = Here(conn, dsn)
    executors = cast("Executors", here)
    outcome = await attempt.run(job, token, job.thread_demand, handler, app.middlewares, executors, {}, task)
    if isinstance(outcome, Completed):
        await finish.complete(conn, [outcome])
    elif isinstance(outcome, Failed):
        await finish.fail(conn, [outcome])
        return here.error or JobFailed(job.id, outcome.reason, f"{outcome.error_type}: {outcome.error}")
    elif isinstance(outcome, Cancelled):
        await finish.cancel(conn, [outcome])
    elif isinstance(outcome, Snoozed):
        await finish.snooze(conn, [outcome])
    else:
        await finish.release(conn, [outcome])
    return None


class Here:
    """In the place of a worker's executors and host: every handler is called right here, and so are its chunks."""

    def __init__(self, conn: Connection, dsn: str) -> None:
        self.host: Host = self
        self.conn = conn
        self.dsn = dsn
        self.error: BaseException | None = None

    def call(
        self, handler: JobType[..., Any], attempt: Attempt, arguments: dict[str, Any]
    ) -> Callable[[], Awaitable[Any]]:
        context = (attempt.ctx,) if handler.takes_context else ()

        async def call() -> Any:
            try:
                result = handler.fn(*context, **arguments)
                return await result if handler.executor == "async" else result
            except BaseException as error:
                self.error = error
                raise

        return call

    def report_progress(self, ctx: Context, progress: dict[str, Any]) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            parameters = {"id": ctx.id, "lease_token": ctx.lease_token, "progress": json.dumps(progress)}
            conn.execute(SQL.progress, parameters)

    async def enqueue(self, ctx: Context, job: BoundJob[T]) -> JobRef[T]:
        return job.ref(await enqueue.add_job(self.conn, job.new_job))

    def enqueue_sync(self, ctx: Context, job: BoundJob[T]) -> JobRef[T]:
        with psycopg.connect(self.dsn) as conn:
            return job.ref(callers.add_job_sync(conn, job.new_job))

    async def map_chunks(
        self, ctx: Context, fn: Callable[[Sequence[C]], T], items: Sequence[C], executor: str
    ) -> list[T]:
        return self.map_chunks_sync(ctx, fn, items, executor)

    def map_chunks_sync(
        self, ctx: Context, fn: Callable[[Sequence[C]], T], items: Sequence[C], executor: str
    ) -> list[T]:
        count = max(1, min(ctx.threads, len(items)))
        return [fn(items[i * len(items) // count : (i + 1) * len(items) // count]) for i in range(count)]
