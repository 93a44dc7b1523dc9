"""What a worker gives back, because it waits in vain; its chores, when something is in their way; its supervisor."""

import asyncio
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from pgqueue import Context, PgQueue, control, finish, idempotency, prune, workers
from pgqueue.claim import Claimed
from pgqueue.finish import Completed
from pgqueue.idempotency import Effect, begin_effect
from pgqueue.job import Lease, NewJob
from pgqueue.settings import Settings
from pgqueue.worker import host, janitor
from pgqueue.worker.finisher import LOOK_EVERY, LOOK_SOON, Finisher, batch
from pgqueue.worker.link import Link
from pgqueue.worker.runtime import STALE_AFTER, Runtime
from pgqueue.worker.supervisor import NEVER, ORDERLY, Member, _keep_running
from tests.db.queue import MiniWorker, add, statuses, value
from tests.once.inside import worker_inside

on_18 = pytest.mark.parametrize("server", ["pg18"], indirect=True)


async def until(happens: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not happens():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_job_that_has_just_come_is_not_given_back() -> None:
    """However long the worker has been idle: its runners have had no time to take it."""
    runtime = Runtime(PgQueue("postgresql://nowhere"), "postgresql://nowhere", Settings(), threads=1)
    runtime._assemble()
    runtime.slots.moved = time.monotonic() - 60
    house = asyncio.create_task(runtime._keep_house())
    await asyncio.sleep(STALE_AFTER / 4)
    offered = time.monotonic()
    runtime.slots.offer([Claimed(1, "default", "t", "{}", 0, 1, 1, None, 5, 0, 0, None, 0.0, False)], "token")
    await until(lambda: not len(runtime.slots))  # now somebody else may have it
    assert time.monotonic() - offered > STALE_AFTER
    assert [outcome.id for outcome, _, _ in runtime.finisher.outcomes] == [1]
    house.cancel()
    await asyncio.wait([house])


async def test_one_suspect_that_waits_for_another_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may run elsewhere; and the slots that it cannot have are for others."""
    monkeypatch.setattr("pgqueue.worker.runtime.STALE_AFTER", 0.1)
    runtime = Runtime(PgQueue("postgresql://nowhere"), "postgresql://nowhere", Settings(), threads=2)
    runtime._assemble()
    for id in (1, 2):
        runtime.slots.offer([Claimed(id, "default", "t", "{}", 0, 1, 1, None, 5, 0, 2, None, 0.0, False)], "token")
    assert runtime.slots.take() is not None
    assert runtime.claimer._wanted() == 0
    house = asyncio.create_task(runtime._keep_house())
    async with asyncio.timeout(20):
        await runtime.claimer._room.wait()
    assert [outcome.id for outcome, _, _ in runtime.finisher.outcomes] == [2]
    house.cancel()
    await asyncio.wait([house])


@on_18
async def test_a_suspect_begins_when_the_last_one_is_written(
    conn: psycopg.AsyncConnection, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the last one would be charged, too, if this one killed the worker."""
    app, seen = PgQueue(), []
    write = Finisher._send

    async def slowly(self: Finisher, *arguments: Any) -> None:
        await asyncio.sleep(0.5)
        await write(self, *arguments)

    monkeypatch.setattr(Finisher, "_send", slowly)

    @app.job("suspect")
    async def suspect(ctx: Context) -> None:
        seen.append(await value(conn, "SELECT count(*) FROM pgqueue.jobs_live WHERE threads_used IS NOT NULL"))

    await add(conn, *[NewJob(type="suspect")] * 2)
    await conn.execute("UPDATE pgqueue.jobs_live SET lost = 2")
    async with worker_inside(app, dsn, threads=2), asyncio.timeout(20):
        while await statuses(conn) != {"completed": 2}:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert seen == [1, 1]


def test_a_worker_that_a_handler_ended_is_started_again() -> None:
    """Any handler can end its process with 0, which is not the word of a worker that was told to end."""
    for code, restarts in ((0, True), (ORDERLY, False)):
        member = Member("w-1", [sys.executable, "-c", f"raise SystemExit({code})"])
        _keep_running(member)
        assert member.process is not None
        member.process.wait()
        _keep_running(member)
        assert (member.restart_at < NEVER) == restarts


def test_a_worker_that_cannot_be_started_is_tried_again() -> None:
    member = Member("w-1", ["/no/such/program"])
    _keep_running(member)
    assert (member.process, member.pause) == (None, 0.5)
    member.command, member.restart_at = ["true"], 0.0
    _keep_running(member)
    assert member.process is not None
    member.process.wait()


def test_large_results_are_written_a_few_at_a_time() -> None:
    def entries(*sizes: int) -> list[Any]:
        return [(Completed(1, "token", 0, 0, 1, "x" * size), None, None) for size in sizes]

    assert batch(entries(*[1 << 20] * 6)) == 4
    assert batch(entries(5 << 20, 1)) == 1
    assert batch([(Lease(1, "token"), None, None), *entries(1, 2)]) >= 3


@on_18
async def test_a_due_job_whose_row_somebody_holds_is_not_asked_for_all_the_time(
    conn: psycopg.AsyncConnection, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks, tick = [], workers.tick

    async def counted(*args: object) -> workers.Tick:
        ticks.append(time.monotonic())
        return await tick(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(workers, "tick", counted)
    app = PgQueue()
    ran = asyncio.Event()

    @app.job("held")
    async def held(ctx: Context) -> None:
        ran.set()

    await conn.execute("INSERT INTO pgqueue.jobs (type, run_at) VALUES ('held', now() + interval '0.5 s')")
    async with await psycopg.AsyncConnection.connect(dsn) as editor:
        await editor.execute("SELECT FROM pgqueue.jobs_live FOR UPDATE")
        async with worker_inside(app, dsn, poll_interval=1.0, rescue_interval=5.0):
            await asyncio.sleep(4)
            while_held = len(ticks)
            assert not ran.is_set()
            await editor.rollback()
            await asyncio.wait_for(ran.wait(), 20)
    assert while_held < 40


@on_18
async def test_a_chore_that_fails_keeps_no_other_from_its_turn(
    conn: psycopg.AsyncConnection, dsn: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pruned = asyncio.Event()
    real = prune.prune

    async def seen(*args: object) -> int:
        pruned.set()
        return await real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(prune, "prune", seen)
    monkeypatch.setattr(janitor, "FOLD_EVERY", 0.5)
    # It has no right to what it needs.
    await conn.execute("ALTER FUNCTION pgqueue.fold(boolean) SECURITY INVOKER SET role = pg_monitor")
    async with worker_inside(PgQueue(), dsn):
        await asyncio.wait_for(pruned.wait(), 20)
        await asyncio.sleep(3)
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [getattr(record, "event", None) for record in told] == ["chore.failed"], "once, and no outage"
    assert "permission denied" in told[0].getMessage()
    assert told[0].getMessage().endswith("figures stand still")


@on_18
async def test_a_chore_whose_function_is_gone_is_no_other_schema(
    conn: psycopg.AsyncConnection, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    await conn.execute("ALTER FUNCTION pgqueue.fold(boolean) RENAME TO gone")
    async with worker_inside(PgQueue(), dsn):
        await until(lambda: any(record.levelno >= logging.WARNING for record in caplog.records))
        await asyncio.sleep(1)
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [getattr(record, "event", None) for record in told] == ["chore.failed"]


TODAY = "SELECT to_char(now() AT TIME ZONE 'UTC', 'YYYYMMDD')"


@pytest.fixture
def no_chores(monkeypatch: pytest.MonkeyPatch) -> None:
    async def none_today(*args: object) -> None:
        pass

    monkeypatch.setattr(janitor.Janitor, "_chores", none_today)


async def until_it_is(conn: psycopg.AsyncConnection, condition: str) -> None:
    async with asyncio.timeout(20):
        while not await value(conn, f"SELECT {condition}"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_jobs_that_end_while_the_partition_of_their_day_is_made_are_completed(
    conn: psycopg.AsyncConnection, dsn: str, no_chores: None
) -> None:
    app = PgQueue()

    @app.job("plain")
    async def plain(ctx: Context) -> int:
        return 1

    @app.job("settle")
    async def settle(ctx: Context) -> None:
        async with ctx.transaction():
            pass

    @app.job("mail", at_most_once=True)
    async def mail(ctx: Context) -> None:
        pass

    leaf = f"pgqueue.jobs_finished_{await value(conn, TODAY)}"
    waits = "FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query ~ 'complete_jobs'"
    async with worker_inside(app, dsn):
        await until_it_is(conn, "EXISTS (SELECT FROM pgqueue.workers)")
        for type in app.types:
            await conn.execute(f"DROP TABLE {leaf}")
            async with await psycopg.AsyncConnection.connect(dsn) as janitor:
                await janitor.execute("SELECT pgqueue.make_partitions()")
                await conn.execute("INSERT INTO pgqueue.jobs (type) VALUES (%s)", [type])
                await until_it_is(conn, f"EXISTS (SELECT {waits})")
                await janitor.commit()
            await until_it_is(conn, "NOT EXISTS (SELECT FROM pgqueue.jobs_live)")
            done = "SELECT array_agg(status::text) FROM pgqueue.jobs WHERE type = %s"
            assert await value(conn, done, type) == ["completed"], type
    assert await value(conn, "SELECT count(*) FROM pgqueue.attempts") == 0


@on_18
async def test_there_are_partitions_before_the_first_claim(
    conn: psycopg.AsyncConnection, dsn: str, no_chores: None
) -> None:
    app = PgQueue()
    ran = asyncio.Event()

    @app.job("t")
    async def t(ctx: Context) -> None:
        ran.set()

    leaf = f"pgqueue.jobs_finished_{await value(conn, TODAY)}"
    await conn.execute(f"DROP TABLE {leaf}")
    await conn.execute("INSERT INTO pgqueue.jobs (type) VALUES ('t')")
    async with worker_inside(app, dsn):
        await asyncio.wait_for(ran.wait(), 20)
        assert await value(conn, "SELECT to_regclass(%s) IS NOT NULL", leaf)


@on_18
async def test_who_forgets_to_commit_a_cancellation_stops_no_other_job(
    conn: psycopg.AsyncConnection, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = PgQueue()
    go = asyncio.Event()

    @app.job("long")
    async def long(ctx: Context) -> None:
        await go.wait()

    @app.job("short")
    async def short(ctx: Context) -> None:
        pass

    [[id]] = await (await conn.execute("INSERT INTO pgqueue.jobs (type) VALUES ('long') RETURNING id")).fetchall()
    async with worker_inside(app, dsn, rescue_interval=5.0) as runtime:
        await until(lambda: id in runtime.running)
        async with await psycopg.AsyncConnection.connect(dsn) as operator:
            await operator.execute("SELECT pgqueue.cancel_job(%s, 'lunch first')", [id])
            go.set()
            await until(lambda: id in runtime.finisher.ids())
            await conn.execute("INSERT INTO pgqueue.jobs (type) SELECT 'short' FROM generate_series(1, 20)")
            await until(lambda: runtime.finisher.completed == 20)
            await until(lambda: runtime.finisher.held != [] and len(runtime.finisher) == 1)
            await runtime.janitor.reconcile(conn, 0)
            assert await statuses(conn) == {"running": 1, "completed": 20}, "what is kept is not given back"
            pid = operator.info.backend_pid
            await asyncio.sleep(LOOK_EVERY * 2.5)
            await operator.commit()
        await until(lambda: runtime.finisher.completed == 21)
        assert runtime.finisher.lost == 0
    told = [record.getMessage() for record in caplog.records if getattr(record, "event", "") == "job.held"]
    assert len(told) == 1
    assert f"jobs {id} " in told[0]
    assert f"pg_terminate_backend({pid})" in told[0]


@on_18
@pytest.mark.parametrize("together", [True, False])
async def test_whatever_the_outcomes_of_held_jobs_are_they_are_written_when_their_rows_are_free(
    conn: psycopg.AsyncConnection, dsn: str, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    kinds = {
        "completed": lambda *ended: finish.Completed(*ended, "1"),
        "unstorable": lambda *ended: finish.Completed(*ended, '"\\u0000"'),
        "failed": lambda *ended: finish.Failed(*ended, None, "error", "E", "no"),
        "retried": lambda *ended: finish.Failed(*ended, 60.0, "error", "E", "no"),
        "stopped": lambda *ended: finish.Failed(*ended, 60.0, "error", "E", "no"),
        "cancelled": lambda *ended: finish.Cancelled(*ended),
        "snoozed": lambda id, token, *_: finish.Snoozed(id, token, 60.0),
        "stopped and snoozed": lambda id, token, *_: finish.Snoozed(id, token, 60.0),
        "released": lambda id, token, *_: Lease(id, token),
        "once": lambda *ended: finish.Completed(*ended, "1"),
        "not once": lambda *ended: finish.Failed(*ended, 60.0, "error", "E", "no"),
    }
    looks, holders = [], finish.holders

    async def counted(*args: Any) -> finish.Held:
        looks.append(args)
        return await holders(*args)

    async def alone(*args: Any) -> None:
        """Each kind of outcome finds out by itself that rows are held."""

    monkeypatch.setattr(finish, "holders", counted)
    if not together:
        monkeypatch.setattr(Finisher, "_set_others_aside", alone)
    types = [*kinds, *kinds]
    ids = await add(conn, *(NewJob(type=type) for type in types))
    worker = await MiniWorker(conn, threads=len(types)).register()
    claimed = {job.id: job for job in await worker.claim()}
    effects: dict[int, Effect] = {}
    for id, type in zip(ids, types, strict=True):
        if type.startswith("stopped"):
            await control.cancel_job(conn, id)
        if "once" in type:
            effects[id] = Effect(f"key {id}", True, 60.0)
            await begin_effect(conn, Lease(id, worker.tokens[id]), effects[id])
    finisher = Finisher(Link(dsn, "finisher"), lambda seconds: None, lambda id, effect: None)
    now = time.monotonic()
    async with await psycopg.AsyncConnection.connect(dsn) as other:
        held = ids[: len(kinds)]
        await other.execute("SELECT FROM pgqueue.jobs_live WHERE id = ANY (%s) FOR UPDATE", [held])
        for id, type in zip(ids, types, strict=True):
            finisher.put(kinds[type](id, worker.tokens[id], now, now, 1), claimed[id], effects.get(id))
        running = asyncio.create_task(finisher.run())
        await until(lambda: finisher.ids() == set(held))
        # Each kind that finds out by itself asks once more.
        assert not together or len(looks) <= 2 + (time.monotonic() - now) / LOOK_EVERY, "one wait for all of them"
        assert await value(conn, "SELECT count(*) FROM pgqueue.jobs_live WHERE status = 'running'") == len(held)
        looked, since = len(looks), time.monotonic()
        await asyncio.sleep(LOOK_EVERY * 1.5)
        assert len(looks) - looked <= (time.monotonic() - since) / LOOK_EVERY + 1
        finisher.stop()
        await asyncio.sleep(LOOK_SOON)
        assert not running.done()
        await other.rollback()
        await asyncio.wait_for(running, 20)
    await finisher.link.close()
    assert (len(finisher), finisher.lost) == (0, 0)
    rows = "SELECT type, array_agg(status::text ORDER BY id) FROM pgqueue.jobs GROUP BY 1"
    ends = dict(await (await conn.execute(rows)).fetchall())
    assert all(first == second for first, second in ends.values())
    assert {type: first for type, (first, _) in ends.items()} == {
        "completed": "completed",
        "unstorable": "failed",
        "failed": "failed",
        "retried": "scheduled",
        "stopped": "cancelled",
        "cancelled": "cancelled",
        "snoozed": "scheduled",
        "stopped and snoozed": "cancelled",
        "released": "pending",
        "once": "completed",
        "not once": "scheduled",
    }
    assert await value(conn, "SELECT count(*) FROM pgqueue.attempts") == 2 * 7, "none is written twice"


@on_18
async def test_keys_do_not_pile_up(conn: psycopg.AsyncConnection, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many a worker's jobs have in the time between two prunings."""
    monkeypatch.setattr(prune, "AT_ONCE", 10)
    expired = "SELECT 'k' || n, n, '', now() - interval '1 s' FROM generate_series(1, 35) n"
    await conn.execute(f"INSERT INTO pgqueue.idempotency_keys (key, job_id, fingerprint, expires_at) {expired}")
    async with worker_inside(PgQueue(), dsn):
        await until_it_is(conn, "NOT EXISTS (SELECT FROM pgqueue.idempotency_keys)")


@on_18
@pytest.mark.parametrize("when", ["idle", "before an effect", "when it is begun"])
async def test_a_runner_that_something_cancels_goes_on(
    conn: psycopg.AsyncConnection, dsn: str, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Handlers know its task, and what they leave behind may cancel it at any time."""
    app = PgQueue()
    runners: list[asyncio.Task[Any]] = []

    @app.job("leaves")
    async def leaves(ctx: Context) -> None:
        task = asyncio.current_task()
        assert task is not None
        runners.append(task)

    @app.job("mail", at_most_once=True)
    async def mail(ctx: Context) -> None: ...

    async def disturbed(*args: Any) -> Any:
        if when == "before an effect" and runners:
            runners.pop().cancel()
            await asyncio.sleep(0)
        begun = await begin_effect(*args)
        if when == "when it is begun" and runners:
            runners.pop().cancel()
            await asyncio.sleep(0)
        return begun

    monkeypatch.setattr(idempotency, "begin_effect", disturbed)
    async with worker_inside(app, dsn, threads=1) as runtime:
        await add(conn, NewJob(type="leaves"))
        await until(lambda: runtime.finisher.completed == 1)
        if when == "idle":
            runners.pop().cancel()
        await add(conn, NewJob(type="mail"))
        await until(lambda: runtime.finisher.completed == 2)
        assert not runners
    assert await value(conn, "SELECT array_agg(DISTINCT attempt) FROM pgqueue.jobs") == [1]


HELD = 5
"""One more than the connections that handlers share."""


@on_18
@pytest.mark.parametrize("what", ["progress", "step", "job", "effect"])
async def test_jobs_whose_rows_somebody_holds_leave_the_others_their_connections(
    conn: psycopg.AsyncConnection, dsn: str, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A cancellation without its COMMIT, while they report progress, keep a step, add a job or begin an effect."""
    monkeypatch.setattr(host, "PROGRESS_EVERY", 0.2)
    app = PgQueue()
    go, over = asyncio.Event(), asyncio.Event()
    asked: list[object] = []
    progress = finish.progress

    async def counted(*args: Any) -> Any:
        asked.append(args)
        return await progress(*args)

    async def held_now(conn: Any, lease: Lease, effect: Effect) -> Any:
        if what == "effect" and len(asked) < HELD:
            await operator.execute("SELECT pgqueue.cancel_job(%s)", [lease.id])
            asked.append(lease)
        return await begin_effect(conn, lease, effect)

    monkeypatch.setattr(finish, "progress", counted)
    monkeypatch.setattr(idempotency, "begin_effect", held_now)

    @app.job("child")
    async def child(ctx: Context) -> None: ...

    @app.job("held", at_most_once=what == "effect")
    async def held(ctx: Context) -> None:
        if what == "effect":
            return
        await go.wait()
        if what == "step":
            await ctx.step("one", lambda: asked.append(ctx.id))
        if what == "job":
            asked.append(ctx.id)
            await ctx.enqueue(child.bind())
        while what == "progress" and not over.is_set():
            ctx.progress(len(asked))
            await asyncio.sleep(0.01)

    @app.job("steps")
    async def steps(ctx: Context) -> int:
        return await ctx.step("one", lambda: 1)

    @app.job("parent")
    async def parent(ctx: Context) -> None:
        await ctx.enqueue(child.bind())

    @app.job("mail", at_most_once=True)
    async def mail(ctx: Context) -> None: ...

    async with (
        worker_inside(app, dsn, threads=2 * HELD, rescue_interval=5.0) as runtime,
        await psycopg.AsyncConnection.connect(dsn) as operator,
    ):
        ids = await add(conn, *[NewJob(type="held")] * (1 if what == "progress" else HELD))
        if what != "effect":
            await until(lambda: set(ids) == runtime.running.keys())
            await operator.execute("SELECT pgqueue.cancel_job(id) FROM unnest(%s::bigint[]) id", [ids])
        go.set()
        await until(lambda: len(asked) >= HELD)
        await add(conn, *[NewJob(type=type) for type in ("steps", "parent", "mail")])
        others = "FROM pgqueue.jobs WHERE type IN ('steps', 'parent', 'mail')"
        await until_it_is(conn, f"count(*) = 3 AND bool_and(status = 'completed') {others}")
        assert await value(conn, "SELECT count(*) FROM pgqueue.attempts") == 0
        over.set()
        await operator.rollback()
        await until_it_is(conn, "NOT EXISTS (SELECT FROM pgqueue.jobs_live)")
        assert (await statuses(conn)).keys() == {"completed"}
