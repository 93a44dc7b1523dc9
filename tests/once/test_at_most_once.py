"""What becomes of a job that must not have its effect twice, by how its handler ends; in a worker inside the test."""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

from pgqueue import Context, InDoubt, PgQueue, Snooze, control
from pgqueue.job import Status
from pgqueue.outcome import JobAbandoned, Retry
from pgqueue.sql import SQL
from pgqueue.worker.runtime import Runtime
from tests.once.arena import ENDED, Arena, Place
from tests.once.handlers import Sink
from tests.once.inside import worker_inside
from tests.once.proxy import proxied

QUICK = Retry(max_attempts=3, base=0.01, jitter=0)

NOWHERE = "postgresql://127.0.0.1:1/nothing"

children = PgQueue()


@children.job("dies", executor="process", at_most_once=True, retry=QUICK)
def dies() -> None:
    os._exit(3)


@children.job("bad result", executor="process", at_most_once=True, retry=QUICK)
def bad_result() -> object:
    return object()


@children.job("lazy", executor="process", at_most_once=True, retry=QUICK)
def lazy(sink: str) -> object:
    Sink(sink).call("k")
    return (n for n in range(3))


@children.job("local", executor="process", at_most_once=True, retry=QUICK)
def local(sink: str) -> object:
    @dataclass
    class Receipt:
        number: int

    Sink(sink).call("k")
    return Receipt(7)


@children.job("deaf", executor="process", once_per=["key"], at_most_once=True, retry=QUICK)
def deaf(key: str, sink: str) -> None:
    Sink(sink).call(key)
    time.sleep(30)


@children.job("listens", executor="process", once_per=["key"], at_most_once=True, retry=QUICK)
def listens(ctx: Context, key: str, sink: str) -> str:
    first = Sink(sink).began(key) == 1
    while first:
        time.sleep(0.01)
        ctx.check()
    return "done"


@asynccontextmanager
async def running(
    arena: Arena, handler: Callable[..., Any], **options: Any
) -> AsyncIterator[tuple[Place, Runtime, list[int]]]:
    """A worker with this handler, at most once for each value of `key`, and two jobs with the same key."""
    app = PgQueue()
    app.job("t", once_per=["key"], at_most_once=True, **{"retry": QUICK} | options)(handler)
    async with arena.place() as place:
        ids = [await place.add("t", {"key": "k"}, max_attempts=3) for _ in range(2)]
        async with worker_inside(app, place.dsn, threads=2) as runtime:
            yield place, runtime, ids


async def fates(place: Place) -> list[tuple[str, str | None]]:
    rows = await place.rows("SELECT status::text, reason FROM pgqueue.jobs ORDER BY id")
    return sorted((row["status"], row["reason"]) for row in rows)


async def first_ended(place: Place) -> dict[str, Any]:
    """The job that had the effect to itself, once it has ended."""
    deadline = time.monotonic() + 20
    query = "SELECT * FROM pgqueue.jobs WHERE status::text = ANY(%s)"
    while not (ended := await place.rows(query, list(ENDED))):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    return ended[0]


async def test_an_ordinary_error_means_that_it_did_not_happen(arena: Arena) -> None:
    calls = []

    async def handler(ctx: Context, key: str) -> str:
        calls.append(ctx.attempt)
        if len(calls) < 3:
            raise ValueError("not yet")
        return "done"

    async with running(arena, handler) as (place, _, ids):
        jobs = await place.ended(*ids)
        assert len(calls) == 3
        assert [job["result"] for job in jobs] == ["done", "done"]
        assert sum(str(job["reason"]).startswith("duplicate of job") for job in jobs) == 1


async def test_a_snooze_as_well(arena: Arena) -> None:
    calls = []

    async def handler(key: str) -> Snooze | str:
        calls.append(key)
        return Snooze(0.01) if len(calls) == 1 else "done"

    async with running(arena, handler) as (place, _, ids):
        assert [job["result"] for job in await place.ended(*ids)] == ["done", "done"]
        assert len(calls) == 2


async def test_a_handler_may_say_that_it_does_not_know(arena: Arena) -> None:
    calls = []

    async def handler(key: str) -> None:
        calls.append(key)
        raise InDoubt("the provider went away")

    async with running(arena, handler) as (place, _, ids):
        job = await first_ended(place)
        assert (job["status"], job["reason"], job["error"]) == ("failed", "in_doubt", "the provider went away")
        await asyncio.sleep(0.3)
        assert len(calls) == 1
        # The other job waits for the answer, and is not charged for it.
        [other] = [await place.job(id) for id in ids if id != job["id"]]
        assert other["status"] not in ENDED
        assert other["attempt"] == 0


@pytest.mark.parametrize("executor", ["async", "thread"])
async def test_a_timeout_leaves_a_doubt(arena: Arena, executor: str) -> None:
    calls = []

    async def in_loop(key: str) -> None:
        calls.append(key)
        await asyncio.sleep(30)

    def in_thread(ctx: Context, key: str) -> None:
        calls.append(key)
        for _ in range(500):
            time.sleep(0.02)
            ctx.check()

    async with running(arena, in_loop if executor == "async" else in_thread, timeout=0.2) as (place, _, _ids):
        assert (await first_ended(place))["reason"] == "in_doubt"
        assert len(calls) == 1


@pytest.mark.parametrize("executor", ["async", "thread"])
async def test_a_result_that_cannot_be_stored_leaves_a_doubt(arena: Arena, executor: str) -> None:
    """The handler has returned, so it has had its effect: no other job may have it again."""
    calls = []

    async def in_loop(key: str) -> object:
        calls.append(key)
        return object()

    def in_thread(key: str) -> object:
        calls.append(key)
        return object()

    async with running(arena, in_loop if executor == "async" else in_thread) as (place, _, _ids):
        assert (await first_ended(place))["reason"] == "in_doubt"
        await asyncio.sleep(0.3)
        assert len(calls) == 1


async def test_a_result_that_postgres_refuses_leaves_a_doubt(arena: Arena) -> None:
    calls = []

    async def handler(key: str) -> int:
        calls.append(key)
        return 10**200_000

    async with running(arena, handler) as (place, _, _ids):
        assert (await first_ended(place))["reason"] == "in_doubt"
        await asyncio.sleep(0.3)
        assert len(calls) == 1


@pytest.mark.parametrize("type", ["dies", "bad result"])
async def test_a_child_process_that_dies_leaves_a_doubt(arena: Arena, type: str) -> None:
    async with arena.place() as place:
        id = await place.add(type, {})
        async with worker_inside(children, place.dsn, threads=1):
            [job] = await place.ended(id)
        assert (job["status"], job["reason"], job["attempt"]) == ("failed", "in_doubt", 1)


@pytest.mark.parametrize(("type", "result"), [("lazy", [0, 1, 2]), ("local", {"number": 7})])
async def test_a_result_that_is_json_need_not_be_picklable(arena: Arena, type: str, result: Any) -> None:
    async with arena.place() as place:
        id = await place.add(type, {"sink": str(place.sink.folder)})
        async with worker_inside(children, place.dsn, threads=1):
            [job] = await place.ended(id)
        assert (job["status"], job["attempt"], job["result"]) == ("completed", 1, result)
        assert place.sink.all("effects") == ["k"]


def die(chunk: Any) -> None:
    os._exit(9)


async def commit_is_not_serializable(ctx: Context) -> None:
    look, see = "SELECT count(*) FROM public.seen", "INSERT INTO public.seen VALUES ('k', 1)"
    async with ctx.transaction("serializable") as tx:
        await tx.execute(look)
        await tx.execute(see)
        async with await psycopg.AsyncConnection.connect(ctx._host.dsn) as rival:  # type: ignore[attr-defined]
            await rival.set_isolation_level(psycopg.IsolationLevel.SERIALIZABLE)
            await rival.execute(look)
            await rival.execute(see)


async def step_runs_into_statement_timeout(ctx: Context) -> None:
    async with await psycopg.AsyncConnection.connect(ctx._host.dsn) as conn:  # type: ignore[attr-defined]
        await conn.execute(
            """
            CREATE FUNCTION public.late() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN RAISE 'canceling statement due to statement timeout' USING ERRCODE = 'query_canceled'; END $$
            """
        )
        await conn.execute("CREATE TRIGGER late BEFORE INSERT ON pgqueue.steps EXECUTE FUNCTION public.late()")
    await ctx.step("one", lambda: None)


async def chunk_dies(ctx: Context) -> None:
    await ctx.map_chunks(die, [1])


async def is_cancelled_from_inside(ctx: Context) -> None:
    inner = asyncio.create_task(asyncio.Event().wait())
    asyncio.get_running_loop().call_soon(inner.cancel)
    await inner


async def middleware_fails(ctx: Context) -> None: ...


async def result_fails(ctx: Context) -> object:
    return (1 // n for n in (1, 0))


@pytest.mark.parametrize(
    "how",
    [
        commit_is_not_serializable,
        step_runs_into_statement_timeout,
        chunk_dies,
        is_cancelled_from_inside,
        middleware_fails,
        result_fails,
    ],
    ids=lambda how: how.__name__,
)
async def test_an_error_that_it_did_not_raise_is_not_its_word(arena: Arena, how: Callable[..., Any]) -> None:
    calls = []
    app = PgQueue()

    @app.middleware
    async def count(ctx: Context, call_next: Callable[[], Any]) -> Any:
        result = await call_next()
        if how is middleware_fails:
            raise RuntimeError("nobody counts")
        return result

    @app.job("t", at_most_once=True, retry=QUICK)
    async def handler(ctx: Context) -> object:
        calls.append(ctx.attempt)
        return await how(ctx)

    async with arena.place() as place:
        id = await place.add("t", {}, max_attempts=3)
        async with worker_inside(app, place.dsn):
            [job] = await place.ended(id)
        assert (job["status"], job["reason"], job["attempt"]) == ("failed", "in_doubt", 1)
        assert calls == [1]


async def test_cut_off_by_a_cancellation_it_is_in_doubt(arena: Arena) -> None:
    """Cancelled, it would hold its key for ever, and nobody would be told."""
    began = asyncio.Event()

    async def handler(key: str) -> None:
        began.set()
        await asyncio.sleep(30)

    async with running(arena, handler) as (place, runtime, _):
        await began.wait()
        [id] = runtime.running
        assert await control.cancel_job(place.conn, id) is Status.RUNNING
        job = await first_ended(place)
        assert (job["id"], job["reason"]) == (id, "in_doubt")


@pytest.mark.parametrize("how", ["cancel", "shutdown"])
async def test_a_child_process_that_was_killed_said_nothing(arena: Arena, how: str) -> None:
    async with arena.place() as place:
        payload = {"key": "k", "sink": str(place.sink.folder)}
        id = await place.add("deaf", payload)
        async with worker_inside(children, place.dsn, threads=1, shutdown_grace=6.0) as runtime:
            while not place.sink.all("effects"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            if how == "cancel":
                await control.cancel_job(place.conn, id)
                await place.ended(id)
            runtime.stop()
            runtime.stop()
        job = await place.job(id)
        assert (job["status"], job["reason"], job["attempt"]) == ("failed", "in_doubt", 1)
        other = await place.add("deaf", payload)
        async with worker_inside(children, place.dsn, threads=1):
            await asyncio.sleep(1)
        assert (await place.job(other))["status"] not in ENDED
        assert place.sink.all("effects") == ["k"]


async def test_a_child_process_that_ended_at_a_check_has_not_had_its_effect(arena: Arena) -> None:
    async with arena.place() as place:
        payload = {"key": "k", "sink": str(place.sink.folder)}
        id = await place.add("listens", payload)
        async with worker_inside(children, place.dsn, threads=1):
            while not place.sink.all("starts"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await control.cancel_job(place.conn, id)
            [job] = await place.ended(id)
            assert job["status"] == "cancelled"
            [job] = await place.ended(await place.add("listens", payload))
            assert (job["status"], job["result"]) == ("completed", "done")


@pytest.mark.parametrize("how", ["cancel", "timeout"])
async def test_an_error_made_of_the_cancellation_is_not_its_word(arena: Arena, how: str) -> None:
    """Some libraries turn it into an error of their own."""
    calls = []
    began = asyncio.Event()

    async def handler(key: str) -> None:
        calls.append(key)
        began.set()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            raise ConnectionError("the request was cut off") from None

    options = {"timeout": 0.2} if how == "timeout" else {}
    async with running(arena, handler, **options) as (place, runtime, _):
        await began.wait()
        if how == "cancel":
            [id] = runtime.running
            await control.cancel_job(place.conn, id)
        assert (await first_ended(place))["reason"] == "in_doubt"
        await asyncio.sleep(0.7)
        assert len(calls) == 1


async def test_a_middleware_that_stops_waiting_leaves_a_doubt(arena: Arena) -> None:
    async def handler(key: str) -> None:
        await asyncio.sleep(30)

    async def impatient(ctx: Context, call_next: Callable[[], Awaitable[Any]]) -> Any:
        async with asyncio.timeout(0.2):
            return await call_next()

    async with running(arena, handler) as (place, runtime, _):
        runtime.app.middlewares.append(impatient)
        assert (await first_ended(place))["reason"] == "in_doubt"


async def test_a_middleware_that_stops_waiting_behind_a_shield_leaves_a_doubt(arena: Arena) -> None:
    """The handler goes on, and has its effect when its middleware has failed already."""
    calls = []
    ended, effect = asyncio.Event(), asyncio.Event()

    async def handler(ctx: Context, key: str) -> None:
        await ended.wait()
        calls.append(ctx.attempt)
        effect.set()

    async def impatient(ctx: Context, call_next: Callable[[], Awaitable[Any]]) -> Any:
        return await asyncio.wait_for(asyncio.shield(call_next()), 0.2)

    async with running(arena, handler) as (place, runtime, _):
        runtime.app.middlewares.append(impatient)
        job = await first_ended(place)
        assert (job["status"], job["reason"], job["attempt"]) == ("failed", "in_doubt", 1)
        ended.set()
        await asyncio.wait_for(effect.wait(), 10)
        assert calls == [1]


async def test_cancelled_at_a_check_it_has_not_happened(arena: Arena) -> None:
    calls = []
    began, cancelled = threading.Event(), threading.Event()

    def handler(ctx: Context, key: str) -> str:
        began.set()
        cancelled.wait(10)
        ctx.check()
        calls.append(key)
        return "done"

    async with running(arena, handler) as (place, runtime, ids):
        assert await asyncio.to_thread(began.wait, 10)
        [id] = runtime.running
        await control.cancel_job(place.conn, id)
        while runtime.running[id].ctx._stop is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        cancelled.set()
        await place.ended(*ids)
        assert await fates(place) == [("cancelled", "cancelled"), ("completed", None)]
        assert len(calls) == 1


async def test_given_back_at_a_check_it_runs_again(arena: Arena) -> None:
    """A worker that stops leaves no doubt behind if the handler says that it had not begun."""
    calls = []
    began, go_on = threading.Event(), threading.Event()

    def handler(ctx: Context, key: str) -> None:
        began.set()
        go_on.wait(10)
        ctx.check()
        calls.append(key)

    app = PgQueue()
    app.job("t", at_most_once=True)(handler)
    async with arena.place() as place:
        id = await place.add("t", {"key": "k"})
        async with worker_inside(app, place.dsn, shutdown_grace=4.0) as runtime:
            assert await asyncio.to_thread(began.wait, 10)
            runtime.stop()
            runtime.stop()
            while runtime.running[id].ctx._stop is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            go_on.set()
        assert (await place.job(id))["status"] == "pending"
        assert calls == []
        async with worker_inside(app, place.dsn):
            [job] = await place.ended(id)
        assert (job["status"], job["attempt"]) == ("completed", 1)
        assert calls == ["k"]


@pytest.mark.parametrize("how", ["step", "step_sync", "map_chunks"])
async def test_our_own_check_is_not_its_word(arena: Arena, how: str) -> None:
    """The worker stops while the handler is between its effect and a step."""
    calls: list[str] = []
    app = PgQueue()

    def stop(ctx: Context) -> None:
        # As the worker does, but without the cancellation that would come first.
        calls.append("effect")
        ctx._stop = JobAbandoned("the worker stops")

    async def in_loop(ctx: Context) -> None:
        stop(ctx)
        if how == "step":
            await ctx.step("one", lambda: calls.append("step"))
        else:
            await ctx.map_chunks(calls.extend, ["step"], executor="thread")

    def in_thread(ctx: Context) -> None:
        stop(ctx)
        ctx.step_sync("one", lambda: calls.append("step"))

    app.job("t", at_most_once=True, retry=QUICK)(in_thread if how == "step_sync" else in_loop)
    async with arena.place() as place:
        id = await place.add("t", {})
        async with worker_inside(app, place.dsn):
            [job] = await place.ended(id)
        assert (job["status"], job["reason"]) == ("failed", "in_doubt")
        assert calls == ["effect"]


@pytest.mark.parametrize("cancelled", [False, True], ids=["alone", "cancelled meanwhile"])
async def test_cut_off_by_a_worker_that_stops_it_is_in_doubt(arena: Arena, cancelled: bool) -> None:
    began = asyncio.Event()

    async def handler(key: str) -> None:
        began.set()
        await asyncio.sleep(30)

    app = PgQueue()
    app.job("t", at_most_once=True)(handler)
    async with arena.place() as place:
        id = await place.add("t", {"key": "k"})
        async with worker_inside(app, place.dsn) as runtime:
            await began.wait()
            if cancelled:
                # The worker has not heard of it yet.
                runtime.janitor.cancel = lambda ids: None
                await control.cancel_job(place.conn, id)
        job = await place.job(id)
        assert (job["status"], job["reason"], job["attempt"]) == ("failed", "in_doubt", 1)


@pytest.mark.parametrize("executor", ["async", "thread"])
async def test_a_transaction_without_a_connection_leaves_a_doubt(arena: Arena, executor: str) -> None:
    """Whether there was an effect before it, nobody knows."""
    calls = []

    async def in_loop(ctx: Context, key: str) -> None:
        calls.append(key)
        ctx._host.dsn = NOWHERE  # type: ignore[attr-defined]
        async with ctx.transaction():
            pass

    def in_thread(ctx: Context, key: str) -> None:
        calls.append(key)
        ctx._host.dsn = NOWHERE  # type: ignore[attr-defined]
        with ctx.transaction_sync():
            pass

    async with running(arena, in_loop if executor == "async" else in_thread) as (place, _, _ids):
        assert (await first_ended(place))["reason"] == "in_doubt"
        await asyncio.sleep(0.7)
        assert len(calls) == 1


async def test_a_step_that_could_not_be_kept_at_once_is_kept_when_the_database_is_back(arena: Arena) -> None:
    calls = []
    app = PgQueue()

    @app.job("t", at_most_once=True, retry=QUICK)
    async def handler(ctx: Context) -> None:
        await ctx.step("one", lambda: calls.append("one"))

    async with arena.place() as place, proxied(place.dsn) as proxy:
        proxy.cut(SQL.save_step.partition("%")[0], "before")
        id = await place.add("t", {})
        async with worker_inside(app, place.dsn, handlers_dsn=proxy.dsn()):
            [job] = await place.ended(id)
        assert proxy.cuts == 1
        assert job["status"] == "completed"
        assert calls == ["one"]


async def test_a_step_whose_connection_died_meanwhile_is_kept(arena: Arena) -> None:
    calls = []
    app = PgQueue()

    @app.job("t", retry=QUICK)
    async def handler(ctx: Context) -> None:
        async def charge() -> None:
            calls.append("charge")
            assert await place.cut_off_handlers() > 0

        await ctx.step("charge", charge)

    async with arena.place() as place:
        id = await place.add("t", {}, max_attempts=3)
        async with worker_inside(app, place.dsn):
            [job] = await place.ended(id)
        assert (job["status"], job["attempt"]) == ("completed", 1)
        assert calls == ["charge"]
        assert await place.value("SELECT array_agg(name) FROM pgqueue.steps") == ["charge"]


async def test_a_step_that_could_not_be_kept_does_not_run(arena: Arena) -> None:
    calls: list[Any] = []
    app = PgQueue()

    @app.job("t", retry=QUICK)
    async def handler(ctx: Context) -> None:
        name: Any
        for name in ("", "a\0b", "ä" * 501, "\ud800", 7):
            with pytest.raises(ValueError, match=r"ctx\.step: a name is|surrogates"):
                await ctx.step(name, lambda name=name: calls.append(name))
            with pytest.raises(ValueError, match=r"ctx\.step: a name is|surrogates"):
                ctx.step_sync(name, lambda name=name: calls.append(name))
        await ctx.step("ä" * 500, lambda: calls.append("good"))

    async with arena.place() as place:
        id = await place.add("t", {}, max_attempts=1)
        async with worker_inside(app, place.dsn):
            [job] = await place.ended(id)
        assert (job["status"], job["error"]) == ("completed", None)
        assert calls == ["good"]


async def test_a_row_beyond_repair_holds_up_nobody(arena: Arena) -> None:
    """Its attempt cannot be counted any further."""
    app = PgQueue()
    ran = asyncio.Event()

    @app.job("broken", at_most_once=True, retry=QUICK)
    async def broken() -> None:
        ran.set()
        raise ValueError("no")

    @app.job("good", at_most_once=True)
    async def good() -> None: ...

    async with arena.place() as place:
        id = await place.add("broken", {})
        await place.conn.execute("UPDATE pgqueue.jobs_live SET attempt = 2147483647 WHERE id = %s", [id])
        async with worker_inside(app, place.dsn):
            await asyncio.wait_for(ran.wait(), 10)
            [job] = await place.ended(await place.add("good", {}))
        assert job["status"] == "completed"


@pytest.mark.parametrize("at_most_once", [False, True])
async def test_connections_that_were_cut_between_jobs_cost_nothing(arena: Arena, at_most_once: bool) -> None:
    """As by a restart of PostgreSQL long ago."""
    app = PgQueue()

    @app.job("t", at_most_once=at_most_once, retry=Retry(max_attempts=1))
    async def handler(ctx: Context) -> None:
        await ctx.step("one", lambda: None)
        async with ctx.transaction() as tx:
            await tx.execute("SELECT 1")

    async with arena.place() as place, worker_inside(app, place.dsn, threads=1):
        await place.ended(await place.add("t", {}, max_attempts=1))
        assert await place.cut_off_handlers() >= 2
        [job] = await place.ended(await place.add("t", {}, max_attempts=1))
        assert (job["status"], job["error"], job["attempt"]) == ("completed", None, 1)


@pytest.mark.parametrize("executor", ["async", "thread"])
async def test_a_commit_that_did_not_happen_is_not_its_word(arena: Arena, executor: str) -> None:
    """The worker stops at the same time: the handler has not said that it ends because of that."""
    app = PgQueue()

    def stop(ctx: Context) -> None:
        # As the worker does, but without the cancellation that would come first.
        ctx._stop = JobAbandoned("the worker stops")

    async def in_loop(ctx: Context) -> None:
        async with ctx.transaction():
            stop(ctx)

    def in_thread(ctx: Context) -> None:
        with ctx.transaction_sync():
            stop(ctx)

    app.job("t", at_most_once=True, retry=QUICK)(in_loop if executor == "async" else in_thread)
    async with arena.place() as place, proxied(place.dsn) as proxy:
        proxy.cut("COMMIT", "before")
        id = await place.add("t", {})
        async with worker_inside(app, place.dsn, handlers_dsn=proxy.dsn()):
            [job] = await place.ended(id)
        assert proxy.cuts == 1
        assert (job["status"], job["reason"]) == ("failed", "in_doubt")


async def test_a_step_that_was_kept_is_not_repeated(arena: Arena) -> None:
    calls: list[str] = []

    async def handler(ctx: Context, key: str) -> list[int]:
        one = await ctx.step("one", lambda: calls.append("one") or 1)
        if ctx.attempt == 1:
            raise ValueError("between the steps")
        two = await ctx.step("two", lambda: calls.append("two") or 2)
        return [one, two]

    async with running(arena, handler) as (place, _, ids):
        assert [job["result"] for job in await place.ended(*ids)] == [[1, 2], [1, 2]]
        # The steps are the job's: a duplicate has none to repeat.
        assert calls == ["one", "two"]
