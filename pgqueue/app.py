"""PgQueue: the registry of handlers, and the producer's door: enqueue, using, results."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from types import TracebackType
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, overload

from pgqueue import callers, control, enqueue, read
from pgqueue.arguments import Arguments, dumps, loads, result_text
from pgqueue.context import Context
from pgqueue.db import translated
from pgqueue.enqueue import Added
from pgqueue.errors import InvalidJob, JobFailed, JobNotFound, JobWasCancelled
from pgqueue.job import Job, NewJob, Status
from pgqueue.outcome import Retry, seconds
from pgqueue.pools import Pools
from pgqueue.settings import Settings
from pgqueue.sql import SQL

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
F = TypeVar("F", bound=Callable[..., Any])

Executor = Literal["async", "thread", "process"]
Middleware = Callable[[Context, Callable[[], Awaitable[Any]]], Awaitable[Any]]

AT_ONCE = 5_000
"""Jobs in one statement."""
FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0


class Options(TypedDict, total=False):
    """What one job may have otherwise than its type says."""

    queue: str
    priority: int
    delay: float | timedelta
    """From now; seconds."""
    run_at: datetime
    thread_demand: int
    max_attempts: int
    timeout: float | timedelta | None
    idempotency_key: str
    key_ttl: float | timedelta
    """For how long the key is remembered; a day unless told."""
    tags: Iterable[str]
    name: str


class UsingOptions(Options, total=False):
    conn: Any
    """The caller's own connection: the job exists if and when the caller's transaction commits."""


class JobOptions(TypedDict, total=False):
    queue: str
    priority: int
    retry: Retry | int
    timeout: float | timedelta | None
    thread_demand: int
    executor: Literal["auto", "async", "thread", "process"]
    tags: Iterable[str]


class Decorator(Protocol):
    """What `@app.job(…)` is: takes a handler, and leaves its Context out of the call's signature."""

    @overload
    def __call__(self, fn: Callable[Concatenate[Context, P], Coroutine[Any, Any, R]], /) -> JobType[P, R]: ...
    @overload
    def __call__(self, fn: Callable[Concatenate[Context, P], R], /) -> JobType[P, R]: ...
    @overload
    def __call__(self, fn: Callable[P, Coroutine[Any, Any, R]], /) -> JobType[P, R]: ...
    @overload
    def __call__(self, fn: Callable[P, R], /) -> JobType[P, R]: ...


class PgQueue:
    """Handlers by their types, and the way to add jobs. Nothing is opened before it is used."""

    def __init__(self, database_url: str | None = None, *, settings: Settings | None = None) -> None:
        self.types: dict[str, JobType[Any, Any]] = {}
        self.middlewares: list[Middleware] = []
        self.pools = Pools(database_url, settings)

    # Handlers

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
        """Makes a function the handler of a job type, named as the function unless told."""
        if callable(name):
            return self._register(name, None, **options)
        return partial(self._register, name=name, **options)

    def _register(self, fn: Callable[..., Any], name: str | None, **options: Any) -> JobType[..., Any]:
        job_type: JobType[..., Any] = JobType(self, fn, name, **options)
        self._add(job_type)
        return job_type

    def _add(self, job_type: JobType[..., Any]) -> None:
        if self.types.get(job_type.name, job_type) is not job_type:
            raise ValueError(f"there is a handler for {job_type.name} already: {self.types[job_type.name].fn!r}")
        self.types[job_type.name] = job_type

    def middleware(self, fn: F) -> F:
        """Wraps every handler: `async def mw(ctx, call_next): return await call_next()`. The first one is outermost."""
        if not inspect.iscoroutinefunction(fn):
            raise TypeError(f"{fn!r}: a middleware is an async def (ctx, call_next)")
        self.middlewares.append(fn)
        return fn

    def include(self, other: PgQueue) -> None:
        """Takes over the other's handlers and middlewares."""
        for job_type in other.types.values():
            self._add(job_type)
        self.middlewares += [each for each in other.middlewares if each not in self.middlewares]

    # Jobs whose handlers live elsewhere

    async def enqueue(self, type: str, payload: Any = None, **options: Unpack[UsingOptions]) -> JobRef[Any]:
        """Adds a job of any type, as SQL would; nobody checks the payload but its handler."""
        conn, job = _foreign(type, payload, options)
        return JobRef(self, await self._send(job, conn))

    def enqueue_sync(self, type: str, payload: Any = None, **options: Unpack[UsingOptions]) -> JobRef[Any]:
        conn, job = _foreign(type, payload, options)
        return JobRef(self, self._send_sync(job, conn))

    async def _send(self, job: NewJob, conn: Any) -> Added:
        if conn is not None:
            return await callers.add_job(conn, job)
        async with self.pools.connection() as own:
            return await enqueue.add_job(own, job)

    def _send_sync(self, job: NewJob, conn: Any) -> Added:
        if conn is not None:
            return callers.add_job_sync(conn, job)
        with self.pools.connection_sync() as own, translated():
            return callers.add_job_sync(own, job)

    # The end

    async def close(self) -> None:
        """Closes the connections of this event loop."""
        await self.pools.close()

    def close_sync(self) -> None:
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


class JobType(Generic[P, R]):
    """A handler and what its jobs have in common."""

    def __init__(
        self,
        app: PgQueue,
        fn: Callable[..., Any],
        name: str | None,
        *,
        queue: str = "default",
        priority: int = 0,
        retry: Retry | int = Retry(),  # noqa: B008
        timeout: float | timedelta | None = None,
        thread_demand: int = 1,
        executor: Literal["auto", "async", "thread", "process"] = "auto",
        tags: Iterable[str] = (),
    ) -> None:
        self.app = app
        self.fn = fn
        self.name = name or fn.__name__
        self.queue = queue
        self.priority = priority
        self.retry = Retry(max_attempts=retry) if isinstance(retry, int) else retry
        self.timeout = None if timeout is None else seconds(timeout)
        self.thread_demand = thread_demand
        self.executor: Executor = _executor(fn, executor)
        self.tags = list(tags)
        self.arguments = Arguments(fn, self.name)
        self.takes_context = self.arguments.takes_context
        self.decode: Callable[[str], tuple[Any, dict[str, Any]]] = self.arguments.decode
        """From the payload's text to the payload and the handler's keyword arguments; raises Undecodable."""
        self.encode_result: Callable[[Any], str | None] = result_text
        """From what the handler returned to JSON text; raises BadResult."""
        self.__module__, self.__qualname__, self.__doc__ = fn.__module__, fn.__qualname__, fn.__doc__
        self.__name__, self.__wrapped__ = fn.__name__, fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function itself, at once and without a queue."""
        return self.fn(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<job type {self.name}: {self.__module__}.{self.__qualname__}>"

    def __reduce__(self) -> Any:
        return _find, (self.__module__, self.__qualname__, self.name)

    def json_schema(self) -> dict[str, Any]:
        """The JSON Schema of the payload."""
        return self.arguments.json_schema()

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobRef[R]:
        return await self._using({}).enqueue(*args, **kwargs)

    def enqueue_sync(self, *args: P.args, **kwargs: P.kwargs) -> JobRef[R]:
        return self._using({}).enqueue_sync(*args, **kwargs)

    def bind(self, *args: P.args, **kwargs: P.kwargs) -> BoundJob[R]:
        return self._using({}).bind(*args, **kwargs)

    def using(self, **options: Unpack[UsingOptions]) -> Using[P, R]:
        """The same type with other options: `send.using(delay=300).enqueue_sync(to=…)`."""
        return self._using({**options})

    def _using(self, options: dict[str, Any]) -> Using[P, R]:
        return Using(self, options.pop("conn", None), options)

    async def enqueue_many(self, calls: Iterable[Mapping[str, Any]], conn: Any = None) -> list[JobRef[R]]:
        """All of them or none, in this order. Each call is the keyword arguments of one job."""
        batches = self._batches(calls)
        if conn is not None:
            added = [each for batch in batches for each in await callers.add_jobs(conn, batch)]
        else:
            async with self.app.pools.connection() as own, own.transaction():
                added = [each for batch in batches for each in await enqueue.add_jobs(own, batch)]
        return [JobRef(self.app, each, self) for each in added]

    def enqueue_many_sync(self, calls: Iterable[Mapping[str, Any]], conn: Any = None) -> list[JobRef[R]]:
        batches = self._batches(calls)
        if conn is not None:
            added = [each for batch in batches for each in callers.add_jobs_sync(conn, batch)]
        else:
            with self.app.pools.connection_sync() as own, translated(), own.transaction():
                added = [each for batch in batches for each in callers.add_jobs_sync(own, batch)]
        return [JobRef(self.app, each, self) for each in added]

    def _batches(self, calls: Iterable[Mapping[str, Any]]) -> list[list[NewJob]]:
        jobs = []
        for index, call in enumerate(calls):
            try:
                jobs.append(self.new_job((), call, {}))
            except InvalidJob as error:
                raise InvalidJob(f"call {index}: {error}") from error
        return [jobs[start : start + AT_ONCE] for start in range(0, len(jobs), AT_ONCE)]

    def new_job(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: Mapping[str, Any]) -> NewJob:
        values = {
            "queue": self.queue,
            "priority": self.priority,
            "thread_demand": self.thread_demand,
            "max_attempts": self.retry.max_attempts,
            "timeout": self.timeout,
            "tags": self.tags,
            **options,
        }
        return _new_job(self.name, self.arguments.encode(args, kwargs), values)


class Using(Generic[P, R]):
    """A job type with options for the jobs to come."""

    def __init__(self, job_type: JobType[P, R], conn: Any, options: Mapping[str, Any]) -> None:
        self.job_type = job_type
        self.conn = conn
        self.options = options

    def bind(self, *args: P.args, **kwargs: P.kwargs) -> BoundJob[R]:
        return BoundJob(self.job_type, self.job_type.new_job(args, kwargs, self.options))

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobRef[R]:
        job = self.bind(*args, **kwargs)
        return job.ref(await self.job_type.app._send(job.new_job, self.conn))

    def enqueue_sync(self, *args: P.args, **kwargs: P.kwargs) -> JobRef[R]:
        job = self.bind(*args, **kwargs)
        return job.ref(self.job_type.app._send_sync(job.new_job, self.conn))


class BoundJob(Generic[R_co]):
    """A job that is checked and complete, but not added yet."""

    def __init__(self, job_type: JobType[..., R_co], new_job: NewJob) -> None:
        self.job_type = job_type
        self.new_job = new_job

    def ref(self, added: Added) -> JobRef[R_co]:
        """The reference to this job, once it is added."""
        return JobRef(self.job_type.app, added, self.job_type)


class JobRef(Generic[R_co]):
    """A job that was added."""

    def __init__(self, app: PgQueue, added: Added, job_type: JobType[..., R_co] | None = None) -> None:
        self.app = app
        self.id, self.inserted = added
        """False: the idempotency key was known, and this is the first job."""
        self.job_type = job_type

    def __repr__(self) -> str:
        return f"<job {self.id}>"

    async def job(self) -> Job:
        async with self.app.pools.connection() as conn:
            return await read.get_job(conn, self.id)

    def job_sync(self) -> Job:
        with self.app.pools.connection_sync() as conn, translated():
            row = conn.execute(SQL.get_job, {"id": self.id}).fetchone()
        if row is None:
            raise JobNotFound(f"job {self.id} does not exist")
        return Job(*row)

    async def cancel(self, reason: str | None = None) -> Status:
        """CANCELLED, or RUNNING when the handler has been asked to stop."""
        async with self.app.pools.connection() as conn:
            return await control.cancel_job(conn, self.id, reason=reason)

    async def result(self, timeout: float | None = None) -> R_co:  # noqa: ASYNC109
        """Waits for the job's end. Raises JobFailed, JobWasCancelled or, after so many seconds, TimeoutError."""
        for pause in _pauses(self.id, timeout):
            if (job := await self.job()).finished_at is not None:
                break
            await asyncio.sleep(pause)
        return self._result(job)

    def result_sync(self, timeout: float | None = None) -> R_co:
        for pause in _pauses(self.id, timeout):
            if (job := self.job_sync()).finished_at is not None:
                break
            time.sleep(pause)
        return self._result(job)

    def _result(self, job: Job) -> R_co:
        if job.status is Status.CANCELLED:
            raise JobWasCancelled(job.id, job.reason, job.error)
        if job.status is Status.FAILED:
            raise JobFailed(job.id, job.reason, job.error)
        decode: Callable[[str | None], Any] = self.job_type.arguments.decode_result if self.job_type else _loads
        result: R_co = decode(job.result)
        return result


def _executor(fn: Callable[..., Any], wanted: str) -> Executor:
    is_async = inspect.iscoroutinefunction(fn)
    what = f"{getattr(fn, '__qualname__', fn)}: executor={wanted!r}"
    match wanted:
        case "auto":
            return "async" if is_async else "thread"
        case "async" if not is_async:
            raise TypeError(f'{what} needs an async def; a plain def runs in a "thread" or a "process"')
        case "thread" | "process" if is_async:
            raise TypeError(f'{what} needs a plain def; an async def runs on the event loop ("async")')
        case "process" if "<locals>" in fn.__qualname__:
            raise TypeError(
                f"{what} needs a function at the top of a module: a child process must be able to import it"
            )
        case "async" | "thread" | "process":
            return wanted
    raise ValueError(f'{what}: must be "auto", "async", "thread" or "process"')


def _find(module: str, qualname: str, name: str) -> JobType[..., Any]:
    """Unpickling, perhaps in another process: a handler is where its module has it."""
    place: Any = importlib.import_module(module)
    candidates: Sequence[Any] = list(vars(place).values())
    for part in qualname.split("."):
        place = getattr(place, part, None)
    for each in [place, *candidates]:
        if isinstance(each, JobType) and each.name == name:
            return each
    raise LookupError(f"{module} has no handler for {name}: keep what @app.job returns in a variable of the module")


def _foreign(type: str, payload: Any, options: Mapping[str, Any]) -> tuple[Any, NewJob]:
    values = {**options}
    conn = values.pop("conn", None)
    try:
        text = "{}" if payload is None else dumps(payload)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidJob(f"{type}: the payload cannot be stored as JSON: {error}") from error
    return conn, _new_job(type, text, values)


def _new_job(type: str, payload: str, values: dict[str, Any]) -> NewJob:
    if unknown := values.keys() - Options.__annotations__.keys():
        raise TypeError(
            f"there is no option {', '.join(sorted(unknown))}; there are {', '.join(Options.__annotations__)}"
        )
    for name in ("delay", "timeout", "key_ttl"):
        if values.get(name) is not None:
            values[name] = seconds(values[name])
    if "tags" in values:
        values["tags"] = list(values["tags"])
    return NewJob(type=type, payload=payload, **values)


def _loads(text: str | None) -> Any:
    return None if text is None else loads(text)


def _pauses(id: int, timeout: float | None) -> Iterator[float]:
    deadline = None if timeout is None else time.monotonic() + timeout
    pause = FIRST_PAUSE
    while True:
        left = pause if deadline is None else deadline - time.monotonic()
        yield max(0.0, min(pause, left))
        if left <= 0:
            raise TimeoutError(f"job {id} has not ended within {timeout:g} s")
        pause = min(pause * 1.5, LONGEST_PAUSE)
