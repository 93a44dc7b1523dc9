"""PostgreSQL's clock is set back: what was written before is in the future now. Nobody waits until the clock is there
again, and no time is negative."""

from datetime import timedelta

import pytest

from pgqueue import control, finish, rescue, workers
from pgqueue.job import NewJob
from tests.db.queue import MiniWorker, add, value

LATER = "interval '1 hour'"


async def set_back(conn):
    """Everything happened an hour later, by the clock of then."""
    await conn.execute(
        f"UPDATE pgqueue.jobs_live SET created_at = created_at + {LATER}, started_at = started_at + {LATER},"
        f" run_at = CASE WHEN type = 'at noon' THEN run_at ELSE run_at + {LATER} END"
    )
    await conn.execute(
        f"UPDATE pgqueue.workers SET heartbeat_at = heartbeat_at + {LATER}, expires_at = expires_at + {LATER},"
        f" last_used_at = last_used_at + {LATER}"
    )


async def negative(conn):
    """What ended before it began."""
    return await value(
        conn,
        "SELECT (SELECT count(*) FROM pgqueue.jobs WHERE finished_at < started_at)"
        " + (SELECT count(*) FROM pgqueue.attempts WHERE finished_at < started_at)"
        " + (SELECT count(*) FROM pgqueue.tallies WHERE seconds < 0 OR wait_seconds < 0)"
        " + (SELECT count(*) FROM pgqueue.job_metrics WHERE least(queue_time, execution_time, total_time) < '0')"
        " + (SELECT count(*) FROM pgqueue.queue_stats WHERE oldest_wait < '0')"
        " + (SELECT count(*) FROM pgqueue.worker_stats WHERE heartbeat_age < '0')",
    )


async def test_the_jobs_of_a_worker_that_died_before_are_rescued(conn):
    dead = await MiniWorker(conn).register(lease_timeout=20)
    await add(conn, *[NewJob(type="t") for _ in range(3)])
    assert len(await dead.claim()) == 3
    await conn.execute(
        "UPDATE pgqueue.jobs_live SET lost = 2, threads_used = 1 WHERE id = (SELECT min(id) FROM pgqueue.jobs_live)"
    )
    await conn.execute(
        "UPDATE pgqueue.jobs_live SET cancel_requested_at = now() WHERE id = (SELECT max(id) FROM pgqueue.jobs_live)"
    )
    await set_back(conn)
    assert (await rescue.rescue(conn)).jobs == 0, "its lease begins anew"
    assert await value(conn, "SELECT max(expires_at) <= clock_timestamp() + interval '20 s' FROM pgqueue.workers")
    await conn.execute("UPDATE pgqueue.workers SET expires_at = now()")
    assert await rescue.rescue(conn) == (3, 1)
    statuses = "SELECT array_agg(status::text ORDER BY id) FROM pgqueue.jobs"
    assert await value(conn, statuses) == ["failed", "pending", "cancelled"]
    assert await value(conn, "SELECT count(*) FROM pgqueue.attempts") == 3
    assert await negative(conn) == 0


async def test_the_living_go_on(conn):
    worker = await MiniWorker(conn).register()
    await add(conn, *[NewJob(type="t") for _ in range(3)])
    jobs = await worker.claim()
    await set_back(conn)
    await workers.heartbeat(conn, worker.worker, threads_used=3, completed=0, failed=0, listening=True)
    assert (await rescue.rescue(conn)).jobs == 0
    assert await negative(conn) == 0
    assert await value(conn, "SELECT last_used_at <= clock_timestamp() FROM pgqueue.workers"), "it is woken in its turn"
    await worker.complete(jobs[:1])
    await worker.fail(jobs[1:2], delay=None)
    await worker.fail(jobs[2:])
    assert await value(conn, "SELECT count(*) FROM pgqueue.job_metrics") == 2
    assert await negative(conn) == 0


async def test_a_claim_whose_answer_was_lost_is_found(conn):
    worker = await MiniWorker(conn).register()
    [id] = await add(conn, NewJob(type="t"))
    await worker.claim()
    assert await workers.claimed_by(conn, worker.who.worker_id, age=10) == []
    await set_back(conn)
    assert [lease.id for lease in await workers.claimed_by(conn, worker.who.worker_id, age=10)] == [id]


@pytest.mark.parametrize("beaten", [False, True])
async def test_what_was_put_off_is_as_far_off_as_it_was_meant_to_be(conn, beaten):
    worker = await MiniWorker(conn).register()
    await add(conn, *[NewJob(type="t") for _ in range(2)], NewJob(type="at noon", delay=7000))
    noon = await value(conn, "SELECT run_at FROM pgqueue.jobs_live WHERE type = 'at noon'")
    failed, snoozed = await worker.claim()
    await worker.fail([failed], delay=30.0)
    await finish.snooze(conn, [finish.Snoozed(snoozed.id, worker.tokens[snoozed.id], 30.0)])
    clock = rescue.Clock()
    await rescue.rescue(conn, clock=clock)
    await set_back(conn)
    clock.seen += timedelta(hours=1)
    if beaten:
        # Before anybody has seen that its last one was in the future.
        await workers.heartbeat(conn, worker.worker, threads_used=0, completed=0, failed=0, listening=False)
    await rescue.rescue(conn, clock=clock)
    far = "SELECT max(run_at) - now() FROM pgqueue.jobs_live WHERE type = 't'"
    assert timedelta(seconds=20) < await value(conn, far) < timedelta(seconds=60)
    assert await value(conn, "SELECT run_at FROM pgqueue.jobs_live WHERE type = 'at noon'") == noon
    moved = await value(conn, far.replace("- now()", ""))
    await rescue.rescue(conn, clock=clock)
    assert await value(conn, far.replace("- now()", "")) == moved, "once"


async def test_what_an_operator_put_off_stays_where_it_is(conn):
    worker = await MiniWorker(conn).register()
    [id] = await add(conn, NewJob(type="at noon"))
    await worker.fail(await worker.claim(), delay=30.0)
    await control.edit_job(conn, id, {"run_at": "2030-01-01T12:00:00Z"})
    await set_back(conn)
    await rescue.rescue(conn)
    assert await value(conn, "SELECT run_at = '2030-01-01 12:00+00' FROM pgqueue.jobs_live")
