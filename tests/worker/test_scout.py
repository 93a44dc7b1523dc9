"""While somebody holds a snapshot, looking below the floors takes long; no claim waits behind it."""

import asyncio

import psycopg
import pytest

from pgqueue import Context, PgQueue, claim, workers
from tests.once.inside import worker_inside
from tests.worker.processes import Database, Fleet, wait

pytestmark = pytest.mark.parametrize("server", ["pg18"], indirect=True)

DEAD = 100_000


def test_it_sweeps_while_that_is_not_cheap(db: Database, fleet: Fleet, dsn: str) -> None:
    db.run("INSERT INTO pgqueue.jobs (type) SELECT 'nap' FROM generate_series(1, %s)", DEAD)
    with psycopg.connect(dsn) as report:
        report.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        report.execute("SELECT count(*) FROM pgqueue.jobs_live")
        db.run("DELETE FROM pgqueue.jobs_live")
        worker = fleet.start("w")
        wait(lambda: db.sessions("scout"), "sweeps are left to a scout")
        with psycopg.connect(dsn) as late:
            (job,) = late.execute("INSERT INTO pgqueue.jobs (type) VALUES ('nap') RETURNING id").fetchone() or (0,)
            others = [id for _ in range(6) for id in db.add_many("nap", [{}] * 100)]
            db.wait_for_all(others, "completed")
        db.wait_for(job, "completed")
    db.run("VACUUM pgqueue.jobs_live")
    wait(lambda: not db.sessions("scout"), "sweeps are cheap again", 30)
    assert not worker.events("database.away")


def listed() -> tuple[PgQueue, asyncio.Queue[int]]:
    """An app, and the jobs that it ran."""
    app = PgQueue()
    ran: asyncio.Queue[int] = asyncio.Queue()

    @app.job("t")
    async def t(ctx: Context) -> None:
        ran.put_nowait(ctx.id)

    return app, ran


async def test_a_stall_does_not_make_a_worker_blind(
    conn: psycopg.AsyncConnection, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody had the table for three seconds; a job of a lane that the worker does not know starts soon after."""
    monkeypatch.setattr(claim, "CHEAP_SWEEP", 0.0)
    app, ran = listed()
    async with worker_inside(app, dsn, poll_interval=1.0, rescue_interval=5.0):
        await conn.execute("INSERT INTO pgqueue.jobs (type) VALUES ('t')")
        await asyncio.wait_for(ran.get(), 20)
        await asyncio.sleep(2)
        async with conn.transaction():
            await conn.execute("LOCK TABLE pgqueue.jobs_live IN ACCESS EXCLUSIVE MODE")
            await asyncio.sleep(3)
        await asyncio.sleep(1.5)
        await conn.execute("INSERT INTO pgqueue.jobs (type, priority) VALUES ('t', 7)")
        await asyncio.wait_for(ran.get(), 4)


async def test_who_is_woken_while_it_lies_down_looks_everywhere(
    conn: psycopg.AsyncConnection, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has just looked, and is woken for a lane that it does not know: it does not sleep on until the next poll."""
    app, ran = listed()
    may_sleep = workers.may_sleep

    async def woken_meanwhile(its: psycopg.AsyncConnection) -> bool:
        answer = await may_sleep(its)
        if runtime.claimer.lanes.floors and answer:
            monkeypatch.setattr(workers, "may_sleep", may_sleep)
            await conn.execute("INSERT INTO pgqueue.jobs (type, priority) VALUES ('t', 7)")
            await asyncio.wait_for(runtime.claimer.wake.wait(), 15)
        return answer

    async with worker_inside(app, dsn, poll_interval=30.0, rescue_interval=30.0) as runtime:
        monkeypatch.setattr(workers, "may_sleep", woken_meanwhile)
        await conn.execute("INSERT INTO pgqueue.jobs (type) VALUES ('t')")
        await asyncio.wait_for(ran.get(), 15)
        await asyncio.wait_for(ran.get(), 15)
