"""One attempt of one job: decode, run the handler, and say what became of it."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psycopg

from pgqueue.app import JobType, Middleware
from pgqueue.claim import Claimed
from pgqueue.context import Context
from pgqueue.db import is_overtaken
from pgqueue.errors import DatabaseUnavailable, LeaseLost
from pgqueue.failpoints import failpoint
from pgqueue.finish import Cancelled, Completed, Failed, Snoozed, Written
from pgqueue.idempotency import Effect
from pgqueue.job import Lease
from pgqueue.outcome import (
    BadResult,
    InDoubt,
    JobAbandoned,
    JobCancelled,
    JobTimeout,
    NoConnection,
    Retry,
    Snooze,
    Undecodable,
    clean,
    failure,
    said,
)
from pgqueue.worker.children import ChildDied

if TYPE_CHECKING:
    from pgqueue.worker.executors import Executors
    from pgqueue.worker.finisher import Outcome

logger = logging.getLogger("pgqueue.worker")

Stop = JobCancelled | JobAbandoned

SERIALIZATION_RETRIES = 3
NO_CONNECTION_PAUSE = 2.0


class Attempt:
    """A job that runs now. `stop` makes its handler end: at once if it is async, at its next ctx.check() if it is in a
    thread, and by force, after a moment of grace, if it is in a process."""

    __slots__ = ("_stopped", "ctx", "cut_off", "interrupted", "job", "on_stop", "returned", "task")

    def __init__(self, job: Claimed, ctx: Context, task: asyncio.Task[Any]) -> None:
        self.job = job
        self.ctx = ctx
        self.task = task
        self.on_stop: Callable[[Stop], None] | None = None
        """How a thread or a process is told; None: the handler is a coroutine, and its task is cancelled."""
        self._stopped = False
        self.cut_off = False
        """Its task was cancelled: whatever it raises now, it may have been in the middle of its effect."""
        self.interrupted = False
        """It blocked the event loop, and the watchdog raised something in it: neither is that its own word."""
        self.returned = False
        """Noted of at_most_once handlers: what fails after that says nothing of the effect."""

    def stop(self, why: Stop) -> None:
        if self._stopped:
            return
        self._stopped = True
        self.ctx._stop = why
        if self.on_stop is not None:
            self.on_stop(why)
        else:
            self.cut_off = True
            self.task.cancel()

    def take_back(self) -> None:
        """The cancellation was meant for the handler, not for the task that runs one job after the other."""
        if self.cut_off:
            self.cut_off = False
            self.task.uncancel()


async def run(
    job: Claimed,
    lease_token: str,
    threads: int,
    handler: JobType[..., Any],
    middlewares: Sequence[Middleware],
    executors: Executors,
    running: dict[int, Attempt],
    task: asyncio.Task[Any],
) -> tuple[Outcome, Effect | None]:
    """Runs the handler and turns what comes of it into an outcome. Raises only if the worker itself is cancelled."""
    started = time.monotonic()
    failpoint("attempt.before")
    try:
        payload, arguments = handler.decode(job.payload)
        effect = handler.effect(job.id, arguments) if handler.has_effect else None
    except Undecodable as error:
        return failed(job, lease_token, threads, started, error, handler.retry), None
    ctx = Context(
        executors.host,
        id=job.id,
        type=job.type,
        queue=job.queue,
        attempt=job.attempt + 1,
        max_attempts=job.max_attempts,
        timeout=job.timeout if job.timeout is not None else handler.timeout,
        # The id alone may be another job's: of another database, or of before a failover that lost some commits.
        idempotency_key=job.idempotency_key or f"pgqueue:{job.id}:{job.created:.6f}",
        lease_token=lease_token,
        payload=payload,
        threads=threads,
        started=started,
    )
    if effect is not None:
        ctx._effect = effect
        if handler.once_per:
            # Whoever takes a key from one of these jobs must know the others by it, too.
            ctx.idempotency_key = effect.key
        try:
            outcome = await executors.once.begin(job, lease_token, threads, effect)
        except asyncio.CancelledError:
            if executors.ending:
                raise
            await forget_cancellation(task)  # by something that an earlier job left behind
            outcome = Lease(job.id, lease_token)
        if outcome is not None:
            # Given back, because the answer was lost: should the effect have been begun, it did not happen.
            return outcome, effect if type(outcome) is Lease else None
    attempt = running[job.id] = Attempt(job, ctx, task)
    try:
        return await outcome_of(handler, middlewares, executors, attempt, arguments), ctx._effect
    finally:
        attempt.take_back()
        # After a lost lease this worker may have claimed the same job again.
        if running.get(job.id) is attempt:
            del running[job.id]
        if task.cancelling() and not executors.ending:
            await forget_cancellation(task)


async def forget_cancellation(task: asyncio.Task[Any]) -> None:
    """The handler, or something that it used, cancelled the task that runs one job after the other."""
    while task.cancelling():
        task.uncancel()
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(0)  # one that has not been raised yet


async def outcome_of(
    handler: JobType[..., Any],
    middlewares: Sequence[Middleware],
    executors: Executors,
    attempt: Attempt,
    arguments: dict[str, Any],
) -> Outcome:
    job, ctx = attempt.job, attempt.ctx
    try:
        result = await call_handler(handler, middlewares, executors, attempt, arguments)
        failpoint("handler.after")
        if ctx._written:
            return written(ctx)
        if isinstance(result, Snooze):
            return Snoozed(ctx.id, ctx.lease_token, result.seconds())
        text = handler.encode_result(result)
        return Completed(ctx.id, ctx.lease_token, ctx.started, time.monotonic(), ctx.threads, text)
    except asyncio.CancelledError as error:
        attempt.take_back()
        if executors.ending and attempt.task.cancelling():
            raise
        if ctx._stop is not None:
            return stopped(job, ctx, ctx._stop, handler, unsure=handler.at_most_once)
        if ctx._written:
            return written(ctx)
        # Nobody cancelled it: it waited for something of its own that was.
        doubt = InDoubt("it was cancelled from inside; nobody knows whether it had its effect")
        told = doubt if handler.at_most_once else error
        return failed(job, ctx.lease_token, ctx.threads, ctx.started, told, handler.retry)
    except (JobCancelled, JobAbandoned) as why:
        # Raised by ctx.check(), it is the handler's word that nothing has happened yet. Any other is somebody else's.
        unsure = handler.at_most_once and (why is not ctx._stop or attempt.interrupted)
        return stopped(job, ctx, why, handler, unsure=unsure)
    except LeaseLost:
        return written(ctx) if ctx._written else Lease(ctx.id, ctx.lease_token)
    except BaseException as error:  # a handler that calls sys.exit() fails; it does not take the worker along
        if ctx._written:
            text = f"job {ctx.id} {ctx.type} was completed by its transaction; its handler failed after that"
            logger.warning(text, exc_info=error)
            return written(ctx)
        broken_off = attempt.cut_off or attempt.interrupted
        if handler.at_most_once and (broken_off or attempt.returned or is_no_word(error)):
            error = InDoubt(f"{said(error)}; nobody knows whether it had its effect")
        if isinstance(error, NoConnection):
            logger.warning(f"put off job {ctx.id} {ctx.type}: {error}")
            return Snoozed(ctx.id, ctx.lease_token, NO_CONNECTION_PAUSE * random.uniform(0.5, 1.0))
        if isinstance(ctx._stop, JobCancelled) and not isinstance(error, InDoubt):
            return cancelled(ctx, f"{type(error).__name__}: {said(error)}")
        return failed(job, ctx.lease_token, ctx.threads, ctx.started, error, handler.retry)


def is_no_word(error: BaseException) -> bool:
    """Whether it may have come from outside the handler, at any moment: it says nothing about what was done before.
    So may the database's: those of our own COMMIT, or of a step that could not be kept, look like the handler's."""
    return isinstance(error, psycopg.Error | DatabaseUnavailable | JobTimeout | ChildDied | BadResult | NoConnection)


async def call_handler(
    handler: JobType[..., Any],
    middlewares: Sequence[Middleware],
    executors: Executors,
    attempt: Attempt,
    arguments: dict[str, Any],
) -> Any:
    """Runs it within its timeout, and again at once when PostgreSQL could not serialize its transaction."""
    call = executors.call(handler, attempt, arguments)
    if handler.at_most_once:
        call = noted(attempt, call)
    for middleware in reversed(middlewares):
        call = wrapped(middleware, attempt.ctx, call)
    for retries in range(SERIALIZATION_RETRIES + 1):
        try:
            if attempt.ctx.timeout is None or handler.executor != "async":
                return await call()
            try:
                async with asyncio.timeout(attempt.ctx.timeout) as limit:
                    return await call()
            except Exception as error:
                # A library may turn the cancellation into an error of its own, which then is not the handler's word.
                if limit.expired() and (handler.at_most_once or isinstance(error, TimeoutError)):
                    raise JobTimeout(f"the attempt ran over its timeout of {attempt.ctx.timeout:g} s") from None
                raise
        except psycopg.Error as error:
            lasting = retries == SERIALIZATION_RETRIES or not is_overtaken(error)
            if lasting or attempt.ctx._written or handler.at_most_once:
                raise
            await asyncio.sleep(random.uniform(0, 0.02 * 2**retries))
    raise AssertionError("unreachable")


def written(ctx: Context) -> Written:
    return Written(ctx.id, ctx.lease_token, "transaction")


def wrapped(
    middleware: Middleware,
    ctx: Context,
    call: Callable[[], Awaitable[Any]],
) -> Callable[[], Awaitable[Any]]:
    return lambda: middleware(ctx, call)


def noted(attempt: Attempt, call: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[Any]]:
    async def called() -> Any:
        # Until it says otherwise itself: a middleware that does not wait for it fails while it is at its effect.
        attempt.returned = True
        try:
            result = await call()
        except asyncio.CancelledError:
            raise
        except BaseException:
            attempt.returned = False
            raise
        attempt.returned = not isinstance(result, Snooze)
        return result

    return called


def stopped(job: Claimed, ctx: Context, why: BaseException, handler: JobType[..., Any], *, unsure: bool) -> Outcome:
    if ctx._written:
        return written(ctx)
    if unsure:
        error = InDoubt(f"{said(why)} while it ran; nobody knows whether it had its effect")
        return failed(job, ctx.lease_token, ctx.threads, ctx.started, error, handler.retry)
    if isinstance(why, JobCancelled):
        return cancelled(ctx, str(why))
    return Lease(ctx.id, ctx.lease_token)


def cancelled(ctx: Context, error: str) -> Cancelled:
    return Cancelled(ctx.id, ctx.lease_token, ctx.started, time.monotonic(), ctx.threads, clean(error, 1000) or None)


def failed(job: Claimed, lease_token: str, threads: int, started: float, error: BaseException, retry: Retry) -> Failed:
    try:
        what = failure(error, retry, job.attempt + 1)
    except BaseException as worse:  # an error, or a rule for retries, of the handler's own making
        text = f"{type(error).__name__}, which cannot be told: {said(worse)}"
        what = failure(RuntimeError(text), Retry(), job.attempt + 1)
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
