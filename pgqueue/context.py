"""Context: what a handler knows of its job, and how it talks to its worker."""

from __future__ import annotations

import inspect
import json
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pgqueue.outcome import JobAbandoned, JobCancelled, JobTimeout, result_text

if TYPE_CHECKING:
    import psycopg

    from pgqueue.app import BoundJob, JobRef
    from pgqueue.idempotency import Effect

T = TypeVar("T")
C = TypeVar("C")

logger = logging.getLogger("pgqueue.job")


class Host(Protocol):
    """What the worker does for a handler."""

    def report_progress(self, ctx: Context, progress: dict[str, Any]) -> None: ...
    async def enqueue(self, ctx: Context, job: BoundJob[Any]) -> JobRef[Any]: ...
    def enqueue_sync(self, ctx: Context, job: BoundJob[Any]) -> JobRef[Any]: ...
    async def map_chunks(
        self, ctx: Context, fn: Callable[[Sequence[C]], T], items: Sequence[C], executor: str
    ) -> list[T]: ...
    def map_chunks_sync(
        self, ctx: Context, fn: Callable[[Sequence[C]], T], items: Sequence[C], executor: str
    ) -> list[T]: ...
    def transaction(self, ctx: Context, isolation: str | None) -> AbstractAsyncContextManager[Any]: ...
    def transaction_sync(self, ctx: Context, isolation: str | None) -> AbstractContextManager[Any]: ...
    async def load_step(self, ctx: Context, name: str) -> tuple[bool, str | None]: ...
    def load_step_sync(self, ctx: Context, name: str) -> tuple[bool, str | None]: ...
    async def save_step(self, ctx: Context, name: str, result: str | None) -> None: ...
    def save_step_sync(self, ctx: Context, name: str, result: str | None) -> None: ...


class Context:
    """One attempt of one job, seen by its handler. `async def` handlers await enqueue and map_chunks; `def` handlers,
    which run in a thread or process of their own, call the same with _sync."""

    __slots__ = (
        "_chunked",
        "_effect",
        "_host",
        "_in_transaction",
        "_result",
        "_stop",
        "_written",
        "attempt",
        "id",
        "idempotency_key",
        "lease_token",
        "max_attempts",
        "payload",
        "queue",
        "started",
        "threads",
        "timeout",
        "type",
    )

    def __init__(
        self,
        host: Host,
        *,
        id: int,
        type: str,
        queue: str,
        attempt: int,
        max_attempts: int,
        timeout: float | None,
        idempotency_key: str,
        lease_token: str,
        payload: Any,
        threads: int,
        started: float,
    ) -> None:
        self._host = host
        self._stop: type_of_stop = None
        self._effect: Effect | None = None
        self._result: Any = None
        self._written = False
        self._in_transaction = False
        self._chunked: dict[tuple[str, str], int] = {}
        """How often map_chunks was called with a function of this name."""
        self.id = id
        self.type = type
        self.queue = queue
        self.attempt = attempt
        """1 is the first."""
        self.max_attempts = max_attempts
        self.timeout = timeout
        self.idempotency_key = idempotency_key
        """The same for every attempt of this job: hand it to services that take one."""
        self.lease_token = lease_token
        self.payload = payload
        self.threads = threads
        """The slots that this job has; map_chunks spreads over them."""
        self.started = started

    @property
    def deadline(self) -> float | None:
        """When the attempt times out, on the clock of time.monotonic()."""
        return None if self.timeout is None else self.started + self.timeout

    @property
    def is_last_attempt(self) -> bool:
        return self.attempt >= self.max_attempts

    def remaining(self) -> float | None:
        """Seconds until the deadline; None: there is none."""
        return None if self.deadline is None else self.deadline - time.monotonic()

    def check(self) -> None:
        """Raises if the job should stop: it was cancelled, its time is over, or the worker stops or lost the lease.
        A handler in a thread cannot be stopped in any other way, so call it in every loop. In one that is at_most_once,
        call it before the effect: stopping here says that nothing has happened yet."""
        if self._stop is not None:
            raise self._stop
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise JobTimeout(f"the attempt ran over its timeout of {self.timeout:g} s")

    def _go_on(self) -> None:
        """check() on our own account: what it raises is not the handler's word that nothing has happened yet."""
        try:
            self.check()
        except (JobCancelled, JobAbandoned) as why:
            raise type(why)(str(why)) from None

    def progress(self, done: float, total: float | None = None, message: str | None = None) -> None:
        """Stored in the job's row; written at most once a second, so call it as often as you like."""
        self._host.report_progress(self, {"done": done, "total": total, "message": message})

    def log(self, message: str, **fields: Any) -> None:
        """A line in the worker's log that carries the job's id."""
        logger.info(message, extra={"fields": {"job": self.id, "type": self.type, **fields}})

    async def enqueue(self, job: BoundJob[T]) -> JobRef[T]:
        """Adds a job, unless the lease is lost: `await ctx.enqueue(other.bind(x=1))`."""
        return await self._host.enqueue(self, job)

    def enqueue_sync(self, job: BoundJob[T]) -> JobRef[T]:
        return self._host.enqueue_sync(self, job)

    async def map_chunks(
        self, fn: Callable[[Sequence[C]], T], items: Sequence[C], *, executor: str = "process"
    ) -> list[T]:
        """Runs fn on as many chunks as the job has slots, at the same time, and returns what each returned, in order.
        Finished chunks are kept: a retry does only the rest."""
        return await self._host.map_chunks(self, fn, items, executor)

    def map_chunks_sync(
        self, fn: Callable[[Sequence[C]], T], items: Sequence[C], *, executor: str = "process"
    ) -> list[T]:
        return self._host.map_chunks_sync(self, fn, items, executor)

    def transaction(self, isolation: str | None = None) -> AbstractAsyncContextManager[psycopg.AsyncConnection[Any]]:
        """A transaction in which the handler's writes and the job's completion commit together, or not at all:

            async with ctx.transaction() as tx:
                await tx.execute("UPDATE account …")
                ctx.set_result({"ok": True})

        Jobs that are added with `using(conn=tx)` commit with it, too. `isolation` is "read committed", "repeatable
        read" or "serializable". When the block ends the job is completed: nothing that follows can fail it."""
        return self._host.transaction(self, isolation)

    def transaction_sync(self, isolation: str | None = None) -> AbstractContextManager[psycopg.Connection[Any]]:
        """The same for `def` handlers that run in a thread."""
        return self._host.transaction_sync(self, isolation)

    def set_result(self, result: Any) -> None:
        """The job's result, to be stored by the transaction that completes it."""
        self._result = result

    async def step(self, name: str, fn: Callable[[], Awaitable[T] | T]) -> T:
        """Runs fn once and keeps what it returned, as JSON: a later attempt gets it back without running it."""
        _check_name(name)
        found, text = await self._host.load_step(self, name)
        if not found:
            self._go_on()
            result = fn()
            text = result_text(await result if inspect.isawaitable(result) else result)
            await self._host.save_step(self, name, text)
        kept: T = None if text is None else json.loads(text)  # type: ignore[assignment]
        return kept

    def step_sync(self, name: str, fn: Callable[[], T]) -> T:
        _check_name(name)
        found, text = self._host.load_step_sync(self, name)
        if not found:
            self._go_on()
            text = result_text(fn())
            self._host.save_step_sync(self, name, text)
        kept: T = None if text is None else json.loads(text)  # type: ignore[assignment]
        return kept


type_of_stop = JobCancelled | JobTimeout | JobAbandoned | None


def _check_name(name: str) -> None:
    """Before the step runs: afterwards it would be too late to find out that it cannot be kept."""
    if not isinstance(name, str) or not name or "\0" in name or len(name.encode()) > 1000:
        raise ValueError("ctx.step: a name is a text of 1 to 1000 bytes, without NUL")
