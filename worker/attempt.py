"""One attempt of one job: decode, run the handler, and say what became of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from pgqueue.app import JobType, Middleware
from pgqueue.claim import Claimed
from pgqueue.context import Context
from pgqueue.finish import Cancelled, Completed, Failed, Snoozed
from pgqueue.job import Lease
from pgqueue.outcome import (
    JobAbandoned,
    JobCancelled,
    JobTimeout,
    Retry,
    Snooze,
    Undecodable,
    clean,
    failure,
)

if TYPE_CHECKING:
    from pgqueue.worker.executors import Executors
    from pgqueue.worker.finisher import Outcome

logger = logging.getLogger("pgqueue.worker")

Stop = JobCancelled | JobAbandoned


class Attempt:
    """A job that runs now. `stop` makes its handler end: at once if it is async, at its next ctx.check() if it is in a
    thread, and by force, after a moment of grace, if it is in a process."""

    __slots__ = ("_stopped", "ctx", "job", "on_stop", "task")

    def __init__(self, job: Claimed, ctx: Context, task: asyncio.Task[Any]) -> None:
        self.job = job
        self.ctx = ctx
        self.task = task
        self.on_stop: Callable[[Stop], None] | None = None
        """How a thread or a process is told; None: the handler is a coroutine, and its task is cancelled."""
        self._stopped = False

    def stop(self, why: Stop) -> None:
        if self._stopped:
            return
        self._stopped = True
        self.ctx._stop = why
        if self.on_stop is not None:
            self.on_stop(why)
        else:
            self.task.cancel()


async def run(
    job: Claimed,
    lease_token: str,
    threads: int,
    handler: JobType[..., Any],
    middlewares: Sequence[Middleware],
    executors: Executors,
    running: dict[int, Attempt],
    task: asyncio.Task[Any],
) -> Outcome:
    """Runs the handler and turns what comes of it into an outcome. Raises only if the worker itself is cancelled."""
    started = time.monotonic()
    try:
        payload, arguments = handler.decode(job.payload)
    except Undecodable as error:
        return failed(job, lease_token, threads, started, error, handler.retry)
    timeout = job.timeout if job.timeout is not None else handler.timeout
    ctx = Context(
        executors.host,
        id=job.id,
        type=job.type,
        queue=job.queue,
        attempt=job.attempt + 1,
        max_attempts=job.max_attempts,
        timeout=timeout,
        idempotency_key=job.idempotency_key,
        lease_token=lease_token,
        payload=payload,
        threads=threads,
        started=started,
    )
    attempt = running[job.id] = Attempt(job, ctx, task)
    try:
        call = executors.call(handler, attempt, arguments)
        for middleware in reversed(middlewares):
            call = wrapped(middleware, ctx, call)
        if timeout is not None and handler.executor == "async":
            try:
                async with asyncio.timeout(timeout) as limit:
                    result = await call()
            except TimeoutError:
                if limit.expired():
                    raise JobTimeout(f"the attempt ran over its timeout of {timeout:g} s") from None
                raise
        else:
            result = await call()
        if isinstance(result, Snooze):
            return Snoozed(job.id, lease_token, result.seconds())
        return Completed(job.id, lease_token, started, time.monotonic(), threads, handler.encode_result(result))
    except asyncio.CancelledError:
        why = ctx._stop
        if why is None:
            raise
        # The cancellation was meant for the handler, not for the task that runs one job after the other.
        task.uncancel()
        return stopped(job, lease_token, threads, started, why)
    except (JobCancelled, JobAbandoned) as why:
        return stopped(job, lease_token, threads, started, why)
    except (SystemExit, KeyboardInterrupt) as error:
        # A handler that calls sys.exit() fails; it does not take the worker along.
        return failed(job, lease_token, threads, started, error, handler.retry)
    except BaseException as error:
        return failed(job, lease_token, threads, started, error, handler.retry)
    finally:
        # After a lost lease this worker may have claimed the same job again.
        if running.get(job.id) is attempt:
            del running[job.id]


def wrapped(
    middleware: Middleware,
    ctx: Context,
    call: Callable[[], Awaitable[Any]],
) -> Callable[[], Awaitable[Any]]:
    return lambda: middleware(ctx, call)


def stopped(
    job: Claimed, lease_token: str, threads: int, started: float, why: BaseException | None
) -> Cancelled | Lease:
    if isinstance(why, JobCancelled):
        return Cancelled(job.id, lease_token, started, time.monotonic(), threads, clean(str(why), 1000) or None)
    return Lease(job.id, lease_token)


def failed(job: Claimed, lease_token: str, threads: int, started: float, error: BaseException, retry: Retry) -> Failed:
    what = failure(error, retry, job.attempt + 1)
    return Failed(
        job.id,
        lease_token,
        started,
        time.monotonic(),
        threads,
        what.delay,
        what.reason,
        what.error_type,
        what.error,
        what.traceback,
    )
