"""Who is woken, who is not, and why nobody sleeps through a job.

The protocol: whoever makes jobs ready takes a lock, shared, and then notifies the idle worker that was used least
recently. A worker that finds nothing marks itself idle, and sleeps only if it gets that lock for itself, for a moment,
and finds nothing once more.
"""

import asyncio
import itertools
import random
import time
from collections import Counter
from contextlib import asynccontextmanager
from uuid import uuid4

import pytest

from pgqueue import control, enqueue, finish, promote, rescue, workers
from pgqueue.db import connect
from pgqueue.job import Lease, NewJob
from pgqueue.wake import wake
from tests.db.queue import MiniWorker, add, value

ISOLATIONS = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")


class Ear:
    """Hears what is notified on the channels of workers."""

    def __init__(self, conn):
        self.conn = conn
        self.heard = []
        conn.add_notify_handler(lambda notice: self.heard.append((notice.channel, notice.payload)))

    async def listen(self, worker):
        await self.conn.execute(f'LISTEN "{workers.channel(worker.who.worker_id)}"')

    async def count(self):
        """How often each worker was notified since the last time, by worker id."""
        nonce = uuid4().hex
        # What comes back last was sent last: everything before it has been heard.
        await self.conn.execute("LISTEN ear")
        await self.conn.execute("SELECT pg_notify('ear', %s)", [nonce])
        while ("ear", nonce) not in self.heard:
            await self.conn.execute("SELECT 1")
        heard, self.heard = self.heard, []
        return Counter(channel.removeprefix("pgqueue_") for channel, _ in heard if channel != "ear")

    async def woken(self, *crew):
        """The places in the crew of those who were notified, as often as they were."""
        counts = await self.count()
        ids = [str(worker.who.worker_id) for worker in crew]
        assert counts.keys() <= set(ids)
        return sorted(ids.index(id) for id in counts.elements())


@pytest.fixture
def ear(dsn, runner):
    conn = runner.run(connect(dsn))
    yield Ear(conn)
    runner.run(conn.close())


@pytest.fixture
def crew(conn, ear, runner):
    """Makes idle, listening workers."""

    async def make(*kinds):
        made = []
        for kind in kinds:
            # It sends no heartbeats, and some stories are long.
            worker = await MiniWorker(conn, **kind).register(lease_timeout=600, listening=True)
            await ear.listen(worker)
            await workers.mark_idle(conn, worker.who.worker_id)
            made.append(worker)
        return made

    return make


async def use(conn, worker):
    """As if it had been woken, had run a job, and had become idle again."""
    await workers.mark_busy(conn, worker.who.worker_id)
    await workers.mark_idle(conn, worker.who.worker_id)


async def test_nobody_is_notified_while_everybody_is_busy(conn, ear, crew):
    worker, other = await crew({}, {})
    for each in (worker, other):
        await workers.mark_busy(conn, each.who.worker_id)
    for _ in range(1000):
        await conn.execute("INSERT INTO pgqueue.jobs (type) VALUES ('t')")
    await add(conn, *[NewJob(type="t") for _ in range(1000)])
    await enqueue.add_job(conn, NewJob(type="t"))
    assert await ear.woken(worker, other) == []
    assert await value(conn, "SELECT pg_notification_queue_usage()") == 0
    # Nor by an isolation level that PostgreSQL takes for READ COMMITTED.
    async with conn.transaction():
        await conn.execute("SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED")
        await add(conn, NewJob(type="t"))
    assert await ear.woken(worker, other) == []


async def test_an_idle_worker_is_notified_once(conn, ear, crew):
    [worker] = await crew({})
    for enqueue_one in (
        lambda: conn.execute("INSERT INTO pgqueue.jobs (type) VALUES ('t')"),
        lambda: conn.execute("SELECT pgqueue.add_job('t')"),
        lambda: add(conn, NewJob(type="t")),
        lambda: add(conn, *[NewJob(type="t") for _ in range(500)]),
    ):
        await enqueue_one()
        assert await ear.woken(worker) == [0]
    async with conn.transaction():
        for _ in range(10):
            await add(conn, NewJob(type="t"))
    assert await ear.woken(worker) == [0], "once a transaction"
    async with conn.transaction(force_rollback=True):
        await add(conn, NewJob(type="t"))
    assert await ear.woken(worker) == []


async def test_one_statement_wakes_one_worker_for_each_kind(conn, ear, crew):
    everything, mail, reports = await crew({}, {"queues": ["mail"]}, {"types": ["report"]})
    await add(conn, *[NewJob(type="t") for _ in range(100)])
    assert await ear.woken(everything, mail, reports) == [0]
    await use(conn, everything)
    kinds = [NewJob(type="t", queue="mail"), NewJob(type="report"), NewJob(type="t", queue="else")]
    await add(conn, *kinds * 50)
    assert await ear.woken(everything, mail, reports) == [0, 1, 2]
    await use(conn, mail)
    await use(conn, reports)
    await add(conn, *kinds * 50)
    assert await ear.woken(everything, mail, reports) == [0], "who was used least recently can run all of them"


async def test_the_least_recently_used_worker_is_woken(conn, ear, crew):
    three = await crew({}, {}, {})
    order = []
    for _ in range(9):
        await add(conn, NewJob(type="t"))
        [woken] = await ear.woken(*three)
        order.append(woken)
        await use(conn, three[woken])
    assert order == [0, 1, 2] * 3
    # A new worker does not take everything.
    four = three + await crew({})
    order = []
    for _ in range(8):
        await add(conn, NewJob(type="t"))
        [woken] = await ear.woken(*four)
        order.append(woken)
        await use(conn, four[woken])
    assert order == [0, 1, 2, 3] * 2
    # Who is busy is passed over, and does not lose its place.
    await workers.mark_busy(conn, four[0].who.worker_id)
    await add(conn, NewJob(type="t"))
    assert await ear.woken(*four) == [1]


async def test_who_can_run_it_is_woken(conn, ear, crew):
    for kinds, job, woken in (
        ([{"queues": ["a"]}, {"queues": ["b", "c"]}], {"queue": "c"}, [1]),
        ([{"queues": ["a"]}, {"queues": ["b", "c"]}], {"queue": "d"}, []),
        ([{"types": ["x"]}, {"types": ["t"]}], {}, [1]),
        ([{"types": ["x"]}, {"types": []}], {}, []),
        ([{"threads": 2}, {"threads": 8}], {"thread_demand": 4}, [1]),
        ([{"threads": 2}, {"threads": 3}], {"thread_demand": 4}, [0]),
        ([{"queues": ["a"], "types": ["t"]}, {"queues": ["b"]}], {"queue": "b"}, [1]),
        ([{}], {"delay": 1.5}, [0]),
        ([{}], {"delay": 3600.0}, []),
    ):
        await conn.execute("DELETE FROM pgqueue.workers")
        made = await crew(*kinds)
        await add(conn, NewJob(**{"type": "t"} | job))
        assert await ear.woken(*made) == woken, (kinds, job)


async def test_who_cannot_come_is_never_woken(conn, ear, crew):
    for change in (
        "expires_at = now() - interval '1 ms'",
        "draining = true",
        "state = 'unavailable'",
        "listening = false",
        "idle_since = NULL",
    ):
        await conn.execute("DELETE FROM pgqueue.workers")
        able, unable = await crew({}, {})
        await use(conn, able)
        await conn.execute(f"UPDATE pgqueue.workers SET {change} WHERE id = %s", [unable.who.worker_id])
        for _ in range(3):
            await add(conn, NewJob(type="t"))
            await use(conn, able)
        assert await ear.woken(able, unable) == [0, 0, 0], change
    [retired] = await crew({})
    await workers.retire(conn, retired.who.worker_id)
    await workers.mark_idle(conn, retired.who.worker_id)
    await conn.execute("DELETE FROM pgqueue.workers WHERE id <> %s", [retired.who.worker_id])
    await add(conn, NewJob(type="t"))
    assert await ear.woken(retired) == []


async def test_the_switch(conn, ear, crew):
    [worker] = await crew({})
    await conn.execute("UPDATE pgqueue.switches SET enabled = false WHERE name = 'wake'")
    await add(conn, NewJob(type="t"))
    assert await ear.woken(worker) == []
    await conn.execute("UPDATE pgqueue.switches SET enabled = true WHERE name = 'wake'")
    await add(conn, NewJob(type="t"))
    assert await ear.woken(worker) == [0]


async def test_who_cannot_know_who_is_idle_wakes_everybody(dsn, conn, ear, crew):
    busy, idle, elsewhere = await crew({}, {}, {"queues": ["else"]})
    await workers.mark_busy(conn, busy.who.worker_id)
    for isolation in ISOLATIONS[1:]:
        async with conn.transaction():
            await conn.execute(f"SET TRANSACTION ISOLATION LEVEL {isolation}")
            await add(conn, NewJob(type="t"))
        assert await ear.woken(busy, idle, elsewhere) == [0, 1], "its snapshot is old"
    async with await connect(dsn) as holder, holder.transaction():
        assert await workers.may_sleep(holder)
        await add(conn, NewJob(type="t"))
        assert await ear.woken(busy, idle, elsewhere) == [0, 1], "it does not wait for the lock"


# No wake-up is lost, whatever the order. These are the ways in which a job becomes ready: each prepares one, and
# answers with what is to be done in the transaction.


async def insert(conn, worker):
    return lambda other: other.execute("INSERT INTO pgqueue.jobs (type) VALUES ('t')")


async def due(conn, worker):
    await add(conn, NewJob(type="t", delay=3600))
    await conn.execute("UPDATE pgqueue.jobs_live SET run_at = now()")
    return lambda other: promote.promote(other, promote.DueFloor())


async def retry(conn, worker):
    [id] = await add(conn, NewJob(type="t"))
    await worker.fail(await worker.claim(), delay=None)
    return lambda other: control.retry_job(other, id)


async def edit(conn, worker):
    [id] = await add(conn, NewJob(type="t", delay=3600))
    return lambda other: control.edit_job(other, id, {"run_at": "2020-01-01T00:00:00Z"})


async def resume(conn, worker):
    await add(conn, NewJob(type="t"))
    await control.pause_queue(conn, "default")
    return lambda other: control.resume_queue(other, "default")


async def release(conn, worker):
    await add(conn, NewJob(type="t"))
    [job] = await worker.claim()
    return lambda other: finish.release(other, [Lease(job.id, worker.tokens[job.id])])


async def wake_after_release(other):
    """Its COMMIT must not wait for the lock of all NOTIFYs, so whoever gives back wakes afterwards."""
    await wake(other, ["default"], ["t"], [1])


async def orphan(conn, worker):
    await add(conn, NewJob(type="t"))
    assert await MiniWorker(conn).claim()
    return lambda other: rescue.rescue(other)


ENQUEUER = ("begin", "act", "commit")
SLEEPER = ("claim", "mark idle", "may sleep", "claim again", "sleep")
ORDERS = [
    tuple(("E" if place in enqueuers else "W") for place in range(8))
    for enqueuers in itertools.combinations(range(8), 3)
]


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_no_order_of_events_loses_a_wake_up(dsn, conn, ear, crew, isolation):
    """All orders in which a transaction that enqueues and a worker that goes to sleep can mix."""
    await play_all(dsn, conn, ear, crew, insert, isolation)


async def test_nor_is_it_lost_if_a_job_becomes_ready_in_another_way(request, dsn, conn, ear, crew):
    ways = (due, retry, edit, resume, orphan)
    for how in ways if "pg18" in request.node.name else random.sample(ways, 2):
        await play_all(dsn, conn, ear, crew, how, "READ COMMITTED")


async def test_nor_if_it_is_given_back(dsn, conn, ear, crew):
    endings = {"claimed": 1, "claimed again": 19, "notified": 36}
    await play_all(dsn, conn, ear, crew, release, "READ COMMITTED", wake_after_release, endings)


# Each way out is taken: there is something to see.
ENDINGS = {"claimed": 1, "claimed again": 13, "watchful": 18, "notified": 24}


async def play_all(dsn, conn, ear, crew, how, isolation, after=None, expected=ENDINGS):
    await conn.execute("DELETE FROM pgqueue.workers")
    [worker] = await crew({})
    endings = Counter()
    async with await connect(dsn) as other:
        for order in ORDERS:
            await conn.execute("DELETE FROM pgqueue.jobs; DELETE FROM pgqueue.queues")
            worker.lanes.floors.clear()
            await workers.mark_busy(conn, worker.who.worker_id)
            act = await how(conn, worker)
            endings[await play(order, conn, other, worker, act, isolation, ear, after)] += 1
    assert endings == expected, how.__name__


async def play(order, conn, other, worker, act, isolation, ear, after):
    enqueuer, sleeper = iter(ENQUEUER), iter(SLEEPER)
    acted = committed = False
    ending = None
    story = []
    for who in order:
        event = next(enqueuer if who == "E" else sleeper)
        story.append(event)
        match event:
            case "begin":
                await other.execute(f"BEGIN ISOLATION LEVEL {isolation}")
                await other.execute("SELECT 1")  # now it has its snapshot
            case "act":
                await act(other)
                acted = True
            case "commit":
                await other.execute("COMMIT")
                committed = True
                if after is not None:
                    await after(other)
            case _ if ending is not None:
                pass
            case "claim":
                ending = "claimed" if await worker.claim() else None
            case "mark idle":
                await workers.mark_idle(conn, worker.who.worker_id)
            case "may sleep":
                if not await workers.may_sleep(conn):
                    ending = "watchful"
                    assert acted, "a worker must not stay up for nothing"
                    assert not committed, "a worker must not stay up for nothing"
            case "claim again":
                # From here on a notification counts: the worker remembers it, if it does not sleep yet.
                await ear.count()
                ending = "claimed again" if await worker.claim() else None
    if ending is None:
        assert await ear.woken(worker), f"the worker sleeps through the job: {', '.join(story)}"
        ending = "notified"
    return ending


class Sleeper:
    """A worker that follows the protocol and never polls."""

    def __init__(self, dsn, started):
        self.dsn = dsn
        self.started = started
        self.wake = asyncio.Event()
        self.idle = False
        self.count = 0

    async def run(self, ready):
        async with await connect(self.dsn) as self.conn, await connect(self.dsn) as ear:
            self.worker = await MiniWorker(self.conn, threads=4).register(lease_timeout=600, listening=True)
            await ear.execute(f'LISTEN "{workers.channel(self.worker.who.worker_id)}"')
            listening = asyncio.create_task(self.listen(ear))
            ready.set()
            try:
                pause = 0.0
                while True:
                    if await self.claim():
                        pause = 0.0
                    else:
                        pause = await self.go_idle(pause)
            finally:
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)

    async def listen(self, ear):
        async for _ in ear.notifies():
            self.wake.set()

    async def claim(self):
        self.wake.clear()
        jobs = await self.worker.claim(4)
        self.started |= {job.id: time.monotonic() for job in jobs}
        self.count += len(jobs)
        if not jobs:
            return False
        if self.idle:
            self.idle = False
            await workers.mark_busy(self.conn, self.worker.who.worker_id)
        if len(jobs) == 4:
            await wake(self.conn, ["default"], ["t"], [1])
        await asyncio.sleep(random.uniform(0, 0.02))
        assert len(await self.worker.complete(jobs)) == len(jobs)
        return True

    async def go_idle(self, pause):
        if not self.idle:
            await workers.mark_idle(self.conn, self.worker.who.worker_id)
            self.idle = True
        if await workers.may_sleep(self.conn):
            if not await self.claim():
                await self.wake.wait()
            return 0.0
        pause = min(max(pause * 2, 0.02), 1.0)
        try:
            async with asyncio.timeout(pause):
                await self.wake.wait()
        except TimeoutError:
            pass
        return pause


async def test_without_polling_every_job_starts_within_a_second(dsn, conn, record_property):
    started, committed = {}, {}
    sleepers = [Sleeper(dsn, started) for _ in range(3)]
    async with running(sleepers):
        await asyncio.gather(*(enqueue_for(dsn, 3.0, committed) for _ in range(6)))
        while committed.keys() - started.keys():
            assert time.monotonic() < max(committed.values()) + 15, f"{committed.keys() - started.keys()} never started"
            await asyncio.sleep(0.01)
    delays = sorted(started[id] - committed[id] for id in committed)
    shares = sorted(sleeper.count for sleeper in sleepers)
    usage = await value(conn, "SELECT pg_notification_queue_usage()")
    print(f"{len(delays)} jobs, p50 {delays[len(delays) // 2] * 1000:.1f} ms, max {delays[-1] * 1000:.1f} ms, {shares}")
    record_property("slowest", delays[-1])
    # Nobody polls: what was slept through is never started. A tenth may have met a machine that stood still.
    assert delays[len(delays) * 9 // 10] < 1
    assert shares[0] > len(delays) / 30, "everybody got a share"
    assert usage < 0.01


async def enqueue_for(dsn, seconds, committed):
    """Transactions of 0 to 300 ms, of every isolation level, with pauses in which everybody can fall asleep."""
    deadline = time.monotonic() + seconds
    async with await connect(dsn) as conn:
        while time.monotonic() < deadline:
            level = random.choices(ISOLATIONS, (6, 1, 1))[0]
            await conn.execute(f"BEGIN ISOLATION LEVEL {level}")
            await asyncio.sleep(random.choice((0, random.uniform(0, 0.15))))
            ids = await add(conn, *[NewJob(type="t") for _ in range(random.choice((1, 1, 1, 10)))])
            await asyncio.sleep(random.choice((0, random.uniform(0, 0.15))))
            now = time.monotonic()
            await conn.execute("COMMIT")
            committed |= dict.fromkeys(ids, now)
            await asyncio.sleep(random.uniform(0, 0.1))


@asynccontextmanager
async def running(sleepers):
    ready = [asyncio.Event() for _ in sleepers]
    tasks = [asyncio.create_task(sleeper.run(event)) for sleeper, event in zip(sleepers, ready, strict=True)]
    try:
        await asyncio.gather(*(event.wait() for event in ready))
        yield
        assert not [task for task in tasks if task.done()], [task.exception() for task in tasks if task.done()]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_insert_does_not_wade_through_dead_versions_of_workers(conn, crew, ear):
    """They stay while anybody holds a snapshot, and the pages that they filled stay for ever."""
    (worker,) = await crew({})
    async with conn.transaction():
        await conn.execute("INSERT INTO pgqueue.jobs (type) VALUES ('t')")
        query = "SELECT seq_scan FROM pg_stat_xact_user_tables WHERE relid = 'pgqueue.workers'::regclass"
        assert await value(conn, query) == 0
    assert await ear.woken(worker) == [0]
