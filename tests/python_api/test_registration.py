"""What @app.job accepts, what it refuses and why, and what it returns."""

import multiprocessing
import pickle
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from typing import Annotated, Any

import pytest
from pydantic import Field

from pgqueue import Context, PgQueue, Retry
from tests.python_api import handlers


@pytest.fixture
def app() -> PgQueue:
    return PgQueue("postgresql://nobody@127.0.0.1:1/nothing")


def test_bare(app: PgQueue) -> None:
    @app.job
    async def send(ctx: Context, to: str) -> str:
        "Sends."
        return f"{ctx} {to}"

    assert app.types == {"send": send}
    assert (send.name, send.queue, send.priority, send.thread_demand, send.tags) == ("send", "default", 0, 1, [])
    assert (send.retry, send.timeout, send.executor, send.takes_context) == (Retry(), None, "async", True)
    assert (send.__name__, send.__doc__) == ("send", "Sends.")


def test_options(app: PgQueue) -> None:
    @app.job(
        "mail.send", queue="mail", priority=5, retry=3, timeout=timedelta(minutes=1), thread_demand=2, tags=("a", "b")
    )
    def send(to: str) -> None: ...

    assert app.types == {"mail.send": send}
    assert (send.name, send.queue, send.priority, send.thread_demand) == ("mail.send", "mail", 5, 2)
    assert (send.retry, send.timeout, send.executor, send.takes_context) == (Retry(max_attempts=3), 60, "thread", False)
    job = send.bind("x").new_job
    assert (job.type, job.queue, job.priority, job.thread_demand) == ("mail.send", "mail", 5, 2)
    assert (job.max_attempts, job.timeout, job.tags) == (3, 60, ["a", "b"])


def test_using_says_otherwise(app: PgQueue) -> None:
    send = app.job(queue="mail", timeout=5, tags=["a"])(no_arguments)
    job = send.using(
        queue="q", priority=1, delay=timedelta(hours=1), max_attempts=9, timeout=7, key_ttl=60, tags=("b",), name="n"
    )
    new = job.bind().new_job
    assert (new.queue, new.priority, new.delay, new.max_attempts) == ("q", 1, 3600, 9)
    assert (new.timeout, new.key_ttl, new.tags, new.name) == (7, 60, ["b"], "n")
    with pytest.raises(TypeError, match="there is no option delai; there are queue, priority, delay"):
        send.using(delai=3)  # type: ignore[call-arg]


def no_arguments() -> None: ...


def test_a_call_is_a_plain_call(app: PgQueue) -> None:
    def double(n: int) -> int:
        return n * 2

    assert app.job(double)(4) == 8
    assert app.job("with_context")(lambda ctx, n: (ctx, n))("context", 4) == ("context", 4)


def test_the_context_is_found_by_its_annotation_or_name(app: PgQueue) -> None:
    async def annotated(anything: Context, x: int) -> None: ...
    def quoted(anything: "Context", x: int) -> None: ...
    def named(ctx, x: int) -> None: ...  # type: ignore[no-untyped-def]
    def not_first(x: int, ctx: int) -> None: ...
    def other_type(ctx: int, x: int) -> None: ...
    def positional(ctx: Context, /, x: int) -> None: ...

    for fn in (annotated, quoted, named, positional):
        job_type: Any = app.job(fn)
        assert job_type.takes_context
        assert job_type.decode('{"x": 1}') == ({"x": 1}, {"x": 1})
    for fn in (not_first, other_type):
        job_type = app.job(fn)
        assert not job_type.takes_context
        assert job_type.decode('{"x": 1, "ctx": 2}')[1] == {"x": 1, "ctx": 2}


def test_types_that_are_local_to_a_function(app: PgQueue) -> None:
    class Local(str):
        __slots__ = ()

        @classmethod
        def __get_pydantic_core_schema__(cls, source: Any, handler: Callable[[Any], Any]) -> Any:
            return handler(str)

    @app.job
    def send(to: "Local") -> None: ...

    assert send.decode('{"to": "x"}')[1] == {"to": "x"}


def asynchronous() -> Any:
    async def fn() -> None: ...

    return fn


def test_executors(app: PgQueue) -> None:
    assert app.job("a", executor="async")(asynchronous()).executor == "async"
    assert app.job("b", executor="thread")(no_arguments).executor == "thread"
    assert app.job("c", executor="process")(no_arguments).executor == "process"
    with pytest.raises(TypeError, match=r"no_arguments: executor='async' needs an async def"):
        app.job("d", executor="async")(no_arguments)
    for executor in ("thread", "process"):
        with pytest.raises(TypeError, match=f"fn: executor='{executor}' needs a plain def"):
            app.job("d", executor=executor)(asynchronous())  # type: ignore[arg-type]

    def local() -> None: ...

    with pytest.raises(TypeError, match="needs a function at the top of a module, which a child process can import"):
        app.job("d", executor="process")(local)
    with pytest.raises(ValueError, match='executor=\'fiber\' must be "auto", "async", "thread" or "process"'):
        app.job("d", executor="fiber")(no_arguments)  # type: ignore[call-overload]
    assert sorted(app.types) == ["a", "b", "c"]


def starred(*args: int) -> None: ...
def positional_only(x: int, /, y: int) -> None: ...
def late_context(x: int, ctx: Context) -> None: ...
def keyword_context(*, ctx: Context) -> None: ...
def unknown_type(x: "Nowhere") -> None: ...  # type: ignore[name-defined]  # noqa: F821
def no_json(x: int, y: pytest.Config) -> None: ...
def field_as_default(x: int = Field(gt=0)) -> None: ...
def generator() -> Iterator[int]:
    yield 1


async def async_generator() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (starred, r"starred: \*args has no names for the payload's values"),
        (positional_only, "positional_only: x is positional-only, but arguments come by name"),
        (late_context, "late_context: the Context must be the first argument"),
        (keyword_context, "keyword_context: the Context must be the first argument"),
        (unknown_type, "unknown_type: an annotation cannot be read .*Nowhere"),
        (no_json, "no_json: y: Config has no JSON form"),
        (field_as_default, r"field_as_default: write x: Annotated\[…, Field\(…\)\], and its default after it"),
        (generator, "generator is a generator: a handler returns its result"),
        (async_generator, "async_generator is a generator"),
        (print, "is not a function"),
        (PgQueue, "is not a function"),
        (3, "3 is not a function"),
    ],
)
def test_refused(app: PgQueue, fn: Any, why: str) -> None:
    with pytest.raises(TypeError, match=f"(?s){why}"):
        app.job(fn)
    assert app.types == {}


@pytest.mark.parametrize("ttl", [0, 0.5, -1, float("inf"), float("nan"), timedelta(days=36_501)])
def test_an_effect_is_remembered_for_a_second_to_a_hundred_years(app: PgQueue, ttl: float | timedelta) -> None:
    with pytest.raises(ValueError, match="x: once_ttl must be between a second and a hundred years"):
        app.job("x", at_most_once=True, once_ttl=ttl)(no_arguments)
    assert app.types == {}
    for fine in (1, timedelta(days=36_500)):
        PgQueue().job("x", at_most_once=True, once_ttl=fine)(no_arguments)


def test_one_handler_for_a_type(app: PgQueue) -> None:
    app.job("x")(no_arguments)
    with pytest.raises(ValueError, match=r"x has a handler already: <job type x: .*test_registration.no_arguments>"):
        app.job("x")(asynchronous())


def test_one_function_for_two_types(app: PgQueue) -> None:
    app.job("x")(no_arguments)
    app.job("y")(no_arguments)
    assert sorted(app.types) == ["x", "y"]


async def one(ctx: Any, call_next: Any) -> Any:
    return await call_next()


async def two(ctx: Any, call_next: Any) -> Any:
    return await call_next()


def test_include(app: PgQueue) -> None:
    other = PgQueue()
    job_type = other.job("x")(no_arguments)
    assert app.middleware(one) is one
    other.middleware(one)
    other.middleware(two)
    app.include(other)
    assert app.types == {"x": job_type}
    assert app.middlewares == [one, two]
    assert job_type.app.pools.database_url == "postgresql://nobody@127.0.0.1:1/nothing"
    with pytest.raises(ValueError, match="x has a handler already"):
        app.job("x")(asynchronous())
    with pytest.raises(TypeError, match="a middleware is an async def"):
        app.middleware(no_arguments)


def test_an_included_app_with_a_database_keeps_it(app: PgQueue) -> None:
    other = PgQueue("postgresql://elsewhere/x")
    app.include(other)
    assert other.pools.database_url == "postgresql://elsewhere/x"


def test_json_schema(app: PgQueue) -> None:
    @app.job
    def send(to: Annotated[str, Field(max_length=9)], n: int = 3, when: timedelta = timedelta(seconds=1)) -> None: ...

    schema = send.json_schema()
    assert schema["type"] == "object"
    assert schema["required"] == ["to"]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["to"]["maxLength"] == 9
    assert schema["properties"]["n"]["default"] == 3
    assert schema["properties"]["when"]["default"] == "PT1S"


def test_job_types_are_pickled_by_reference() -> None:
    for job_type in (handlers.double, handlers.renamed):
        assert pickle.loads(pickle.dumps(job_type)) is job_type
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(handlers.call_with_4, [handlers.double, handlers.renamed]) == [8, 12]
    lost = PgQueue().job("lost")(no_arguments)
    with pytest.raises(LookupError, match=r"has no handler for lost: keep what @app.job returns"):
        pickle.loads(pickle.dumps(lost))
