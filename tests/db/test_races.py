"""Several hands on the same jobs at the same moment: rescue against the owner, everybody against everybody."""

import asyncio
import random
import time
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import psycopg
import pytest

from pgqueue import control, enqueue, finish, promote, prune, read, rescue, workers
from pgqueue.db import connect
from pgqueue.errors import JobNotFound, WrongStatus
from pgqueue.job import TRANSITIONS, Lease, NewJob
from pgqueue.sql import SQL
from tests.db.queue import MiniWorker, add, statuses, value

MOVES = frozenset().union(*TRANSITIONS.values())


async def expire(conn, worker):
    await conn.execute(
        "UPDATE pgqueue.workers SET expires_at = now() - interval '1 s' WHERE id = %s", [worker.who.worker_id]
    )


def completed(worker, ids):
    now = time.monotonic()
    return [finish.Completed(id, worker.tokens[id], now, now, 1, None) for id in ids]


async def deadlocks(conn):
    """How many PostgreSQL has broken. Those whom it hit tell of it at the latest when they are gone."""
    others = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend'"
    )
    while await value(conn, others) > 1:
        pass
    return await value(conn, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")


# The rescuer has looked, and is about to act. What happens to the job in between?


class Scene:
    """A job of a worker whose lease has run out, and a rescuer that stands still between its look and its grip."""

    def __init__(self, conn, dsn):
        self.conn = conn
        self.dsn = dsn

    async def play(self, event):
        await self.conn.execute("DELETE FROM pgqueue.jobs; DELETE FROM pgqueue.workers")
        self.alive = await MiniWorker(self.conn).register()
        self.owner = await MiniWorker(self.conn).register()
        [self.id] = await add(self.conn, NewJob(type="t"))
        [self.job] = await self.owner.claim()
        await expire(self.conn, self.owner)
        async with await connect(self.dsn) as rescuer, await connect(self.dsn) as gate:
            async with gate.transaction():
                await gate.execute("SELECT pg_advisory_xact_lock(42)")
                task = asyncio.create_task(rescuer.execute(STANDING_STILL, {"limit": 100, "max_lost": 3, "beside": 1}))
                waits = "SELECT wait_event = 'advisory' FROM pg_stat_activity WHERE pid = %s"
                while not await value(self.conn, waits, rescuer.info.backend_pid):
                    assert not task.done()
                expected = await event(self)
            rescued, *_ = await (await task).fetchone()
        job = await read.get_job(self.conn, self.id)
        assert (job.status, job.attempt, job.lost, rescued) == expected, event.__name__
        return job


GATE = "(SELECT pg_advisory_xact_lock_shared(42)) gate"
STANDING_STILL = SQL.rescue.replace("FROM pgqueue.workers w WHERE", f"FROM {GATE} CROSS JOIN pgqueue.workers w WHERE")


async def nothing(scene):
    return "pending", 0, 1, 1


async def owner_completes(scene):
    """Late, but nobody has taken its job: its work counts."""
    assert await scene.owner.complete([scene.job]) == {scene.id}
    return "completed", 1, 0, 0


async def owner_fails(scene):
    assert await scene.owner.fail([scene.job], delay=60.0)
    return "scheduled", 1, 0, 0


async def owner_gives_up(scene):
    assert await scene.owner.fail([scene.job], delay=None)
    return "failed", 1, 0, 0


async def owner_releases(scene):
    assert await finish.release(scene.conn, [Lease(scene.id, scene.owner.tokens[scene.id])])
    return "pending", 0, 0, 0


async def operator_cancels(scene):
    """The rescuer must see the wish, although it is newer than its look."""
    assert await control.cancel_job(scene.conn, scene.id) == "running"
    return "cancelled", 0, 1, 1


async def other_rescuer_is_faster(scene):
    assert await rescue.rescue(scene.conn) == (1, 0)
    return "pending", 0, 1, 0


async def old_worker_claims(scene):
    await rescue.rescue(scene.conn)
    assert await scene.alive.claim()
    return "running", 0, 1, 0


async def new_worker_claims(scene):
    """The rescuer has never heard of it. The fresh attempt is none of its business."""
    await rescue.rescue(scene.conn)
    scene.new = await MiniWorker(scene.conn).register()
    assert await scene.new.claim()
    return "running", 0, 1, 0


async def new_worker_completes(scene):
    await new_worker_claims(scene)
    assert await scene.new.complete([scene.job]) == {scene.id}
    return "completed", 1, 1, 0


async def same_worker_is_back(scene):
    """It gave the job back and claimed it again: a lease that is newer than the look."""
    await owner_releases(scene)
    assert await scene.owner.claim()
    return "running", 0, 0, 0


async def test_a_rescue_acts_on_what_is_there_and_not_on_what_it_saw(dsn, conn):
    assert STANDING_STILL not in SQL.rescue, "rescue.sql no longer has the words at which to stop it"
    scene = Scene(conn, dsn)
    for event in (
        nothing,
        owner_completes,
        owner_fails,
        owner_gives_up,
        owner_releases,
        operator_cancels,
        other_rescuer_is_faster,
        old_worker_claims,
        new_worker_completes,
        same_worker_is_back,
    ):
        await scene.play(event)
    # A worker's id decides in which gap it stands: whichever it is, its fresh attempt stays.
    for _ in range(10):
        job = await scene.play(new_worker_claims)
        assert str(job.lease_token) == scene.new.tokens[scene.id]
        assert await scene.new.complete([scene.job]) == {scene.id}


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read", "serializable"])
async def test_a_rescue_that_waited_for_a_lock_takes_nothing_from_the_living(dsn, conn, isolation):
    """Where the snapshot is as old as the transaction, it does not show the heartbeats of that time."""
    owner = await MiniWorker(conn).register(lease_timeout=1)
    await add(conn, NewJob(type="t"))
    await owner.claim()
    vitals = {"threads_used": 1, "completed": 0, "failed": 0, "listening": False}
    async with await psycopg.AsyncConnection.connect(dsn) as holder, await connect(dsn) as janitor:
        await janitor.execute(f"SET default_transaction_isolation = '{isolation}'")
        await holder.execute("LOCK TABLE pgqueue.attempts")
        await workers.heartbeat(conn, owner.worker, **vitals)
        rescuing = asyncio.create_task(rescue.rescue(janitor))
        await blocked(conn, janitor.info.backend_pid)
        await conn.execute("SELECT pg_sleep(1.1)")
        await workers.heartbeat(conn, owner.worker, **vitals)
        await holder.rollback()
        assert await rescuing == (0, 0)


@pytest.mark.parametrize("commits", [True, False])
async def test_a_completion_that_is_under_way_is_not_disturbed(dsn, conn, commits):
    await add(conn, *[NewJob(type="t") for _ in range(5)])
    owner = await MiniWorker(conn).register()
    jobs = await owner.claim()
    await expire(conn, owner)
    async with await connect(dsn) as other:
        await other.execute("BEGIN")
        assert len(await finish.complete(other, completed(owner, [job.id for job in jobs[:3]]))) == 3
        assert await rescue.rescue(conn) == (2, 0), "what is locked is left alone, and not waited for"
        await other.execute("COMMIT" if commits else "ROLLBACK")
    assert await rescue.rescue(conn) == ((0, 0) if commits else (3, 0))
    assert await statuses(conn) == ({"completed": 3, "pending": 2} if commits else {"pending": 5})


async def blocked(conn, pid):
    """Until that session waits for a lock."""
    while not await value(conn, "SELECT count(*) FROM pg_locks WHERE NOT granted AND pid = %s", pid):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("how", ["complete", "fail"])
async def test_what_ends_while_the_partition_of_its_day_is_made(dsn, conn, how):
    """It was on its way to the default partition, and must not go there any more. That is no fault of the job's."""
    today = await value(conn, "SELECT to_char(now() AT TIME ZONE 'UTC', 'YYYYMMDD')")
    await conn.execute(f"DROP TABLE pgqueue.jobs_finished_{today}, pgqueue.attempts_{today}")
    await add(conn, NewJob(type="t", max_attempts=1))
    async with await connect(dsn) as other, await psycopg.AsyncConnection.connect(dsn) as janitor:
        worker = await MiniWorker(other).register()
        jobs = await worker.claim()
        await janitor.execute("SELECT pgqueue.make_partitions()")
        ending = asyncio.create_task(worker.complete(jobs, "1") if how == "complete" else worker.fail(jobs))
        await blocked(conn, other.info.backend_pid)
        await janitor.commit()
        assert len(await ending) == 1
    assert await statuses(conn) == {"completed" if how == "complete" else "failed": 1}
    assert await value(conn, "SELECT array_agg(DISTINCT error) FROM pgqueue.jobs") == [
        None if how == "complete" else "no"
    ]


KEY_USERS = {
    "add_job": "SELECT id FROM pgqueue.add_job('t', idempotency_key => 'k')",
    "insert": "INSERT INTO pgqueue.jobs (type, idempotency_key) VALUES ('t', 'k') RETURNING id",
    # It has seen the job failed and its key expired, and is about to remove it.
    "prune": SQL.prune_keys.replace("idempotency_keys e\n", f"idempotency_keys e CROSS JOIN {GATE}\n")
    .replace("FOR UPDATE SKIP", "FOR UPDATE OF e SKIP")
    .replace("%(limit)s", "10"),
}


@pytest.mark.parametrize("user", KEY_USERS)
async def test_a_job_that_is_retried_after_its_key_expired_has_its_key(dsn, conn, user):
    job = await enqueue.add_job(conn, NewJob(type="t", idempotency_key="k"))
    worker = await MiniWorker(conn).register()
    await worker.fail(await worker.claim(), delay=None)
    await conn.execute("UPDATE pgqueue.idempotency_keys SET expires_at = now()")
    async with await psycopg.AsyncConnection.connect(dsn) as operator, await connect(dsn) as other:
        await operator.execute("SELECT pg_advisory_xact_lock(42)")
        if user != "prune":
            await operator.execute("SELECT pgqueue.retry_job(%s)", [job.id])
        using = asyncio.create_task(other.execute(KEY_USERS[user]))
        await blocked(conn, other.info.backend_pid)
        if user == "prune":
            await control.retry_job(conn, job.id)
        await operator.commit()
        with suppress(psycopg.errors.UniqueViolation):
            await using
    assert await value(conn, "SELECT array_agg(id) FROM pgqueue.jobs") == [job.id]
    assert await value(conn, "SELECT array_agg(job_id) FROM pgqueue.idempotency_keys") == [job.id]


@pytest.mark.parametrize("user", KEY_USERS)
async def test_a_key_that_expires_before_its_transaction_commits(dsn, conn, user):
    """Its job is live, but whoever waited for that transaction, or is about to prune the key, cannot see it."""
    await conn.execute(
        "INSERT INTO pgqueue.idempotency_keys (key, fingerprint, job_id, expires_at) VALUES ('k', '', -1, now())"
    )
    async with await psycopg.AsyncConnection.connect(dsn) as producer, await connect(dsn) as other:
        await conn.execute("SELECT pg_advisory_lock(42)")
        added = await enqueue.add_job(producer, NewJob(type="t", idempotency_key="k"))
        await producer.execute("UPDATE pgqueue.idempotency_keys SET expires_at = clock_timestamp()")
        using = asyncio.create_task(other.execute(KEY_USERS[user]))
        await blocked(conn, other.info.backend_pid)
        await producer.commit()
        await conn.execute("SELECT pg_advisory_unlock(42)")
        with suppress(psycopg.errors.UniqueViolation):
            await using
    assert await value(conn, "SELECT array_agg(id) FROM pgqueue.jobs") == [added.id]
    assert await value(conn, "SELECT array_agg(job_id) FROM pgqueue.idempotency_keys") == [added.id]


async def test_rescue_and_completion_of_the_same_jobs(request, dsn, conn):
    rounds, size = (40, 30) if "pg18" in request.node.name else (10, 30)
    fates = Counter()
    async with AsyncExitStack() as stack:
        hands = [await stack.enter_async_context(await connect(dsn)) for _ in range(5)]
        for _ in range(rounds):
            await conn.execute("DELETE FROM pgqueue.jobs; DELETE FROM pgqueue.attempts; DELETE FROM pgqueue.workers")
            ids = await add(conn, *[NewJob(type="t") for _ in range(size)])
            owner, heir = await MiniWorker(conn).register(), await MiniWorker(conn).register()
            assert len(await owner.claim()) == size
            await expire(conn, owner)
            done = Counter()

            async def finish_all(hand, worker, jobs, done=done):
                """Each of several hands tries to complete all of them, in batches and in an order of its own."""
                random.shuffle(jobs)
                for start in range(0, len(jobs), 7):
                    await asyncio.sleep(random.uniform(0, 0.005))
                    done.update(await finish.complete(hand, completed(worker, jobs[start : start + 7])))

            async def rescue_all(hand):
                await asyncio.sleep(random.uniform(0, 0.02))
                return (await rescue.rescue(hand, random.choice((3, 500)))).jobs

            results = await asyncio.gather(
                *(finish_all(hand, owner, list(ids)) for hand in hands[:3]), *(rescue_all(hand) for hand in hands[3:])
            )
            rescued = sum(results[3:]) + await rescue_all(conn)
            assert set(done.values()) <= {1}
            assert len(done) + rescued == size
            assert await value(conn, "SELECT count(*) FROM pgqueue.attempts") == rescued
            again = await heir.claim()
            assert {job.id for job in again} == set(ids) - done.keys()
            await asyncio.gather(*(finish_all(hand, heir, [job.id for job in again]) for hand in hands[:2]))
            assert done == dict.fromkeys(ids, 1), "each job ends exactly once"
            assert await statuses(conn) == {"completed": size}
            fates["late but first"] += size - rescued
            fates["rescued"] += rescued
    print(dict(fates))
    assert await deadlocks(conn) == 0
    assert min(fates["rescued"], fates["late but first"]) > size, "both must have won now and then"


def outcome(verb, lease):
    now = time.monotonic()
    times = (lease.id, lease.lease_token, now, now, 1)
    match verb:
        case "complete":
            return finish.Completed(*times, None)
        case "fail":
            return finish.Failed(*times, 60.0, "error", "E", "no")
        case "cancel":
            return finish.Cancelled(*times)
        case "snooze":
            return finish.Snoozed(lease.id, lease.lease_token, 60.0)
        case "release":
            return lease


async def test_batches_of_the_same_jobs_in_any_order(dsn, conn):
    """Rows are always locked in the order of their ids, so that nobody waits for somebody who waits for him."""

    async def end_all(hand, verb, leases):
        random.shuffle(leases)
        for start in range(0, len(leases), 50):
            batch = [outcome(verb, lease) for lease in leases[start : start + 50]]
            done.update(set(await getattr(finish, verb)(hand, batch)))

    worker = await MiniWorker(conn).register()
    async with AsyncExitStack() as stack:
        hands = [await stack.enter_async_context(await connect(dsn)) for _ in range(4)]
        for verb in ("complete", "fail", "cancel", "snooze", "release") * 3:
            done = Counter()
            await add(conn, *[NewJob(type="t", max_attempts=100) for _ in range(100)])
            leases = [Lease(job.id, worker.tokens[job.id]) for job in await worker.claim(1000)]
            await asyncio.gather(*(end_all(hand, verb, list(leases)) for hand in hands))
            assert done == dict.fromkeys((lease.id for lease in leases), 1), verb
    assert await deadlocks(conn) == 0


# Everybody at once


async def edit(conn, id):
    await control.edit_job(conn, id, {"priority": random.choice((0, 5)), "payload": [random.random()]})


class Fray:
    """Workers that work, die and come back as zombies; operators, rescuers and janitors, all on the same jobs."""

    def __init__(self, dsn, seconds):
        self.dsn = dsn
        self.deadline = time.monotonic() + seconds
        self.ids = []
        self.completed = Counter()
        self.counts = Counter()
        self.left_behind = []

    def goes_on(self):
        """For as long as it was told to, and until everything has happened now and then."""
        return time.monotonic() < self.deadline or not self.has_raged()

    def has_raged(self):
        return min(self.counts[what] for what in ("batches", "actions", "deaths")) > 5

    async def enqueuer(self, conn):
        while self.goes_on():
            jobs = [
                NewJob(
                    type="t",
                    queue=random.choice(("a", "b")),
                    priority=random.choice((0, 5)),
                    max_attempts=3,
                    delay=random.choice((None, None, 0.05)),
                )
                for _ in range(random.randint(1, 40))
            ]
            async with conn.transaction():
                ids = await add(conn, *jobs)
                await asyncio.sleep(random.choice((0, 0.02)))
            self.ids += ids
            await asyncio.sleep(0.02)

    async def worker(self, conn):
        while self.goes_on():
            worker = await MiniWorker(conn).register()
            for _ in range(random.randint(1, 10)):
                jobs = await worker.claim(random.choice((1, 30)))
                await self.end(worker, jobs)
                await asyncio.sleep(random.uniform(0, 0.01))
            self.counts["deaths"] += 1
            await expire(conn, worker)

    async def end(self, worker, jobs):
        """Some this way, some that way, and in no order."""
        conn = worker.conn
        random.shuffle(jobs)
        while jobs:
            size = random.randint(1, 10)
            batch, jobs = jobs[:size], jobs[size:]
            leases = [Lease(job.id, worker.tokens[job.id]) for job in batch]
            match random.randrange(10):
                case 0 | 1 | 2 | 3:
                    self.completed.update(await worker.complete(batch))
                case 4 | 5:
                    await worker.fail(batch, delay=random.choice((0.0, None)))
                case 6:
                    await finish.snooze(conn, [finish.Snoozed(one.id, one.lease_token, 0.0) for one in leases])
                case 7:
                    await finish.release(conn, leases)
                case 8:
                    now = time.monotonic()
                    await finish.cancel(
                        conn, [finish.Cancelled(one.id, one.lease_token, now, now, 1) for one in leases]
                    )
                case 9:
                    self.left_behind.append((worker, [job.id for job in batch]))
            self.counts["batches"] += 1

    async def zombie(self, conn):
        """Comes back to what it left behind, when others may have it."""
        while self.goes_on():
            await asyncio.sleep(random.uniform(0, 0.05))
            if self.left_behind:
                worker, ids = self.left_behind.pop(random.randrange(len(self.left_behind)))
                self.completed.update(await finish.complete(conn, completed(worker, ids)))

    async def operator(self, conn):
        while self.goes_on():
            await asyncio.sleep(0.001)
            ids = sorted(random.sample(self.ids[-100:], min(len(self.ids), random.choice((1, 1, 5)))))
            async with conn.transaction():
                for id in ids:
                    act = random.choice((control.cancel_job, control.retry_job, edit))
                    try:
                        await act(conn, id)
                        self.counts["actions"] += 1
                    except (JobNotFound, WrongStatus):
                        self.counts["refusals"] += 1

    async def janitor(self, conn):
        while self.goes_on():
            await rescue.rescue(conn, random.choice((5, 500)))
            await promote.promote(conn, promote.DueFloor(), random.choice((5, 500)))
            if random.random() < 0.05:
                await prune.make_partitions(conn)
                await prune.prune(conn, 30)
            await asyncio.sleep(random.uniform(0, 0.02))

    async def run(self):
        hands = [self.enqueuer] + [self.worker] * 3 + [self.zombie] + [self.operator] * 2 + [self.janitor] * 2

        async def alone(hand):
            async with await connect(self.dsn) as conn:
                await hand(conn)

        async with asyncio.TaskGroup() as group:
            for hand in hands:
                group.create_task(alone(hand))


@asynccontextmanager
async def noted_moves(conn):
    """Writes down every move of every job, and checks them all in the end."""
    await conn.execute("CREATE TABLE public.moves (serial bigserial PRIMARY KEY, id bigint, was text, now text)")
    await conn.execute(
        """
        CREATE FUNCTION public.note_move() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            INSERT INTO public.moves (id, was, now) VALUES (coalesce(OLD.id, NEW.id), OLD.status, NEW.status);
            RETURN NULL;
        END $$
        """
    )
    await conn.execute(
        "CREATE TRIGGER note_move AFTER INSERT OR UPDATE OR DELETE ON pgqueue.jobs"
        " FOR EACH ROW EXECUTE FUNCTION public.note_move()"
    )
    yield
    now = {}
    left = {}
    async for id, was, is_now in await conn.execute("SELECT id, was, now FROM public.moves ORDER BY serial"):
        assert now.get(id) == was, f"job {id} was {now.get(id)}, not {was}"
        if is_now is None:
            left[id] = was
        origin = left.pop(id, None) if was is None else was
        if is_now is not None and origin is not None:
            assert origin == is_now or (origin, is_now) in MOVES, f"job {id}: {origin} -> {is_now}"
        now[id] = is_now
    assert not left


async def test_everybody_at_once(request, dsn, conn, record_property):
    fray = Fray(dsn, 8 if "pg18" in request.node.name else 4)
    async with noted_moves(conn):
        await fray.run()
        # When the dust has settled, every job can be brought to its end.
        await conn.execute("UPDATE pgqueue.jobs_live SET run_at = now() WHERE status = 'scheduled'")
        await conn.execute("UPDATE pgqueue.workers SET expires_at = now()")
        await promote.promote(conn, promote.DueFloor(), 100_000)
        await rescue.rescue(conn)
        worker = await MiniWorker(conn).register()
        while jobs := await worker.claim(1000):
            fray.completed.update(await worker.complete(jobs))
    stored = await (await conn.execute("SELECT id, status FROM pgqueue.jobs ORDER BY id")).fetchall()
    assert [id for id, _ in stored] == sorted(fray.ids), "none lost, none doubled"
    assert {status for _, status in stored} <= {"completed", "failed", "cancelled"}
    assert fray.completed == dict.fromkeys((id for id, status in stored if status == "completed"), 1)
    print(f"{len(stored)} jobs, {dict(fray.counts)}, {await statuses(conn)}, {await deadlocks(conn)} deadlocks")
    record_property("deadlocks", await deadlocks(conn))
    assert await deadlocks(conn) == 0
    assert fray.has_raged()


async def test_keys_in_any_order(dsn):
    """Two batches name the same keys in opposite order. One of them is first; the other gets its jobs."""

    async def add_batch(conn, keys):
        return await enqueue.add_jobs(conn, [NewJob(type="t", idempotency_key=key) for key in keys])

    async with await connect(dsn) as one, await connect(dsn) as other:
        for turn in range(30):
            keys = [f"{turn}-{i}" for i in range(8)]
            first, second = await asyncio.gather(add_batch(one, keys), add_batch(other, keys[::-1]))
            assert [added.id for added in first] == [added.id for added in second][::-1]
            assert sorted(a.inserted + b.inserted for a, b in zip(first, second[::-1], strict=True)) == [1] * 8


@pytest.mark.parametrize("server", ["pg18"], indirect=True)
async def test_an_action_on_many_waits_for_none_of_them_for_long(dsn, conn):
    ids = await add(conn, *(NewJob(type="t") for _ in range(50)))
    worker = await MiniWorker(conn).register()
    await worker.claim()
    async with await connect(dsn) as other, other.transaction():
        # The handlers of all but the first, in any language: transactions under their leases.
        for id in ids[1:]:
            await other.execute("SELECT pgqueue.assert_lease(%s, %s)", [id, worker.tokens[id]])
        began = time.monotonic()
        first, *others = await asyncio.wait_for(control.act_on_jobs(conn, ids, "cancel"), 40)
        assert time.monotonic() - began < 10, "it waits once, and not for each of them"
    assert first == (ids[0], "running", None)
    assert {(one.status, one.problem) for one in others[:1]} == {
        (None, f"job {ids[1]} is locked by another transaction: try again when that has ended")
    }
    assert all("is locked" in one.problem for one in others)
    assert await value(conn, "SHOW lock_timeout") == "0"
    assert {one.problem for one in await control.act_on_jobs(conn, ids, "cancel")} == {None}
