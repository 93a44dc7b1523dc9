"""Jobs that the lanes and floors of a busy worker do not show. Whatever the reason, such a job is claimed within a
second of its commit, although the worker finds all it asks for elsewhere. (What has a lower priority than that waits.)
"""

import asyncio
import time
from contextlib import asynccontextmanager

import psycopg
import pytest

from pgqueue import claim
from pgqueue.db import connect
from pgqueue.job import NewJob
from tests.db.queue import MiniWorker, add

LIMIT = 20
ROUNDS = 2
QUEUES = ("default", "mail", "report")
DEAD = 50_000


class Load:
    """A worker that claims without a pause from three queues that are never empty, and says when it claimed what."""

    def __init__(self, dsn):
        self.dsn = dsn
        self.claimed = {}
        self.filled = 0
        self.shortest = LIMIT
        self.slowest_sweep = 0.0
        self.slowest_turn = 0.0

    async def run(self):
        conn = await connect(self.dsn)
        try:
            worker = await MiniWorker(conn, types=["t"]).register()
            await self.fill(conn, 600)
            while True:
                started = time.monotonic()
                jobs = []
                # Not worker.claim(), which sweeps more often than it should.
                for one in await claim.claim_next(conn, worker.who, worker.lanes, LIMIT):
                    mine = [job for job in one.jobs if not job.parked]
                    jobs += mine
                    worker.tokens |= {job.id: one.lease_token for job in mine}
                self.claimed |= {job.id: time.monotonic() for job in jobs}
                self.shortest = min(self.shortest, len(jobs))
                await worker.complete(jobs)
                await self.fill(conn, len(jobs))
                await asyncio.sleep(max(0.002, 0.01 - time.monotonic() + started))
                self.slowest_sweep = max(self.slowest_sweep, worker.lanes.sweep_cost)
                self.slowest_turn = max(self.slowest_turn, time.monotonic() - started)
        finally:
            await conn.close()

    async def fill(self, conn, count):
        await add(conn, *[NewJob(type="t", queue=QUEUES[(self.filled + i) % 3]) for i in range(count)])
        self.filled += count

    async def delay(self, ids, since):
        """How long the slowest of these jobs waited."""
        while not self.claimed.keys() >= set(ids):
            assert time.monotonic() < since + 20, (
                f"{len(set(ids) - self.claimed.keys())} of {len(ids)} were never claimed"
            )
            await asyncio.sleep(0.005)
        return max(self.claimed[id] for id in ids) - since


@asynccontextmanager
async def under_load(dsn):
    load = Load(dsn)
    task = asyncio.create_task(load.run())
    try:
        while len(load.claimed) < 300:
            assert not task.done(), task.exception()
            await asyncio.sleep(0.01)
        yield load
        assert not task.done(), task.exception()
        assert load.shortest == LIMIT, "the worker must always have had enough to do"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def held_snapshot(dsn):
    """Somebody's report keeps the entries of 50,000 jobs that are gone in the index, in front of all others."""
    async with (
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn,
        await psycopg.AsyncConnection.connect(dsn) as report,
    ):
        await conn.execute(
            "INSERT INTO pgqueue.jobs (type, queue) SELECT 't', (%s::text[])[1 + i %% 3] FROM generate_series(1, %s) i",
            [list(QUEUES), DEAD],
        )
        await report.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        await report.execute("SELECT count(*) FROM pgqueue.jobs_live")
        await conn.execute("DELETE FROM pgqueue.jobs_live")
        yield
        seen = await (await report.execute("SELECT count(*) FROM pgqueue.jobs_live")).fetchone()
        assert seen == (DEAD,)


@asynccontextmanager
async def nothing(dsn):
    yield


CALM_OR_NOT = pytest.mark.parametrize("weather", [nothing, held_snapshot], ids=["calm", "held-snapshot"])


@CALM_OR_NOT
async def test_every_straggler_is_claimed_within_a_second(dsn, weather, record_property):
    async def tell(story, turn):
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
            return story.__name__, await load.delay(await story(conn, turn), time.monotonic())

    rounds = []
    async with weather(dsn), under_load(dsn) as load:
        for turn in range(ROUNDS):
            delays = dict(await asyncio.gather(*(tell(story, turn) for story in STORIES)))
            delays |= dict([await tell(higher_priority, turn)])
            rounds.append(delays)
            # The next round meets the worker at another moment between two sweeps.
            await asyncio.sleep(0.35)
    slowest = {story: round(max(delays[story] for delays in rounds), 3) for story in rounds[0]}
    print(f"{slowest}, sweeps of up to {load.slowest_sweep * 1000:.0f} ms")
    record_property("delays", slowest)
    # A second; or, where a sweep is not cheap, until it is 5 % of the time. And then the lanes take turns.
    turns = 12 * load.slowest_turn
    assert max(slowest.values()) < max(1.0, 20 * load.slowest_sweep) + turns, slowest
    assert slowest["higher_priority"] < turns, "its lane is known: the next claim takes it"


# Each story makes jobs, or lets go of some, and answers with their ids as soon as they can be claimed.


async def late_commit(conn, turn):
    """Inserted first, committed when the floors had long passed it."""
    async with conn.transaction():
        ids = await add(conn, NewJob(type="t"))
        await asyncio.sleep(0.2)
    return ids


async def late_bulk(conn, turn):
    """More of them than one claim takes."""
    async with conn.transaction():
        ids = await add(conn, *[NewJob(type="t", queue="mail") for _ in range(4 * LIMIT)])
        await asyncio.sleep(0.3)
    return ids


async def claim_rolled_back(conn, turn):
    async with conn.transaction(force_rollback=True):
        ids = [job.id for job in await MiniWorker(conn, queues=["report"]).claim(5)]
        await asyncio.sleep(0.2)
    assert len(ids) == 5
    return ids


async def claimer_killed(conn, turn):
    """The connection dies in the middle of a claim."""
    async with await psycopg.AsyncConnection.connect(conn.info.dsn, password=conn.info.password) as other:
        ids = [job.id for job in await MiniWorker(other, queues=["report"]).claim(5)]
        assert len(ids) == 5
        await asyncio.sleep(0.3)
        await conn.execute("SELECT pg_terminate_backend(%s)", [other.info.backend_pid])
        with pytest.raises(psycopg.OperationalError):
            await other.execute("SELECT 1")
    return ids


async def new_queue(conn, turn):
    return await add(conn, NewJob(type="t", queue=f"new{turn}"))


async def parked_elsewhere(conn, turn):
    """Met first by a worker that does not know the type."""
    async with conn.transaction():
        ids = await add(conn, NewJob(type="t", queue="parked"))
        assert await MiniWorker(conn, types=["other"], queues=["parked"]).claim() == []
    return ids


async def new_priority(conn, turn):
    return await add(conn, NewJob(type="t", priority=5 + turn))


async def higher_priority(conn, turn):
    """Later than all that waits, but in a lane that goes first."""
    return await add(conn, NewJob(type="t", priority=5 + turn))


STORIES = (late_commit, late_bulk, claim_rolled_back, claimer_killed, new_queue, parked_elsewhere, new_priority)


async def test_of_producers_side_by_side_the_later_one_needs_no_sweep(dsn, conn):
    """It took the lower number, and committed after the other one's job had been claimed."""
    worker = await MiniWorker(conn, types=["t"]).register()
    await add(conn, NewJob(type="t"))
    assert len(await worker.claim()) == 1
    async with await psycopg.AsyncConnection.connect(dsn) as late:
        await late.execute("INSERT INTO pgqueue.jobs (type) VALUES ('t')")
        await add(conn, NewJob(type="t"))
        assert len((await claim.claim(conn, worker.who, worker.lanes, 10)).jobs) == 1
    assert len((await claim.claim(conn, worker.who, worker.lanes, 10)).jobs) == 1


async def test_a_scout_tells_what_claims_do_not_see(dsn, conn):
    """And claims nothing itself."""
    worker = await MiniWorker(conn, types=["t"]).register()
    async with await psycopg.AsyncConnection.connect(dsn) as late:
        (job,) = await (await late.execute("INSERT INTO pgqueue.jobs (type) VALUES ('t') RETURNING id")).fetchone()
        await add(conn, *[NewJob(type="t") for _ in range(2 * claim.BEHIND)])
        await worker.complete(await worker.claim(3 * claim.BEHIND))
        await late.commit()
    (other,) = await add(conn, NewJob(type="t", queue="new"))
    assert (await claim.claim(conn, worker.who, worker.lanes, 10)).jobs == []
    assert await claim.scout(conn, worker.who, worker.lanes)
    assert not await claim.scout(conn, worker.who, worker.lanes), "it has told of them"
    assert {each.id for each in (await claim.claim(conn, worker.who, worker.lanes, 10)).jobs} == {job, other}


async def test_who_claims_sweeps_again_when_the_scout_is_overdue(conn):
    worker = await MiniWorker(conn, types=["t"]).register()
    await claim.scout(conn, worker.who, worker.lanes)
    worker.lanes.sweep_cost = claim.CHEAP_SWEEP
    assert worker.lanes.needs_scout()
    overdue = worker.lanes.next_sweep + claim.OVERDUE
    assert not worker.lanes.may_sweep(overdue - 0.1)
    assert worker.lanes.may_sweep(overdue + 0.1)


def test_a_sweep_that_was_held_up_once_is_no_dear_one():
    """By a lock, by a silent network, by a stopped process."""
    lanes = claim.Lanes()
    lanes.swept(10.0, 10.001)
    lanes.swept(11.0, 14.0)
    assert not lanes.needs_scout()
    assert lanes.may_sweep(14.0)
    lanes.swept(15.0, 15.001)
    assert lanes.may_sweep(15.001)
    lanes.swept(16.0, 19.0)
    lanes.swept(20.0, 23.0)
    assert lanes.needs_scout(), "twice: that is what it takes"
    assert not lanes.may_sweep(23.1)
    assert lanes.may_sweep(23.0 + claim.LONGEST_PAUSE)


async def test_who_was_woken_in_vain_does_not_wait_until_the_scout_is_overdue(conn):
    worker = await MiniWorker(conn, types=["t"]).register()
    await add(conn, NewJob(type="t"))
    await worker.complete(await worker.claim())
    await claim.scout(conn, worker.who, worker.lanes)
    worker.lanes.sweep_cost = claim.CHEAP_SWEEP
    worker.lanes.next_sweep = time.monotonic()
    worker.lanes.scout_overdue += 60
    (job,) = await add(conn, NewJob(type="t", queue="new"))
    assert await claim.claim_next(conn, worker.who, worker.lanes, 10) == []
    (found,) = await claim.claim_next(conn, worker.who, worker.lanes, 10, woken=True)
    assert [each.id for each in found.jobs] == [job]


async def test_lanes_that_only_the_scout_saw_are_forgotten_like_others(conn):
    worker = await MiniWorker(conn, types=["t"]).register()
    await add(conn, *[NewJob(type="t", queue=f"q{n}") for n in range(5)])
    assert await claim.scout(conn, worker.who, worker.lanes)
    assert len(worker.lanes.floors) == 5
    worker.lanes.forget(time.monotonic() + 2 * claim.FORGET_LANE_AFTER)
    assert not worker.lanes.floors
