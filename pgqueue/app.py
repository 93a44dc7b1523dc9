"""PgQueue: the registry of handlers, and the producer's door to the queue."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, overload
from weakref import WeakValueDictionary

from pydantic_core import to_jsonable_python

from pgqueue.context import Context
from pgqueue.errors import InvalidJob
from pgqueue.jobref import JobRef
from pgqueue.jobtype import BoundJob, JobType, Using, UsingOptions, add, add_sync, foreign_job
from pgqueue.outcome import Retry, dumps
from pgqueue.pools import Pools
from pgqueue.settings import Settings

__all__ = ["BoundJob", "JobRef", "JobType", "Middleware", "PgQueue", "Using"]

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

Middleware = Callable[[Context, Callable[[], Awaitable[Any]]], Awaitable[Any]]


alive: WeakValueDictionary[int, PgQueue] = WeakValueDictionary()
"""For tests, which send every one of them to another database; in the order in which they were made."""


class JobOptions(TypedDict, total=False):
    queue: str
    priority: int
    retry: Retry | int
    """How failures are tried again; a number: how often at most."""
    timeout: float | timedelta | None
    thread_demand: int
    executor: Literal["auto", "async", "thread", "process"]
    """auto: an async def on the event loop, a def in a thread."""
    tags: Iterable[str]
    once_per: Iterable[str]
    """Arguments whose values name the effect: jobs with the same values have it once among them."""
    at_most_once: bool
    """An attempt that may or may not have had its effect is not repeated: the job waits, in doubt, for an operator."""
    once_ttl: float | timedelta
    """For how long a done effect is remembered: a day, unless told."""


class _Anything:
    """For type checkers: a first argument that takes this has no type, and may be the Context or not."""


class Decorator(Protocol):
    """What `@app.job(…)` is: takes a handler, and leaves its Context out of the signature of its calls."""

    @overload
    def __call__(self, fn: Callable[Concatenate[_Anything, ...], Coroutine[Any, Any, R]], /) -> JobType[..., R]: ...
    @overload
    def __call__(self, fn: Callable[Concatenate[_Anything, ...], R], /) -> JobType[..., R]: ...
    @overload
    def __call__(self, fn: Callable[Concatenate[Context, P], Coroutine[Any, Any, R]], /) -> JobType[P, R]: ...
    @overload
    def __call__(self, fn: Callable[Concatenate[Context, P], R], /) -> JobType[P, R]: ...
    @overload
    def __call__(self, fn: Callable[P, Coroutine[Any, Any, R]], /) -> JobType[P, R]: ...
    @overload
    def __call__(self, fn: Callable[P, R], /) -> JobType[P, R]: ...


class PgQueue:
    """Handlers by their types, and the way to add jobs. Nothing is opened before it is used.

    Without a URL the database is DATABASE_URL or, without that, the embedded server that `pgqueue up` runs here.
    """

    def __init__(self, database_url: str | None = None, *, settings: Settings | None = None) -> None:
        self.types: dict[str, JobType[..., Any]] = {}
        self.middlewares: list[Middleware] = []
        self.included: list[PgQueue] = []
        self.pools = Pools(database_url, settings)
        alive[id(self)] = self

    # Handlers

    @overload
    def job(self, fn: Callable[Concatenate[_Anything, ...], Coroutine[Any, Any, R]], /) -> JobType[..., R]: ...
    @overload
    def job(self, fn: Callable[Concatenate[_Anything, ...], R], /) -> JobType[..., R]: ...
    @overload
    def job(self, fn: Callable[Concatenate[Context, P], Coroutine[Any, Any, R]], /) -> JobType[P, R]: ...
    @overload
    def job(self, fn: Callable[Concatenate[Context, P], R], /) -> JobType[P, R]: ...
    @overload
    def job(self, fn: Callable[P, Coroutine[Any, Any, R]], /) -> JobType[P, R]: ...
    @overload
    def job(self, fn: Callable[P, R], /) -> JobType[P, R]: ...
    @overload
    def job(self, name: str | None = None, **options: Unpack[JobOptions]) -> Decorator: ...
    def job(self, name: Any = None, **options: Any) -> Any:
        """Makes a function the handler of a job type, which has the function's name unless told."""
        if name is None or isinstance(name, str):
            return partial(self._register, name=name, **options)
        return self._register(name, None, **options)

    def _register(self, fn: Callable[..., Any], name: str | None, **options: Any) -> JobType[..., Any]:
        job_type: JobType[..., Any] = JobType(self, fn, name, **options)
        self._add(job_type)
        return job_type

    def _add(self, job_type: JobType[..., Any]) -> None:
        if self.types.setdefault(job_type.name, job_type) is not job_type:
            raise ValueError(f"{job_type.name} has a handler already: {self.types[job_type.name]!r}")

    def middleware(self, fn: F) -> F:
        """Wraps every handler: `async def mw(ctx, call_next): return await call_next()`. The first one is outermost."""
        if not inspect.iscoroutinefunction(fn):
            raise TypeError(f"{fn!r}: a middleware is an async def (ctx, call_next)")
        self.middlewares.append(fn)
        return fn

    def include(self, other: PgQueue) -> None:
        """Takes over the other's handlers and middlewares. An other that names no database adds its jobs to ours."""
        for job_type in other.types.values():
            self._add(job_type)
        self.included.append(other)
        if other.pools.unnamed:
            other.pools = self.pools
        self.middlewares += [each for each in other.middlewares if each not in self.middlewares]

    # Jobs whose handlers live elsewhere

    async def enqueue(self, type: str, payload: Any = None, **options: Unpack[UsingOptions]) -> JobRef[Any]:
        """Adds a job of any type, as SQL would; its payload is checked when it runs."""
        conn = options.pop("conn", None)
        return JobRef(self, await add(self, foreign_job(type, _text(type, payload), {**options}), conn))

    def enqueue_sync(self, type: str, payload: Any = None, **options: Unpack[UsingOptions]) -> JobRef[Any]:
        conn = options.pop("conn", None)
        return JobRef(self, add_sync(self, foreign_job(type, _text(type, payload), {**options}), conn))

    # The end

    async def close(self) -> None:
        """Closes the connections of this event loop."""
        await self.pools.close()

    def close_sync(self) -> None:
        """Closes the connections of enqueue_sync and its like."""
        self.pools.close_sync()

    async def __aenter__(self) -> PgQueue:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __enter__(self) -> PgQueue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close_sync()


def _text(type: str, payload: Any) -> str:
    try:
        return "{}" if payload is None else dumps(payload, to_jsonable_python)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidJob(f"{type}: the payload cannot be stored as JSON: {error}") from error
