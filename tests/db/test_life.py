"""The life of a job, one transition after the other, on a real database."""

import json
import time
from uuid import uuid4

import pytest

from pgqueue import control, enqueue, finish, idempotency, promote, prune, read, rescue, workers
from pgqueue.errors import InvalidJob, JobNotFound, KeyReused, WrongStatus
from pgqueue.job import Lease, NewJob, Status
from tests.db.queue import MiniWorker, add, statuses, value


async def test_from_insert_to_history(conn):
    await conn.execute("INSERT INTO pgqueue.jobs (type, payload) VALUES ('mail', '{\"to\": \"a@x.org\"}')")
    worker = await MiniWorker(conn).register()
    [job] = await worker.claim()
    assert (job.type, json.loads(job.payload), job.attempt) == ("mail", {"to": "a@x.org"}, 0)
    assert (await read.get_job(conn, job.id)).status is Status.RUNNING
    assert await worker.complete([job], '{"ok": true}') == {job.id}
    done = await read.get_job(conn, job.id)
    assert (done.status, done.attempt, json.loads(done.result)) == (Status.COMPLETED, 1, {"ok": True})
    assert done.created_at <= done.started_at <= done.finished_at
    assert await worker.complete([job]) == set(), "a finished job cannot be finished again"
    assert await finish.ended(conn, [Lease(job.id, worker.tokens[job.id])]) == {job.id}


async def test_bulk_keeps_order_and_every_column(conn):
    jobs = [
        NewJob(
            type=f"t{i}",
            payload=json.dumps({"i": i}),
            priority=i % 7,
            tags=["a b", 'q"\\'] if i % 2 else [],
            name=f"n{i}",
        )
        for i in range(2000)
    ]
    ids = await add(conn, *jobs)
    assert ids == sorted(ids)
    for i in (0, 1, 999, 1999):
        stored = await read.get_job(conn, ids[i])
        assert (stored.type, json.loads(stored.payload), stored.tags, stored.name) == (
            f"t{i}",
            {"i": i},
            jobs[i].tags,
            f"n{i}",
        )


async def test_rolled_back_jobs_never_were(conn):
    async with conn.transaction(force_rollback=True):
        await add(conn, NewJob(type="t"))
    assert await statuses(conn) == {}


async def test_priority_then_readiness(conn):
    ids = await add(conn, *[NewJob(type="t", priority=p) for p in (1, 5, 10, 5)])
    worker = await MiniWorker(conn).register()
    order = [job.id for _ in range(4) for job in await worker.claim(1)]
    assert order == [ids[2], ids[1], ids[3], ids[0]]


async def test_a_failed_attempt_is_retried_then_dead(conn):
    [id] = await add(conn, NewJob(type="t", max_attempts=2))
    worker = await MiniWorker(conn).register()
    first = await worker.claim()
    assert await worker.fail(first, delay=0.0, error="no\tluck") == {id: finish.Fate(True, 0.0)}
    assert (await read.get_job(conn, id)).status is Status.SCHEDULED
    assert await promote.promote(conn, promote.DueFloor()) == 1
    assert await worker.fail(await worker.claim()) == {id: finish.Fate(False, None)}
    dead = await read.get_job(conn, id)
    assert (dead.status, dead.attempt, dead.reason, dead.error) == (Status.FAILED, 2, "max_attempts", "no")
    assert [(a.attempt, a.outcome, a.error) for a in await read.list_attempts(conn, id)] == [
        (1, "retried", "no\tluck"),
        (2, "failed", "no"),
    ]
    assert await control.retry_job(conn, id, actor="ana", reason="fixed") is Status.PENDING
    again = await read.get_job(conn, id)
    assert (again.attempt, again.status) == (0, Status.PENDING)
    assert len(await read.list_attempts(conn, id)) == 2, "history stays"
    assert await value(conn, "SELECT (actor, reason, action)::text FROM pgqueue.audit") == "(ana,fixed,retry)"


async def test_give_up_snooze_release_cancel(conn):
    ids = await add(conn, *[NewJob(type="t") for _ in range(4)])
    worker = await MiniWorker(conn).register()
    gives_up, snoozes, released, cancelled = await worker.claim()
    assert await worker.fail([gives_up], delay=None, reason="gave_up") == {ids[0]: finish.Fate(False, None)}
    assert await finish.snooze(conn, [finish.Snoozed(ids[1], worker.tokens[snoozes.id], 60)]) == {ids[1]}
    assert await finish.release(conn, [Lease(ids[2], worker.tokens[released.id])]) == {ids[2]}
    assert await control.cancel_job(conn, ids[3]) is Status.RUNNING
    assert await workers.cancellations(conn, worker.who.worker_id) == [Lease(ids[3], worker.tokens[cancelled.id])]
    now = time.monotonic()
    assert await finish.cancel(conn, [finish.Cancelled(ids[3], worker.tokens[ids[3]], now, now, 1)]) == {ids[3]}
    jobs = {job.id: job for job in await read.list_jobs(conn)}
    assert [jobs[id].status for id in ids] == ["failed", "scheduled", "pending", "cancelled"]
    assert [jobs[id].attempt for id in ids] == [1, 0, 0, 0]
    with pytest.raises(WrongStatus, match="is failed: only a scheduled, pending or running job can be cancelled"):
        await control.cancel_job(conn, ids[0])
    with pytest.raises(JobNotFound):
        await control.cancel_job(conn, 10**9)


async def test_a_job_that_is_to_stop_gets_no_other_attempt(conn):
    ids = await add(conn, *[NewJob(type="t") for _ in range(4)])
    worker = await MiniWorker(conn).register()
    fails, snoozed, released, doubtful = await worker.claim()
    for id in ids:
        await control.cancel_job(conn, id)
    assert await worker.fail([fails], delay=0, error="no") == {ids[0]: finish.Fate(False, None)}
    assert await finish.snooze(conn, [finish.Snoozed(ids[1], worker.tokens[snoozed.id], 60)]) == {ids[1]}
    assert await finish.release(conn, [Lease(ids[2], worker.tokens[released.id])]) == {ids[2]}
    assert await worker.fail([doubtful], delay=None, reason="in_doubt") == {ids[3]: finish.Fate(False, None)}
    jobs = [await read.get_job(conn, id) for id in ids]
    assert [(job.status, job.reason) for job in jobs] == [("cancelled", "cancelled")] * 3 + [("failed", "in_doubt")]
    assert jobs[0].error.endswith("no")
    assert all(job.started_at <= job.finished_at for job in jobs)


async def test_a_job_that_was_to_stop_and_may_have_had_its_effect_is_not_just_cancelled(conn):
    ids = await add(conn, *[NewJob(type="t") for _ in range(2)])
    worker = await MiniWorker(conn).register()
    plain, begun = await worker.claim()
    await idempotency.begin_effect(conn, Lease(begun.id, worker.tokens[begun.id]), idempotency.Effect("mail", True, 60))
    for id in ids:
        await control.cancel_job(conn, id)
    await conn.execute("UPDATE pgqueue.workers SET expires_at = now() - interval '1 s'")
    assert await rescue.rescue(conn) == (2, 0)
    assert (await read.get_job(conn, plain.id)).status == "cancelled"
    assert (await read.get_job(conn, begun.id)).status == "pending", "the next attempt finds out"


async def test_every_owner_write_is_fenced(conn):
    [id] = await add(conn, NewJob(type="t"))
    worker = await MiniWorker(conn).register()
    [job] = await worker.claim()
    stranger = Lease(id, str(uuid4()))
    worker.tokens[id] = stranger.lease_token
    now = time.monotonic()
    assert await worker.complete([job]) == set()
    assert await worker.fail([job]) == {}
    assert await finish.snooze(conn, [finish.Snoozed(id, stranger.lease_token, 1)]) == set()
    assert await finish.release(conn, [stranger]) == set()
    assert await finish.cancel(conn, [finish.Cancelled(id, stranger.lease_token, now, now, 1)]) == set()
    assert not await finish.start(conn, stranger, 1)
    assert not await finish.progress(conn, stranger, "1")
    assert await finish.owned(conn, [stranger]) == set()
    assert await statuses(conn) == {"running": 1}


async def test_a_clock_that_is_set_back_keeps_no_dead_worker_alive(conn):
    await add(conn, NewJob(type="t"))
    dead = await MiniWorker(conn).register(lease_timeout=30)
    assert len(await dead.claim()) == 1
    # As if its last heartbeat had been sent two hours from now.
    later = "UPDATE pgqueue.workers SET heartbeat_at = heartbeat_at + %s, expires_at = expires_at + %s"
    await conn.execute(later, ["2 hours", "2 hours"])
    assert await rescue.rescue(conn) == rescue.Rescued(0, 0)
    left = await value(conn, "SELECT extract(epoch FROM expires_at - clock_timestamp()) FROM pgqueue.workers")
    assert 25 < left <= 30, "its lease is as long as a lease is"


async def test_rescue_takes_only_what_no_live_worker_owns(conn):
    await add(conn, *[NewJob(type="t") for _ in range(4)])
    alive = await MiniWorker(conn).register()
    dead = await MiniWorker(conn).register()
    unknown = MiniWorker(conn)
    [kept] = await alive.claim(1)
    [lost] = await dead.claim(1)
    [orphan] = await unknown.claim(1)
    await conn.execute(
        "UPDATE pgqueue.workers SET expires_at = now() - interval '1 s' WHERE id = %s", [dead.who.worker_id]
    )
    assert await rescue.rescue(conn) == rescue.Rescued(2, 0)
    assert (await read.get_job(conn, kept.id)).status is Status.RUNNING
    for job in (lost, orphan):
        stored = await read.get_job(conn, job.id)
        assert (stored.status, stored.lost, stored.attempt) == (Status.PENDING, 1, 0)
    assert await dead.complete([lost]) == set(), "the zombie comes too late"
    assert await value(conn, "SELECT state FROM pgqueue.workers WHERE id = %s", dead.who.worker_id) == "unavailable"
    assert await rescue.rescue(conn) == rescue.Rescued(0, 0)


async def test_a_job_that_kills_its_workers_is_quarantined_and_its_mates_are_not(conn):
    ids = await add(conn, *[NewJob(type="t") for _ in range(3)])
    for death in range(1, 4):
        worker = MiniWorker(conn)
        jobs = await worker.claim()
        if death > 2:
            # A suspect runs alone, and says so before it starts.
            assert await finish.start(conn, Lease(ids[0], worker.tokens[ids[0]]), 1)
        assert len(jobs) == 3
        await rescue.rescue(conn)
    poison, *mates = [await read.get_job(conn, id) for id in ids]
    assert (poison.status, poison.reason, poison.lost) == (Status.FAILED, "poison", 3)
    assert [(mate.status, mate.lost) for mate in mates] == [(Status.PENDING, 2)] * 2


async def test_a_suspect_beside_jobs_that_came_later_is_not_yet_poison(conn):
    [suspect] = await add(conn, NewJob(type="t"))
    for death in range(1, 10):
        worker = MiniWorker(conn)
        await worker.claim()
        if death > 2:
            assert await finish.start(conn, Lease(suspect, worker.tokens[suspect]), 1)
            later = "UPDATE pgqueue.jobs_live SET started_at = started_at - interval '2 s' WHERE id = %s"
            await conn.execute(later, [suspect])
            await add(conn, NewJob(type="t"))
            await worker.claim(1)
        stored = await read.get_job(conn, suspect)
        assert (stored.status, stored.lost) == (Status.RUNNING, death - 1)
        await rescue.rescue(conn)
        await conn.execute("DELETE FROM pgqueue.jobs_live WHERE id <> %s", [suspect])
    stored = await read.get_job(conn, suspect)
    assert (stored.status, stored.reason, stored.lost) == (Status.FAILED, "poison", 9)


async def test_idempotency_keys(conn):
    first = await enqueue.add_job(conn, NewJob(type="t", payload='{"a": 1}', idempotency_key="k"))
    again = await enqueue.add_job(conn, NewJob(type="t", payload='{"a":1}', idempotency_key="k"))
    assert (first.inserted, again) == (True, enqueue.Added(first.id, False))
    with pytest.raises(KeyReused, match="another type or payload"):
        await enqueue.add_job(conn, NewJob(type="t", payload='{"a": 2}', idempotency_key="k"))
    with pytest.raises(InvalidJob, match='"k" belongs to another job'):
        await conn_insert(conn, "k")
    # Past its time, but its job has not finished: the key stays.
    await conn.execute("UPDATE pgqueue.idempotency_keys SET expires_at = now()")
    assert not (await enqueue.add_job(conn, NewJob(type="t", payload='{"a": 1}', idempotency_key="k"))).inserted
    await prune.prune(conn, 30)
    assert await value(conn, "SELECT count(*) FROM pgqueue.idempotency_keys") == 1
    worker = await MiniWorker(conn).register()
    await worker.complete(await worker.claim())
    later = await enqueue.add_job(conn, NewJob(type="t", payload='{"a": 1}', idempotency_key="k"))
    assert later.inserted
    assert later.id != first.id


async def conn_insert(conn, key):
    from pgqueue.db import translated

    with translated():
        await conn.execute("INSERT INTO pgqueue.jobs (type, idempotency_key) VALUES ('t', %s)", [key])


async def test_a_retried_job_keeps_its_key_or_is_refused(conn):
    job = await enqueue.add_job(conn, NewJob(type="t", idempotency_key="k"))
    worker = await MiniWorker(conn).register()
    await worker.fail(await worker.claim(), delay=None)
    assert await control.retry_job(conn, job.id) is Status.PENDING
    await worker.fail(await worker.claim(), delay=None)
    await conn.execute("UPDATE pgqueue.idempotency_keys SET expires_at = now()")
    other = await enqueue.add_job(conn, NewJob(type="t", idempotency_key="k"))
    assert other.inserted
    with pytest.raises(InvalidJob, match="belongs to another job"):
        await control.retry_job(conn, job.id)
    assert (await read.get_job(conn, job.id)).status is Status.FAILED, "nothing was half done"


async def test_jobs_that_a_worker_cannot_run_are_parked_for_one_that_can(conn):
    foreign, big, plain = await add(
        conn, NewJob(type="foreign"), NewJob(type="known", thread_demand=6), NewJob(type="known")
    )
    small = await MiniWorker(conn, types=["known"], threads=4).register()
    large = await MiniWorker(conn, types=["known"], threads=8).register()
    # Larger still, but of no use for these.
    await MiniWorker(conn, types=["known"], threads=200, queues=["other"]).register()
    await MiniWorker(conn, types=["unknown"], threads=200).register()
    assert [job.id for job in await small.claim()] == [plain]
    assert await small.claim() == []
    assert [job.id for job in await large.claim()] == [big]
    knowing = await MiniWorker(conn, types=["foreign"], threads=1).register()
    assert [job.id for job in await knowing.claim()] == [foreign]
    # No live worker is large enough any more: a small one takes it.
    [huge] = await add(conn, NewJob(type="known", thread_demand=100))
    assert [job.id for job in await small.claim()] == [huge]
    [waiting] = await add(conn, NewJob(type="known", thread_demand=6))
    assert await small.claim() == []
    await workers.retire(conn, large.who.worker_id)
    assert [job.id for job in await small.claim()] == [waiting]


async def test_paused_queues_rest(conn):
    mail, other = await add(conn, NewJob(type="t", queue="mail"), NewJob(type="t"))
    await control.pause_queue(conn, "mail", actor="ana", reason="smtp down")
    worker = await MiniWorker(conn).register()
    assert [job.id for job in await worker.claim()] == [other]
    [paused, *_] = await read.why(conn, mail)
    assert paused.reason == "paused"
    assert "ana" in paused.detail
    assert "smtp down" in paused.detail
    await control.resume_queue(conn, "mail")
    assert [job.id for job in await worker.claim()] == [mail]


async def test_edit(conn):
    [id] = await add(conn, NewJob(type="t"))
    await control.edit_job(conn, id, {"payload": {"x": 1}, "priority": 9, "queue": "q2"}, actor="ana")
    job = await read.get_job(conn, id)
    assert (json.loads(job.payload), job.priority, job.queue) == ({"x": 1}, 9, "q2")
    assert await value(conn, "SELECT detail->'was' FROM pgqueue.audit") == {
        "payload": {},
        "priority": 0,
        "queue": "default",
    }
    with pytest.raises(InvalidJob, match="priority must be between -1000 and 1000"):
        await control.edit_job(conn, id, {"priority": 5000})
    with pytest.raises(InvalidJob, match="status cannot be edited"):
        await control.edit_job(conn, id, {"status": "completed"})
    worker = await MiniWorker(conn).register()
    await worker.claim()
    with pytest.raises(WrongStatus, match="is running"):
        await control.edit_job(conn, id, {"priority": 1})


async def test_lists_page_without_gap_or_overlap(conn):
    ids = await add(conn, *[NewJob(type="t", queue="a" if i % 2 else "b") for i in range(25)])
    worker = await MiniWorker(conn).register()
    jobs = await worker.claim(12)
    await worker.complete(jobs[:6])
    await worker.fail(jobs[6:], delay=None)
    pages, before = [], None
    while page := await read.list_jobs(conn, before=before, limit=10):
        pages.append([job.id for job in page])
        before = page[-1].id
        await add(conn, NewJob(type="later"))
    assert [len(page) for page in pages] == [10, 10, 5]
    assert [id for page in pages for id in page] == sorted(ids, reverse=True)
    assert {job.queue for job in await read.list_jobs(conn, queue="a")} == {"a"}
    first = await read.list_failed(conn, limit=4)
    rest = await read.list_failed(conn, before=(first[-1].finished_at, first[-1].id), limit=4)
    assert (len(first), len(rest)) == (4, 2)
    assert await read.count_jobs(conn, Status.FAILED) == read.Count(6, True)


async def test_history_is_dropped_by_partitions(conn):
    await add(conn, NewJob(type="t"), NewJob(type="t"))
    worker = await MiniWorker(conn).register()
    old, new = await worker.claim()
    await worker.complete([old, new])
    # As if it had ended long ago, when nobody had made that day's partition.
    await conn.execute("UPDATE pgqueue.jobs SET finished_at = now() - interval '40 days' WHERE id = %s", [old.id])
    assert await value(conn, "SELECT count(*) FROM pgqueue.jobs_finished_default") == 1
    await conn.execute("SELECT pgqueue.make_partitions(1)")
    await conn.execute(
        "CREATE TABLE pgqueue.jobs_finished_20200101 PARTITION OF pgqueue.jobs_finished"
        " FOR VALUES FROM ('2020-01-01') TO ('2020-01-02')"
    )
    assert await prune.prune(conn, 30) == 1
    assert (await read.get_job(conn, new.id)).status is Status.COMPLETED
    assert await prune.make_partitions(conn) == 0


async def test_what_the_default_partition_caught_goes_when_its_time_is_over(conn):
    ids = await add(conn, *[NewJob(type="t", idempotency_key=f"k{n}", key_ttl=86400.0 * 90) for n in range(3)])
    worker = await MiniWorker(conn).register()
    await worker.complete(await worker.claim(), '{"paid": 7}')
    await conn.execute(
        "INSERT INTO pgqueue.attempts (job_id, attempt, outcome, reason)"
        " SELECT id, 1, 'retried', 'error' FROM pgqueue.jobs"
    )
    for id, days in zip(ids, (20, 40, 400), strict=True):
        for table, column in (("jobs_finished", "id"), ("attempts", "job_id")):
            await conn.execute(
                f"UPDATE pgqueue.{table} SET finished_at = now() - %s * interval '1 day' WHERE {column} = %s",
                [days, id],
            )
    assert await value(conn, "SELECT count(*) FROM pgqueue.jobs_finished_default, pgqueue.attempts_default") == 9
    await prune.prune(conn, 30)
    assert await value(conn, "SELECT array_agg(id) FROM pgqueue.jobs") == ids[:1]
    assert await value(conn, "SELECT array_agg(job_id) FROM pgqueue.attempts") == ids[:1]
    kept = "SELECT array_agg(job_id ORDER BY job_id) FROM pgqueue.idempotency_keys WHERE result = '{\"paid\": 7}'"
    assert await value(conn, kept) == ids[1:], "the keys outlive their jobs"


async def test_rows_that_the_default_partition_caught_move_home(conn):
    await add(conn, NewJob(type="t"))
    worker = await MiniWorker(conn).register()
    today = await value(conn, "SELECT to_char(now() AT TIME ZONE 'UTC', 'YYYYMMDD')")
    await conn.execute(f"DROP TABLE pgqueue.jobs_finished_{today}")
    await worker.complete(await worker.claim())
    assert await value(conn, "SELECT count(*) FROM pgqueue.jobs_finished_default") == 1
    assert await prune.make_partitions(conn) == 1
    assert await value(conn, "SELECT count(*) FROM pgqueue.jobs_finished_default") == 0
    assert await statuses(conn) == {"completed": 1}
