"""JobType: a handler, what its jobs have in common, and how they are added."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypedDict, TypeVar, Unpack

from pgqueue import callers, enqueue
from pgqueue.arguments import Arguments
from pgqueue.db import translated
from pgqueue.enqueue import Added
from pgqueue.errors import InvalidJob
from pgqueue.idempotency import Effect, effect_key
from pgqueue.job import NewJob
from pgqueue.jobref import JobRef
from pgqueue.outcome import Retry, result_text, seconds

if TYPE_CHECKING:
    from pgqueue.app import PgQueue

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

Executor = Literal["async", "thread", "process"]

AT_ONCE = 5_000
"""Jobs in one statement."""


class Options(TypedDict, total=False):
    """What one job may have otherwise than its type says."""

    queue: str
    priority: int
    delay: float | timedelta
    """Seconds from now."""
    run_at: datetime
    thread_demand: int
    max_attempts: int
    timeout: float | timedelta
    idempotency_key: str
    key_ttl: float | timedelta
    """For how long the key is remembered: a day, unless told."""
    tags: Iterable[str]
    name: str


class UsingOptions(Options, total=False):
    conn: Any
    """The caller's own connection: the job is there if and when the caller's transaction commits."""


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
        once_per: Iterable[str] = (),
        at_most_once: bool = False,
        once_ttl: float | timedelta = 86400,
    ) -> None:
        if not inspect.isfunction(fn) and not inspect.ismethod(fn):
            raise TypeError(f"{fn!r} is not a function")
        if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
            raise TypeError(f"{fn.__qualname__} is a generator: a handler returns its result")
        self.app = app
        self.fn: Callable[..., Any] = fn
        self.name = name or fn.__name__
        self.queue = queue
        self.priority = priority
        self.retry = Retry(max_attempts=retry) if isinstance(retry, int) else retry
        self.timeout = None if timeout is None else seconds(timeout)
        self.thread_demand = thread_demand
        self.executor: Executor = _executor(fn, executor)
        self.tags = list(tags)
        self.arguments = Arguments(fn, self.name)
        self.once_per = tuple(once_per)
        if unknown := set(self.once_per) - set(self.arguments.names):
            raise TypeError(
                f"{self.name}: once_per names {', '.join(sorted(unknown))}, which the handler does not take"
            )
        self.at_most_once = at_most_once
        self.once_ttl = seconds(once_ttl)
        if not 1 <= self.once_ttl <= 100 * 365 * 86400:
            raise ValueError(f"{self.name}: once_ttl must be between a second and a hundred years")
        self.has_effect = bool(self.once_per) or at_most_once
        """Whether its jobs must not have their effect twice."""
        self.takes_context = self.arguments.takes_context
        self.decode: Callable[[str], tuple[Any, dict[str, Any]]] = self.arguments.decode
        """From the payload's text to the payload and the handler's keyword arguments; raises Undecodable."""
        self.encode_result: Callable[[Any], str | None] = result_text
        """From what the handler returned to JSON text; raises BadResult."""
        self.__module__, self.__name__, self.__qualname__ = fn.__module__, fn.__name__, fn.__qualname__
        self.__doc__, self.__wrapped__ = fn.__doc__, fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function itself, at once and without a queue."""
        return self.fn(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<job type {self.name}: {self.__module__}.{self.__qualname__}>"

    def __reduce__(self) -> Any:
        return _find, (self.__module__, self.__qualname__, self.name)

    def effect(self, job_id: int, arguments: Mapping[str, Any]) -> Effect:
        """What must happen once: for all jobs with the same values of `once_per`, else for this job. Raises Undecodable
        if an argument has no JSON form by which it could be told from others."""
        if not self.once_per:
            return Effect(f"job:{job_id}", self.at_most_once, self.once_ttl)
        key = effect_key(self.name, *self.arguments.values(arguments, self.once_per))
        return Effect(key, self.at_most_once, self.once_ttl)

    def json_schema(self) -> dict[str, Any]:
        """The JSON Schema of the payload."""
        return self.arguments.json_schema()

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobRef[R]:
        return await self.using().enqueue(*args, **kwargs)

    def enqueue_sync(self, *args: P.args, **kwargs: P.kwargs) -> JobRef[R]:
        return self.using().enqueue_sync(*args, **kwargs)

    async def enqueue_many(self, calls: Iterable[Mapping[str, Any]], conn: Any = None) -> list[JobRef[R]]:
        """All of them or none, in this order. Each call is the keyword arguments of one job."""
        return await self.using(conn=conn).enqueue_many(calls)

    def enqueue_many_sync(self, calls: Iterable[Mapping[str, Any]], conn: Any = None) -> list[JobRef[R]]:
        return self.using(conn=conn).enqueue_many_sync(calls)

    def bind(self, *args: P.args, **kwargs: P.kwargs) -> BoundJob[R]:
        """A job with its arguments, checked but not added: for ctx.enqueue."""
        return self.using().bind(*args, **kwargs)

    def using(self, **options: Unpack[UsingOptions]) -> Using[P, R]:
        """The same type with options for the jobs to come: `send.using(delay=300).enqueue_sync(to=…)`."""
        return Using(self, {**options})


class Using(Generic[P, R]):
    """A job type with options for the jobs to come."""

    def __init__(self, job_type: JobType[P, R], options: dict[str, Any]) -> None:
        self.job_type = job_type
        self.conn = options.pop("conn", None)
        self._common = {
            "queue": job_type.queue,
            "priority": job_type.priority,
            "thread_demand": job_type.thread_demand,
            "max_attempts": job_type.retry.max_attempts,
            "timeout": job_type.timeout,
            "tags": job_type.tags,
            **_plain(options),
        }

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobRef[R]:
        job = self.bind(*args, **kwargs)
        return job.ref(await add(self.job_type.app, job.new_job, self.conn))

    def enqueue_sync(self, *args: P.args, **kwargs: P.kwargs) -> JobRef[R]:
        job = self.bind(*args, **kwargs)
        return job.ref(add_sync(self.job_type.app, job.new_job, self.conn))

    def bind(self, *args: P.args, **kwargs: P.kwargs) -> BoundJob[R]:
        return BoundJob(self.job_type, self._job(args, kwargs))

    async def enqueue_many(self, calls: Iterable[Mapping[str, Any]]) -> list[JobRef[R]]:
        batches = self._batches(calls)
        if self.conn is not None:
            added = [each for batch in batches for each in await callers.add_jobs(self.conn, batch)]
        else:
            with translated():
                async with self.job_type.app.pools.connection() as conn, conn.transaction():
                    added = [each for batch in batches for each in await enqueue.add_jobs(conn, batch)]
        return [JobRef(self.job_type.app, each, self.job_type) for each in added]

    def enqueue_many_sync(self, calls: Iterable[Mapping[str, Any]]) -> list[JobRef[R]]:
        batches = self._batches(calls)
        if self.conn is not None:
            added = [each for batch in batches for each in callers.add_jobs_sync(self.conn, batch)]
        else:
            with self.job_type.app.pools.connection_sync() as conn, translated(), conn.transaction():
                added = [each for batch in batches for each in callers.add_jobs_sync(conn, batch)]
        return [JobRef(self.job_type.app, each, self.job_type) for each in added]

    def _batches(self, calls: Iterable[Mapping[str, Any]]) -> list[list[NewJob]]:
        if "idempotency_key" in self._common:
            raise InvalidJob(f"{self.job_type.name}: one idempotency_key cannot name many jobs")
        jobs = []
        for index, call in enumerate(calls):
            try:
                jobs.append(self._job((), call))
            except InvalidJob as error:
                raise InvalidJob(f"call {index}: {error}") from error
        # In one statement on a caller's connection: it may commit each by itself, and half of them would be added.
        size = AT_ONCE if self.conn is None else max(1, len(jobs))
        return [jobs[start : start + size] for start in range(0, len(jobs), size)]

    def _job(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> NewJob:
        return NewJob(type=self.job_type.name, payload=self.job_type.arguments.encode(args, kwargs), **self._common)


class BoundJob(Generic[R_co]):
    """A job that is checked and complete, but not added yet."""

    def __init__(self, job_type: JobType[..., R_co], new_job: NewJob) -> None:
        self.job_type = job_type
        self.new_job = new_job

    def ref(self, added: Added) -> JobRef[R_co]:
        """The reference to this job, once somebody has added it."""
        return JobRef(self.job_type.app, added, self.job_type)


def foreign_job(type: str, payload: str, options: dict[str, Any]) -> NewJob:
    """A job of a type that only its worker knows."""
    return NewJob(type=type, payload=payload, **_plain(options))


async def add(app: PgQueue, job: NewJob, conn: Any) -> Added:
    if conn is not None:
        return await callers.add_job(conn, job)
    async with app.pools.connection() as own:
        return await enqueue.add_job(own, job)


def add_sync(app: PgQueue, job: NewJob, conn: Any) -> Added:
    if conn is not None:
        return callers.add_job_sync(conn, job)
    with app.pools.connection_sync() as own, translated():
        return callers.add_job_sync(own, job)


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    if unknown := options.keys() - Options.__annotations__.keys():
        raise TypeError(
            f"there is no option {', '.join(sorted(unknown))}; there are {', '.join(Options.__annotations__)}"
        )
    for name in ("delay", "timeout", "key_ttl"):
        if options.get(name) is not None:
            options[name] = seconds(options[name])
    if "tags" in options:
        options["tags"] = list(options["tags"])
    return options


def _executor(fn: Callable[..., Any], wanted: str) -> Executor:
    is_async = inspect.iscoroutinefunction(fn)
    what = f"{fn.__qualname__}: executor={wanted!r}"
    match wanted:
        case "auto":
            return "async" if is_async else "thread"
        case "async" if not is_async:
            raise TypeError(f'{what} needs an async def; a plain def runs in a "thread" or a "process"')
        case "thread" | "process" if is_async:
            raise TypeError(f'{what} needs a plain def; an async def runs on the event loop ("async")')
        case "process" if "<locals>" in fn.__qualname__:
            raise TypeError(f"{what} needs a function at the top of a module, which a child process can import")
        case "async" | "thread" | "process":
            return wanted
    raise ValueError(f'{what} must be "auto", "async", "thread" or "process"')


def _find(module: str, qualname: str, name: str) -> JobType[..., Any]:
    """Unpickling, perhaps in another process: a handler is where its module has it."""
    home = import_module(module)
    place: Any = home
    for part in qualname.split("."):
        place = getattr(place, part, None)
    for each in [place, *vars(home).values()]:
        if isinstance(each, JobType) and each.name == name:
            return each
    raise LookupError(f"{module} has no handler for {name}: keep what @app.job returns in a variable of the module")
