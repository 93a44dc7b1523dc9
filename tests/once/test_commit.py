"""COMMIT, cut and frozen, cancelled and not serializable: what the handler is told is what has happened."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg.rows import dict_row

from pgqueue import Context, PgQueue, control, rescue
from pgqueue.errors import DatabaseUnavailable
from pgqueue.outcome import JobAbandoned, JobCancelled, Retry
from pgqueue.sql import SQL
from pgqueue.worker import transactions
from pgqueue.worker.runtime import Runtime
from tests.db.queue import MiniWorker
from tests.once.arena import Arena, Place
from tests.once.inside import worker_inside
from tests.once.nursery import Nursery
from tests.once.proxy import Proxy, When, proxied

NO_RETRY = Retry(max_attempts=1)
SEE = "INSERT INTO public.seen VALUES (%s, %s, %s)"
ISOLATIONS = ("read committed", "repeatable read", "serializable")


@dataclass
class Story:
    """What the handler was told at the end of its transaction, call by call, and how the test steers it."""

    told: list[str] = field(default_factory=list)
    in_block: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    waits: bool = False

    def app(self, *, sync: bool = False, once: bool = True, isolation: str | None = None, **options: Any) -> PgQueue:
        app = PgQueue()
        loop = asyncio.get_running_loop()
        decorate = app.job("t", retry=NO_RETRY, once_per=["key"] if once else (), **options)

        async def in_loop(ctx: Context, key: str) -> None:
            self.told.append("began")
            try:
                async with ctx.transaction(isolation) as tx:
                    await tx.execute(SEE, [key, ctx.id, ctx.lease_token])
                    self.in_block.set()
                    if self.waits:
                        await self.go_on.wait()
                    ctx.set_result({"by": ctx.id})
            except BaseException as error:
                self.told[-1] = type(error).__name__
                raise
            self.told[-1] = "committed"

        def in_thread(ctx: Context, key: str) -> None:
            self.told.append("began")
            try:
                with ctx.transaction_sync(isolation) as tx:
                    tx.execute(SEE, [key, ctx.id, ctx.lease_token])
                    loop.call_soon_threadsafe(self.in_block.set)
                    if self.waits:
                        asyncio.run_coroutine_threadsafe(self.go_on.wait(), loop).result()
                    ctx.set_result({"by": ctx.id})
            except BaseException as error:
                self.told[-1] = type(error).__name__
                raise
            self.told[-1] = "committed"

        decorate(in_thread if sync else in_loop)
        return app


async def until(condition: Callable[[], bool], within: float = 10) -> None:
    for _ in range(round(within / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("it did not come to pass")


async def verdict(place: Place, runtime: Runtime, id: int) -> dict[str, Any]:
    [job] = await place.ended(id)
    # The worker's own book-keeping comes a moment later.
    await until(lambda: runtime.finisher.completed + runtime.finisher.lost > 0)
    return {
        "status": job["status"],
        "attempt": job["attempt"],
        "result": job["result"],
        "effects": await place.effects("in_transaction", "k"),
        "history": await place.value("SELECT count(*) FROM pgqueue.attempts"),
        "completed": runtime.finisher.completed,
        "lost": runtime.finisher.lost,
    }


GOOD = {"status": "completed", "attempt": 1, "effects": 1, "history": 0, "completed": 1, "lost": 0}


# Cut


@pytest.mark.parametrize("once", [True, False], ids=["once_per", "plain"])
@pytest.mark.parametrize("sync", [False, True], ids=["async", "thread"])
@pytest.mark.parametrize("when", ["before", "during", "after"])
async def test_a_commit_that_is_cut_is_resolved(arena: Arena, when: When, sync: bool, once: bool) -> None:
    story = Story()
    async with arena.place() as place, proxied(place.dsn) as proxy:
        proxy.cut("COMMIT", when)
        id = await place.add("t", {"key": "k"}, max_attempts=1)
        async with worker_inside(story.app(sync=sync, once=once), place.dsn, handlers_dsn=proxy.dsn()) as runtime:
            assert await verdict(place, runtime, id) == GOOD | {"result": {"by": id}}
        assert proxy.cuts == 1
        if when == "before":
            assert story.told == ["JobAbandoned", "committed"]
        else:
            assert story.told == ["committed"]


@pytest.mark.parametrize("when", ["before", "during", "after"])
async def test_the_end_of_an_outside_effect_is_not_lost_with_a_connection(arena: Arena, when: When) -> None:
    """Here it is the worker itself that commits the job's end and its effect's."""
    calls = []
    app = PgQueue()

    @app.job("t", retry=NO_RETRY, at_most_once=True)
    async def handler(key: str) -> str:
        calls.append(key)
        return "done"

    async with arena.place() as place, proxied(place.dsn) as proxy:
        async with worker_inside(app, place.dsn) as runtime:
            runtime.finisher.link.dsn = proxy.dsn()
            proxy.cut("COMMIT", when)
            id = await place.add("t", {"key": "k"}, max_attempts=1)
            assert await verdict(place, runtime, id) == GOOD | {"result": "done", "effects": 0}
        assert calls == ["k"]
        assert await place.value("SELECT count(*) FROM pgqueue.effects WHERE done_at IS NOT NULL") == 1
        assert proxy.cuts == 1


@pytest.mark.parametrize("when", ["before", "during", "after"])
async def test_an_intent_that_is_cut_leaves_no_doubt(arena: Arena, when: When) -> None:
    """The handler did not run: the job is given back, and what may have been begun is undone."""
    calls = []
    app = PgQueue()

    @app.job("t", retry=NO_RETRY, at_most_once=True)
    async def handler(key: str) -> str:
        calls.append(key)
        return "done"

    async with arena.place() as place, proxied(place.dsn) as proxy:
        proxy.cut(SQL.begin_effect[:60], when)
        id = await place.add("t", {"key": "k"}, max_attempts=1)
        async with worker_inside(app, place.dsn, handlers_dsn=proxy.dsn()) as runtime:
            assert await verdict(place, runtime, id) == GOOD | {"result": "done", "effects": 0}
        assert proxy.cuts == 1
        assert calls == ["k"]


@pytest.mark.parametrize("when", ["before", "during", "after"])
async def test_whoever_enqueues_with_a_key_may_ask_again(arena: Arena, when: When) -> None:
    async with arena.place() as place, proxied(place.dsn) as proxy:
        app = PgQueue(proxy.dsn())
        proxy.cut("SELECT id, inserted FROM pgqueue.add_job", when)
        with pytest.raises(DatabaseUnavailable):
            await app.enqueue("t", {"n": 1}, idempotency_key="k")
        again = await app.enqueue("t", {"n": 1}, idempotency_key="k")
        assert again.inserted == (when == "before")
        assert await place.value("SELECT array_agg(id) FROM pgqueue.jobs") == [again.id]
        await app.close()


# Frozen


@asynccontextmanager
async def frozen(place: Place) -> AsyncIterator[None]:
    """Commits of sessions that wait for standbys wait for one that never comes."""
    await place.conn.execute("ALTER SYSTEM SET synchronous_standby_names = 'ghost'")
    await place.conn.execute("SELECT pg_reload_conf()")
    await a_commit_has_waited(place)
    try:
        yield
    finally:
        await place.conn.execute("ALTER SYSTEM RESET synchronous_standby_names")
        await place.conn.execute("SELECT pg_reload_conf()")
        await shows(place, "")


async def a_commit_has_waited(place: Place) -> None:
    """It is the checkpointer that tells all others whether to wait, when it comes to it."""
    waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND pid = %s"
    async with await psycopg.AsyncConnection.connect(place.dsn, autocommit=True) as probe:
        await probe.execute("SET synchronous_commit = on")
        waited, deadline = False, time.monotonic() + 20
        while not waited:
            assert time.monotonic() < deadline
            commit = asyncio.create_task(probe.execute("SELECT pg_logical_emit_message(true, 'probe', '')"))
            while not commit.done():
                if await place.value(waits, probe.info.backend_pid):
                    waited = True
                    await place.conn.execute("SELECT pg_cancel_backend(%s)", [probe.info.backend_pid])  # only its wait
                await asyncio.sleep(0.01)
            await commit


async def shows(place: Place, wanted: str) -> None:
    deadline = time.monotonic() + 10
    while await place.value("SHOW synchronous_standby_names") != wanted:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def commit_waits(place: Place) -> None:
    await somebody_waits(place, "wait_event = 'SyncRep'")


async def somebody_waits(place: Place, how: str) -> None:
    deadline = time.monotonic() + 20
    while not await place.value(f"SELECT count(*) FROM pg_stat_activity WHERE {how}"):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def frozen_commit(place: Place, proxy: Proxy, story: Story) -> bool:
    """The connection is cut while the server has not decided. Whether the handler was told anything before it did."""
    id = await place.add("t", {"key": "k"}, max_attempts=1)
    await asyncio.wait_for(story.in_block.wait(), 20)
    async with frozen(place):
        proxy.cut("COMMIT", "during")
        story.go_on.set()
        await asyncio.wait_for(proxy.reached.wait(), 10)
        await commit_waits(place)
        # Whoever only looks sees a job that runs.
        assert (await place.job(id))["status"] == "running"
        await asyncio.sleep(0.5)
        return story.told != ["began"]


async def test_a_frozen_commit_is_waited_for(arena: Arena) -> None:
    story = Story(waits=True)
    async with arena.place() as place, proxied(place.dsn) as proxy:
        handlers = proxy.dsn(synchronous_commit="on")
        async with worker_inside(story.app(), place.dsn, handlers_dsn=handlers) as runtime:
            assert not await frozen_commit(place, proxy, story)
            assert await verdict(place, runtime, 1) == GOOD | {"result": {"by": 1}}
            assert story.told == ["committed"]


@pytest.mark.parametrize("how", ["cancelled", "timeout", "stopped", "cancelled and cut"])
async def test_a_cancellation_during_the_commit_changes_nothing(arena: Arena, how: str) -> None:
    story = Story(waits=True)
    async with arena.place() as place, proxied(place.dsn) as proxy:
        app = story.app(timeout=2.5 if how == "timeout" else None)
        handlers = proxy.dsn(synchronous_commit="on")
        async with worker_inside(app, place.dsn, handlers_dsn=handlers) as runtime:
            id = await place.add("t", {"key": "k"}, max_attempts=1)
            await asyncio.wait_for(story.in_block.wait(), 20)
            over = time.monotonic() + 2.5
            async with frozen(place):
                if how == "cancelled and cut":
                    proxy.cut("COMMIT", "during")
                story.go_on.set()
                await commit_waits(place)
                if how.startswith("cancelled"):
                    runtime.running[id].stop(JobCancelled("somebody cancelled the job"))
                elif how == "stopped":
                    runtime.running[id].stop(JobAbandoned("the worker stops"))
                else:
                    await asyncio.sleep(over - time.monotonic())
                await asyncio.sleep(0.3)
                assert story.told == ["began"]
            assert await verdict(place, runtime, id) == GOOD | {"result": {"by": id}}
    # First the truth, then the cancellation.
    assert story.told == ["CancelledError"]


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
async def test_a_worker_that_stops_does_not_wait_for_ever(arena: Arena, nursery: Nursery, cut: bool) -> None:
    """The database decides without it, and whoever comes next finds the truth."""
    async with arena.place() as place, proxied(place.dsn) as proxy:
        handlers = proxy.dsn(synchronous_commit="on")
        worker = nursery.worker(place.dsn, handlers_dsn=handlers, PGQUEUE_SHUTDOWN_GRACE="2", **place.env)
        async with await psycopg.AsyncConnection.connect(place.dsn) as holder, AsyncExitStack() as stack:
            await holder.execute("LOCK TABLE public.seen")
            id = await place.add("in_transaction", {"key": "k"}, max_attempts=1)
            await somebody_waits(place, "wait_event_type = 'Lock' AND query LIKE 'INSERT INTO public.seen%%'")
            await stack.enter_async_context(frozen(place))
            if cut:
                proxy.cut("COMMIT", "during")
            await holder.rollback()
            await commit_waits(place)
            worker.send(signal.SIGTERM)
            assert await worker.ended(15) == 0, worker.told()
            assert (await place.job(id))["status"] == "running"
        next = nursery.worker(place.dsn, **place.env)
        [job] = await place.ended(id)
        assert (job["status"], job["lost"]) == ("completed", 0)
        assert await place.effects("in_transaction", "k") == 1
        next.kill()
        await next.ended()


# Isolation


@pytest.mark.together
@pytest.mark.parametrize("sync", [False, True], ids=["async", "thread"])
@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_what_the_worker_writes_meanwhile_does_not_disturb(arena: Arena, isolation: str, sync: bool) -> None:
    """Heartbeats and progress go on while a handler holds its snapshot."""
    calls = []
    app = PgQueue()
    decorate = app.job("t", retry=NO_RETRY, once_per=["key"])

    async def in_loop(ctx: Context, key: str) -> None:
        calls.append(key)
        ctx.progress(0, 12)
        await asyncio.sleep(0.9)
        async with ctx.transaction(isolation) as tx:
            await tx.execute(SEE, [key, ctx.id, ctx.lease_token])
            for n in range(12):
                ctx.progress(n, 12)
                await asyncio.sleep(0.1)

    def in_thread(ctx: Context, key: str) -> None:
        calls.append(key)
        ctx.progress(0, 12)
        time.sleep(0.9)
        with ctx.transaction_sync(isolation) as tx:
            tx.execute(SEE, [key, ctx.id, ctx.lease_token])
            for n in range(12):
                ctx.progress(n, 12)
                time.sleep(0.1)

    decorate(in_thread if sync else in_loop)
    async with arena.place() as place:
        ids = [await place.add("t", {"key": f"k{n}"}, max_attempts=1) for n in range(4)]
        async with worker_inside(app, place.dsn, heartbeat_interval=0.05):
            jobs = await place.ended(*ids)
            beats = await place.value("SELECT count(*) FROM pgqueue.workers WHERE heartbeat_at > started_at")
        assert [job["status"] for job in jobs] == ["completed"] * 4
        assert sorted(calls) == ["k0", "k1", "k2", "k3"], "somebody made PostgreSQL refuse a transaction"
        assert beats == 1


@pytest.mark.together
async def test_handlers_that_hold_every_connection_do_not_cost_their_leases(arena: Arena) -> None:
    """There is one for each of the four. The heartbeat has its own."""
    calls: list[int] = []
    renewed = asyncio.Event()
    app = PgQueue()

    @app.job("t", retry=NO_RETRY)
    async def handler(ctx: Context, n: int) -> None:
        calls.append(n)
        async with ctx.transaction() as tx:
            await tx.execute(SEE, [str(n), ctx.id, ctx.lease_token])
            await renewed.wait()

    async with arena.place() as place:
        ids = [await place.add("t", {"n": n}) for n in range(4)]
        async with worker_inside(app, place.dsn, lease_timeout=15.0, heartbeat_interval=0.2):
            deadline = time.monotonic() + 20
            # Whoever renews nothing has what it had when it claimed the first of them.
            lease = """
                SELECT count(*) = 4 AND max(w.expires_at) > max(j.started_at) + interval '16 s'
                FROM pgqueue.jobs j JOIN pgqueue.workers w ON w.id = j.worker_id WHERE j.status = 'running'
            """
            while len(calls) < 4 or not await place.value(lease):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            renewed.set()
            jobs = await place.ended(*ids)
        assert sorted(calls) == [0, 1, 2, 3]
        assert [(job["status"], job["lost"]) for job in jobs] == [("completed", 0)] * 4
        assert await place.value("SELECT count(*) FROM public.seen") == 4


async def test_every_slot_has_a_connection_for_its_transaction_and_another_for_a_moment(arena: Arena) -> None:
    app = PgQueue()

    @app.job("t", retry=NO_RETRY)
    async def handler(ctx: Context, n: int) -> None:
        async with ctx.transaction() as tx:
            await tx.execute(SEE, [str(n), ctx.id, ctx.lease_token])
            held.append(n)
            while len(held) < 12:  # noqa: ASYNC110 - whoever has no connection is not among them
                await asyncio.sleep(0.01)
            await ctx.step("one", lambda: 1)

    held: list[int] = []
    async with arena.place() as place:
        ids = [await place.add("t", {"n": n}) for n in range(12)]
        async with worker_inside(app, place.dsn, threads=12):
            jobs = await place.ended(*ids)
        assert [job["status"] for job in jobs] == ["completed"] * 12
        assert sorted(held) == list(range(12))


@pytest.mark.parametrize("sync", [False, True])
async def test_without_a_connection_for_its_transaction_a_job_is_put_off_uncharged(arena: Arena, sync: bool) -> None:
    app = PgQueue()

    def handler(ctx: Context, n: int) -> None:
        with ctx.transaction_sync() as tx:
            tx.execute(SEE, [str(n), ctx.id, ctx.lease_token])

    async def async_handler(ctx: Context, n: int) -> None:
        async with ctx.transaction() as tx:
            await tx.execute(SEE, [str(n), ctx.id, ctx.lease_token])

    app.job("t", retry=NO_RETRY)(handler if sync else async_handler)
    async with arena.place() as place:
        role = f"crowded_{place.dsn.rpartition('/')[2]}"
        await place.conn.execute(
            f"CREATE ROLE {role} LOGIN PASSWORD 'x' CONNECTION LIMIT 0 IN ROLE pgqueue_worker;"
            f"GRANT ALL ON public.seen TO {role}".encode()
        )
        parts = urlsplit(place.dsn)
        crowded = parts._replace(netloc=f"{role}:x@{parts.hostname}:{parts.port}").geturl()
        id = await place.add("t", {"n": 1})
        async with worker_inside(app, place.dsn, handlers_dsn=crowded):
            for _ in range(1000):
                if (await place.job(id))["status"] == "scheduled":
                    break
                await asyncio.sleep(0.01)
            await place.conn.execute(f"ALTER ROLE {role} CONNECTION LIMIT -1".encode())
            [job] = await place.ended(id)
        assert (job["status"], job["attempt"], job["lost"]) == ("completed", 1, 0)
        assert await place.value("SELECT count(*) FROM pgqueue.attempts") == 0
        await place.conn.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
async def test_handlers_that_share_nothing_do_not_meet_in_our_tables(arena: Arena, isolation: str) -> None:
    calls: list[int] = []
    app = PgQueue()

    @app.job("t", retry=NO_RETRY, once_per=["n"])
    async def handler(ctx: Context, n: int) -> None:
        calls.append(n)
        async with ctx.transaction(isolation) as tx:
            # A row in a table without an index, which nobody reads: they cannot meet there.
            await tx.execute(SEE, [str(n), ctx.id, ctx.lease_token])
            await asyncio.sleep(0.02)

    async with arena.place() as place:
        ids = [await place.add("t", {"n": n}) for n in range(100)]
        async with worker_inside(app, place.dsn):
            await place.ended(*ids)
        assert sorted(calls) == list(range(100))


async def test_what_cannot_be_serialized_is_tried_again_in_place_and_uncharged(arena: Arena) -> None:
    story: list[str] = []
    app = PgQueue()

    async with arena.place() as place:
        await place.conn.execute("CREATE TABLE public.accounts (id int PRIMARY KEY, balance int NOT NULL)")
        await place.conn.execute("INSERT INTO public.accounts VALUES (1, 0)")

        @app.job("t", retry=NO_RETRY, once_per=["key"])
        async def handler(ctx: Context, key: str) -> None:
            story.append("began")
            async with ctx.transaction("repeatable read") as tx:
                await tx.execute("SELECT balance FROM public.accounts")
                if len(story) < 3:
                    await place.conn.execute("UPDATE public.accounts SET balance = balance + 100")
                await tx.execute("UPDATE public.accounts SET balance = balance + 1")
                await tx.execute(SEE, [key, ctx.id, ctx.lease_token])

        id = await place.add("t", {"key": "k"}, max_attempts=1)
        async with worker_inside(app, place.dsn) as runtime:
            assert await verdict(place, runtime, id) == GOOD | {"result": None}
        assert len(story) == 3
        assert await place.value("SELECT balance FROM public.accounts") == 201


async def test_a_commit_that_cannot_be_serialized_as_well(arena: Arena) -> None:
    """Two that each read what the other writes: PostgreSQL finds out at COMMIT, or just before."""
    calls: list[str] = []
    both = asyncio.Barrier(2)
    app = PgQueue()

    @app.job("t", retry=NO_RETRY)
    async def handler(ctx: Context, key: str) -> None:
        calls.append(key)
        async with ctx.transaction("serializable") as tx:
            await tx.execute("SELECT count(*) FROM public.seen")
            if len(calls) <= 2:
                await both.wait()
            await tx.execute(SEE, [key, ctx.id, ctx.lease_token])
            if len(calls) <= 2:
                await both.wait()

    async with arena.place() as place:
        ids = [await place.add("t", {"key": key}, max_attempts=1) for key in ("a", "b")]
        async with worker_inside(app, place.dsn):
            jobs = await place.ended(*ids)
        assert [(job["status"], job["attempt"]) for job in jobs] == [("completed", 1)] * 2
        assert len(calls) == 3
        assert await place.effects("in_transaction", "a") == await place.effects("in_transaction", "b") == 1
        assert await place.value("SELECT count(*) FROM pgqueue.attempts") == 0


async def test_what_never_can_is_charged_in_the_end(arena: Arena) -> None:
    calls = []
    app = PgQueue()

    async with arena.place() as place:
        await place.conn.execute("CREATE TABLE public.accounts (id int PRIMARY KEY, balance int NOT NULL)")
        await place.conn.execute("INSERT INTO public.accounts VALUES (1, 0)")

        @app.job("t", retry=NO_RETRY)
        async def handler(ctx: Context) -> None:
            calls.append(1)
            async with ctx.transaction("repeatable read") as tx:
                await tx.execute("SELECT balance FROM public.accounts")
                await place.conn.execute("UPDATE public.accounts SET balance = balance + 100")
                await tx.execute("UPDATE public.accounts SET balance = balance + 1")

        id = await place.add("t", {}, max_attempts=1)
        async with worker_inside(app, place.dsn):
            [job] = await place.ended(id)
        assert (job["status"], job["attempt"], len(calls)) == ("failed", 1, 4)
        assert "SerializationFailure" in job["error_type"]


async def test_what_happens_at_most_once_is_not_tried_again_in_place(arena: Arena) -> None:
    """An error of the database says nothing of what the handler did outside."""
    calls = []
    app = PgQueue()

    @app.job("t", retry=Retry(max_attempts=2, base=0.01, jitter=0), at_most_once=True)
    async def handler(ctx: Context) -> None:
        calls.append(ctx.attempt)
        raise psycopg.errors.SerializationFailure("as ordered")

    async with arena.place() as place:
        id = await place.add("t", {}, max_attempts=2)
        async with worker_inside(app, place.dsn):
            [job] = await place.ended(id)
        assert (job["status"], job["reason"], calls) == ("failed", "in_doubt", [1])


# Lost leases, children, and other languages


async def steal(place: Place, id: int) -> MiniWorker:
    """The worker is taken for dead, and somebody else has the job."""
    thief = await MiniWorker(place.conn).register()
    deadline = time.monotonic() + 20
    while True:
        # Its next heartbeat would bring it back to life.
        await place.declare_dead(but=thief.who.worker_id)
        await rescue.rescue(place.conn)
        if any(job.id == id for job in await thief.claim()):
            return thief
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def zombie(place: Place, runtime: Runtime, story: Story) -> dict[str, Any]:
    """A worker that was taken for dead ends its transaction all the same. Named in test_mutants.py."""
    id = await place.add("t", {"key": "k"}, max_attempts=1)
    await asyncio.wait_for(story.in_block.wait(), 20)
    lease = runtime.running[id].ctx.lease_token
    # It must not claim the job back.
    runtime.who.types = ["another"]
    thief = await steal(place, id)
    story.go_on.set()
    await until(lambda: id not in runtime.running)
    job = await place.job(id)
    return {
        "told": story.told,
        "status": job["status"],
        "effects": await place.effects("in_transaction", "k"),
        "children": await place.value("SELECT count(*) FROM pgqueue.jobs WHERE type = 'child'"),
        "the thief's": str(job["lease_token"]) == thief.tokens[id] != lease,
    }


FENCED = {"told": ["LeaseLost"], "status": "running", "effects": 0, "children": 0, "the thief's": True}


@pytest.mark.parametrize("sync", [False, True], ids=["async", "thread"])
@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_a_lost_lease_takes_everything_back(arena: Arena, isolation: str, sync: bool) -> None:
    story = Story(waits=True)
    app = story.app(sync=sync, isolation=isolation)
    async with arena.place() as place, worker_inside(app, place.dsn) as runtime:
        found = await zombie(place, runtime, story)
    if isolation != "read committed":
        # The row has changed under its snapshot: it is told to try again, and only then that the lease is lost.
        assert found["told"].pop(0) == "SerializationFailure"
    assert found == FENCED


@pytest.mark.parametrize("fails", [False, True], ids=["commits", "fails"])
@pytest.mark.parametrize("sync", [False, True], ids=["async", "thread"])
async def test_children_come_with_the_transaction_or_not_at_all(arena: Arena, sync: bool, fails: bool) -> None:
    app = PgQueue()

    @app.job("child", queue="children")
    async def child(n: int) -> None: ...

    decorate = app.job("t", retry=NO_RETRY)

    async def in_loop(ctx: Context) -> None:
        async with ctx.transaction() as tx:
            await child.using(conn=tx).enqueue(1)
            await child.using(conn=tx).enqueue_many([{"n": 2}, {"n": 3}])
            if fails:
                raise ValueError("too late")

    def in_thread(ctx: Context) -> None:
        with ctx.transaction_sync() as tx:
            child.using(conn=tx).enqueue_sync(1)
            child.using(conn=tx).enqueue_many_sync([{"n": 2}, {"n": 3}])
            if fails:
                raise ValueError("too late")

    decorate(in_thread if sync else in_loop)
    async with arena.place() as place:
        id = await place.add("t", {}, max_attempts=1)
        async with worker_inside(app, place.dsn):
            [job] = await place.ended(id)
        assert job["status"] == ("failed" if fails else "completed")
        children = await place.value("SELECT count(*) FROM pgqueue.jobs WHERE type = 'child'")
        assert children == (0 if fails else 3)


async def test_an_effect_that_another_job_has_taken_over_is_rolled_back(arena: Arena) -> None:
    story = Story(waits=True)
    async with arena.place() as place, worker_inside(story.app(), place.dsn) as runtime:
        id = await place.add("t", {"key": "k"}, max_attempts=1)
        await asyncio.wait_for(story.in_block.wait(), 20)
        await place.conn.execute("UPDATE pgqueue.effects SET job_id = 4711")
        story.go_on.set()
        await until(lambda: story.told != ["began"])
        assert story.told[0] == "LeaseLost"
        assert await place.effects("in_transaction", "k") == 0 or story.told[1:] == ["committed"]
        await place.conn.execute("UPDATE pgqueue.effects SET job_id = %s WHERE done_at IS NULL", [id])
        await verdict(place, runtime, id)
        assert await place.effects("in_transaction", "k") == 1


async def test_in_plain_sql_the_lease_is_asserted(arena: Arena) -> None:
    """Any language: its effect, and the lease asserted in the same transaction."""
    async with arena.place() as place:
        id = await place.add("t", {})
        owner = await MiniWorker(place.conn).register()
        await owner.claim()
        async with await psycopg.AsyncConnection.connect(place.dsn) as conn:
            await conn.execute(SEE, ["k", id, None])
            await conn.execute("SELECT pgqueue.assert_lease(%s, %s)", [id, owner.tokens[id]])
            # From here to the end nobody can take the job.
            stealing = asyncio.create_task(steal(place, id))
            await asyncio.sleep(0.3)
            assert not stealing.done()
            await conn.commit()
            thief = await stealing
            # Now somebody has: the first owner's next transaction comes to nothing.
            await conn.execute(SEE, ["again", id, None])
            with pytest.raises(psycopg.Error, match="the lease on job 1 is lost") as error:
                await conn.execute("SELECT pgqueue.assert_lease(%s, %s)", [id, owner.tokens[id]])
            assert error.value.sqlstate == "PQ001"
            await conn.rollback()
            await conn.execute("SELECT pgqueue.assert_lease(%s, %s)", [id, thief.tokens[id]])
        assert await place.rows("SELECT key FROM public.seen") == [{"key": "k"}]


# What else a handler may do in its transaction


async def test_after_the_commit_nothing_can_fail_the_job(arena: Arena) -> None:
    app = PgQueue()
    calls = []

    @app.job("t", retry=Retry(max_attempts=3, base=0.01, jitter=0))
    async def handler(ctx: Context, how: str) -> None:
        calls.append(how)
        async with ctx.transaction():
            pass
        if how == "error":
            raise ValueError("too late")
        if how == "again":
            async with ctx.transaction() as tx:
                await tx.execute(SEE, ["twice", ctx.id, None])

    async with arena.place() as place:
        ids = [await place.add("t", {"how": how}) for how in ("error", "again")]
        async with worker_inside(app, place.dsn) as runtime:
            jobs = await place.ended(*ids)
            await until(lambda: runtime.finisher.completed == 2)
            assert runtime.finisher.lost == 0
        assert [job["status"] for job in jobs] == ["completed"] * 2
        assert sorted(calls) == ["again", "error"]
        assert await place.value("SELECT count(*) FROM public.seen") == 0


@pytest.mark.parametrize("sync", [False, True], ids=["async", "thread"])
@pytest.mark.parametrize("how", ["nested", "second"])
async def test_there_is_one_transaction(arena: Arena, how: str, sync: bool) -> None:
    app = PgQueue()

    async def write(ctx: Context) -> None:
        with pytest.raises(RuntimeError, match="there can be only one: write everything in it"):
            async with ctx.transaction() as tx:
                await tx.execute(SEE, ["more", ctx.id, None])

    def write_sync(ctx: Context) -> None:
        with (
            pytest.raises(RuntimeError, match="there can be only one: write everything in it"),
            ctx.transaction_sync() as tx,
        ):
            tx.execute(SEE, ["more", ctx.id, None])

    async def in_loop(ctx: Context) -> None:
        async with ctx.transaction() as tx:
            await tx.execute(SEE, ["k", ctx.id, None])
            if how == "nested":
                await write(ctx)
        if how == "second":
            await write(ctx)
            told.append("refused")

    def in_thread(ctx: Context) -> None:
        with ctx.transaction_sync() as tx:
            tx.execute(SEE, ["k", ctx.id, None])
            if how == "nested":
                write_sync(ctx)
        if how == "second":
            write_sync(ctx)
            told.append("refused")

    told: list[str] = []
    app.job("t", retry=NO_RETRY)(in_thread if sync else in_loop)
    async with arena.place() as place:
        id = await place.add("t", {}, max_attempts=1)
        async with worker_inside(app, place.dsn) as runtime:
            [job] = await place.ended(id)
            await until(lambda: runtime.finisher.completed == 1)
        assert (job["status"], job["error"]) == ("completed", None)
        assert told == (["refused"] if how == "second" else [])
        assert await place.value("SELECT array_agg(key) FROM public.seen") == ["k"]


@pytest.mark.parametrize("sync", [False, True], ids=["async", "thread"])
@pytest.mark.parametrize("end", ["commit", "rollback"])
async def test_a_handler_does_not_end_its_transaction(arena: Arena, end: str, sync: bool) -> None:
    app = PgQueue()

    async def in_loop(ctx: Context) -> None:
        async with ctx.transaction() as tx:
            await tx.execute(SEE, ["k", ctx.id, None])
            with pytest.raises(psycopg.ProgrammingError, match="leave COMMIT and ROLLBACK to it"):
                await getattr(tx, end)()
            async with tx.transaction():
                await tx.execute(SEE, ["k", ctx.id, None])

    def in_thread(ctx: Context) -> None:
        with ctx.transaction_sync() as tx:
            tx.execute(SEE, ["k", ctx.id, None])
            with pytest.raises(psycopg.ProgrammingError, match="leave COMMIT and ROLLBACK to it"):
                getattr(tx, end)()
            with tx.transaction():
                tx.execute(SEE, ["k", ctx.id, None])

    app.job("t", retry=NO_RETRY)(in_thread if sync else in_loop)
    async with arena.place() as place:
        id = await place.add("t", {}, max_attempts=1)
        async with worker_inside(app, place.dsn):
            [job] = await place.ended(id)
        assert (job["status"], job["error"]) == ("completed", None)
        assert await place.effects("in_transaction", "k") == 2


@pytest.mark.parametrize("sync", [False, True], ids=["async", "thread"])
@pytest.mark.parametrize("fails", [False, True], ids=["returns", "fails"])
@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK", "COMMIT AND CHAIN", "COMMIT; BEGIN"])
async def test_one_that_does_so_by_sql_writes_once(arena: Arena, end: str, fails: bool, sync: bool) -> None:
    app = PgQueue()

    async def in_loop(ctx: Context) -> None:
        async with ctx.transaction() as tx:
            await tx.execute(SEE, ["k", ctx.id, None])
            await tx.execute(end.encode())
            if fails:
                raise ValueError("after it")

    def in_thread(ctx: Context) -> None:
        with ctx.transaction_sync() as tx:
            tx.execute(SEE, ["k", ctx.id, None])
            tx.execute(end.encode())
            if fails:
                raise ValueError("after it")

    app.job("t", retry=Retry(max_attempts=3, base=0.01, jitter=0))(in_thread if sync else in_loop)
    async with arena.place() as place:
        id = await place.add("t", {}, max_attempts=3)
        async with worker_inside(app, place.dsn):
            [job] = await place.ended(id)
        assert (job["status"], job["reason"], job["attempt"]) == ("failed", "gave_up", 1)
        assert "leave COMMIT and ROLLBACK to it" in job["error"]
        assert await place.effects("in_transaction", "k") == end.startswith("COMMIT")


@pytest.mark.parametrize("once", [True, False], ids=["once_per", "plain"])
@pytest.mark.parametrize("how", ["timeout", "cancel", "shutdown"])
@pytest.mark.parametrize("end", ["COMMIT", "COMMIT AND CHAIN"])
async def test_one_that_is_cut_off_after_it_did_so_writes_once(arena: Arena, end: str, how: str, once: bool) -> None:
    app = PgQueue()
    committed = asyncio.Event()
    quick = Retry(max_attempts=3, base=0.01, jitter=0)

    @app.job("t", retry=quick, once_per=["key"] if once else (), timeout=2 if how == "timeout" else None)
    async def handler(ctx: Context, key: str) -> None:
        async with ctx.transaction() as tx:
            await tx.execute(SEE, [key, ctx.id, None])
            await tx.execute(end.encode())
            committed.set()
            await asyncio.sleep(60)

    async with arena.place() as place:
        id = await place.add("t", {"key": "k"}, max_attempts=3)
        async with worker_inside(app, place.dsn):
            await asyncio.wait_for(committed.wait(), 20)
            if how == "cancel":
                await control.cancel_job(place.conn, id)
            if how != "shutdown":
                await place.ended(id)
        job = await place.job(id)
        reason = "in_doubt" if once else "cancelled" if how == "cancel" else "gave_up"
        assert job["reason"] == reason
        assert "leave COMMIT and ROLLBACK to it" in job["error"]
        assert await place.effects("in_transaction", "k") == 1


@pytest.mark.parametrize("sync", [False, True], ids=["async", "thread"])
async def test_nor_does_another_job_write_what_it_may_have_written(arena: Arena, sync: bool) -> None:
    app = PgQueue()

    async def in_loop(ctx: Context, key: str) -> None:
        async with ctx.transaction() as tx:
            await tx.execute(SEE, [key, ctx.id, None])
            await tx.execute("COMMIT")

    def in_thread(ctx: Context, key: str) -> None:
        with ctx.transaction_sync() as tx:
            tx.execute(SEE, [key, ctx.id, None])
            tx.execute("COMMIT")

    app.job("t", retry=NO_RETRY, once_per=["key"], at_most_once=True)(in_thread if sync else in_loop)
    async with arena.place() as place, worker_inside(app, place.dsn):
        [job] = await place.ended(await place.add("t", {"key": "k"}, max_attempts=1))
        assert (job["status"], job["reason"]) == ("failed", "in_doubt")
        twin = await place.add("t", {"key": "k"}, max_attempts=1)
        async with asyncio.timeout(20):
            while (status := (await place.job(twin))["status"]) in ("pending", "running"):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert await place.effects("in_transaction", "k") == 1
        assert status == "scheduled", "it is put off until somebody has decided"


@pytest.mark.parametrize("sync", [False, True], ids=["async", "thread"])
async def test_a_commit_that_was_a_rollback_completes_nothing(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, sync: bool
) -> None:
    """A statement of a task that the handler left behind fails between the completion and COMMIT."""
    told: list[str] = []
    app = PgQueue()
    complete, complete_sync = transactions.complete, transactions.complete_sync

    async def disturbed(conn: Any, ctx: Context) -> None:
        await complete(conn, ctx)
        if ctx.attempt == 1:
            with suppress(psycopg.Error):
                await conn.execute("SELECT 1/0")

    def disturbed_sync(conn: Any, ctx: Context) -> None:
        complete_sync(conn, ctx)
        if ctx.attempt == 1:
            with suppress(psycopg.Error):
                conn.execute("SELECT 1/0")

    async def in_loop(ctx: Context) -> None:
        async with ctx.transaction() as tx:
            await tx.execute(SEE, ["k", ctx.id, None])
        told.append("committed")

    def in_thread(ctx: Context) -> None:
        with ctx.transaction_sync() as tx:
            tx.execute(SEE, ["k", ctx.id, None])
        told.append("committed")

    monkeypatch.setattr(transactions, "complete", disturbed)
    monkeypatch.setattr(transactions, "complete_sync", disturbed_sync)
    app.job("t", retry=Retry(max_attempts=2, base=0.01, jitter=0))(in_thread if sync else in_loop)
    async with arena.place() as place:
        id = await place.add("t", {}, max_attempts=2)
        async with worker_inside(app, place.dsn) as runtime:
            [job] = await place.ended(id)
            await until(lambda: runtime.finisher.completed == 1)
        assert (job["status"], job["attempt"]) == ("completed", 2)
        assert told == ["committed"]
        assert await place.effects("in_transaction", "k") == 1
        assert "it was rolled back" in await place.value("SELECT error FROM pgqueue.attempts")


async def test_what_one_handler_does_to_its_connection_is_not_for_the_next(arena: Arena) -> None:
    app = PgQueue()
    query = """
        SELECT pg_backend_pid(), current_setting('statement_timeout'),
               (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711 AND pid = pg_backend_pid())
    """

    @app.job("t", retry=NO_RETRY)
    async def handler(ctx: Context) -> None:
        async with ctx.transaction() as tx:
            ctx.set_result(await (await tx.execute(query)).fetchone())
            tx.row_factory = dict_row
            await tx.execute("SET statement_timeout = '77 s'")
            await tx.execute("SELECT pg_advisory_lock(4711)")

    async with arena.place() as place, worker_inside(app, place.dsn, threads=1):
        [first] = await place.ended(await place.add("t", {}, max_attempts=1))
        [second] = await place.ended(await place.add("t", {}, max_attempts=1))
        assert second["result"] == first["result"] == [first["result"][0], "0", 0]


async def test_an_isolation_that_does_not_exist_is_refused(arena: Arena) -> None:
    app = PgQueue()

    @app.job("t", retry=NO_RETRY)
    async def handler(ctx: Context) -> None:
        async with ctx.transaction("snapshot"):
            pass

    async with arena.place() as place:
        id = await place.add("t", {}, max_attempts=1)
        async with worker_inside(app, place.dsn):
            [job] = await place.ended(id)
        assert "isolation must be one of read committed, repeatable read, serializable" in job["error"]


async def test_a_lease_is_what_counts_not_the_worker(arena: Arena) -> None:
    """Until somebody else has it, a worker that was late may still end its job."""
    story = Story(waits=True)
    async with arena.place() as place:
        async with worker_inside(story.app(), place.dsn, rescue_interval=600) as runtime:
            id = await place.add("t", {"key": "k"}, max_attempts=1)
            await asyncio.wait_for(story.in_block.wait(), 20)
            await until(lambda: runtime.janitor._next_fold > 0)  # which comes after its first rescue
            await place.declare_dead()
            story.go_on.set()
            assert await verdict(place, runtime, id) == GOOD | {"result": {"by": id}}
        assert story.told == ["committed"]
