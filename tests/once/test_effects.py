"""Keys of effects, the rows that decide about them, and what operators and the janitor do with those."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import date, timedelta
from typing import Annotated, Any
from uuid import UUID

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg import errors as pg
from pydantic import BaseModel, Field, PlainSerializer, PlainValidator

from pgqueue import PgQueue, control, finish, idempotency, prune
from pgqueue.enqueue import add_jobs
from pgqueue.errors import JobNotFound, LeaseLost, WrongStatus
from pgqueue.idempotency import Effect, Standing, effect_key
from pgqueue.job import Lease, NewJob, Status
from pgqueue.outcome import Undecodable
from pgqueue.worker.finisher import settle
from tests.db.queue import MiniWorker, add, value
from tests.once.inside import worker_inside

KEYED = Effect("k", False, 3600)
AT_MOST_ONCE = Effect("k", True, 3600)


# Keys


def test_parts_do_not_run_into_each_other() -> None:
    assert effect_key("a@x.com", "Bob") != effect_key("a@x.co", "mBob")
    assert effect_key("a", "b") != effect_key("ab")
    assert effect_key("a", "") != effect_key("a") != effect_key("", "a")


def test_types_are_told_apart() -> None:
    assert len({effect_key(each) for each in ("1", 1, 1.0, True, None, "None", b"1")}) == 7


@given(st.lists(st.text()), st.lists(st.text()))
def test_keys_are_equal_if_and_only_if_the_parts_are(one: list[str], other: list[str]) -> None:
    assert (effect_key(*one) == effect_key(*other)) == (one == other)


@given(st.text() | st.characters(categories=["Cs"]))
def test_a_key_is_short_and_plain(part: str) -> None:
    assert len(effect_key(part)) == 64
    assert effect_key(part).isascii()


def key_of(handler: Any, payload: str, **options: Any) -> str:
    job_type = PgQueue().job("t", **options)(handler)
    return job_type.effect(7, job_type.decode(payload)[1]).key


def test_the_values_decide_not_how_they_were_written() -> None:
    def handler(n: int, when: date, name: str = "Bob", *, rest: dict[str, int] | None = None) -> None: ...

    once = {"once_per": ("n", "when", "name", "rest")}
    first = key_of(handler, '{"n": 1, "when": "2026-01-02", "rest": {"a": 1, "b": 2}}', **once)
    assert first == key_of(
        handler, '{"rest": {"b": 2, "a": 1}, "n": "1", "name": "Bob", "when": "2026-01-02T00:00:00"}', **once
    )
    assert first != key_of(handler, '{"n": 1, "when": "2026-01-02", "name": "bob", "rest": {"a": 1, "b": 2}}', **once)


def test_only_the_named_arguments_count() -> None:
    def handler(a: int, b: int) -> None: ...

    assert key_of(handler, '{"a": 1, "b": 1}', once_per="a") == key_of(handler, '{"a": 1, "b": 2}', once_per="a")
    assert key_of(handler, '{"a": 1, "b": 1}', once_per="b") != key_of(handler, '{"a": 1, "b": 2}', once_per="b")


def test_types_with_the_same_arguments_have_different_effects() -> None:
    def handler(a: int) -> None: ...

    app = PgQueue()
    one, other = (app.job(name, once_per="a")(handler) for name in ("one", "other"))
    assert one.effect(1, {"a": 1}).key != other.effect(1, {"a": 1}).key


def test_an_alias_is_seen_through() -> None:
    """By its alias the value would not be found, and all jobs would be duplicates of the first."""

    def handler(email: Annotated[str, Field(alias="e-mail")]) -> None: ...

    keys = [key_of(handler, payload, once_per=["email"]) for payload in ('{"e-mail": "a"}', '{"e-mail": "b"}')]
    assert len(set(keys)) == 2


def test_models_ids_and_whole_payloads_have_keys() -> None:
    class Order(BaseModel):
        number: int

    def model(order: Order, by: UUID) -> None: ...
    def whole(payload: Any) -> None: ...

    person = "11111111-1111-1111-1111-111111111111"
    keys = {
        key_of(model, f'{{"order": {{"number": {n}}}, "by": "{person}"}}', once_per=["order", "by"]) for n in (1, 2)
    }
    assert len(keys) == 2
    assert len({key_of(whole, text, once_per=["payload"]) for text in ("1", '"1"', "[1]", "{}", "null")}) == 5


def test_a_value_without_a_json_form_is_refused_not_confused() -> None:
    class Odd:
        def __init__(self, text: str) -> None:
            self.text = text

    def told(odd: Annotated[Any, PlainValidator(Odd), PlainSerializer(lambda odd: odd.text)]) -> None: ...
    def untold(odd: Annotated[Any, PlainValidator(Odd)]) -> None: ...

    assert key_of(told, '{"odd": "a"}', once_per=["odd"]) != key_of(told, '{"odd": "b"}', once_per=["odd"])
    with pytest.raises(Undecodable, match="Odd"):
        key_of(untold, '{"odd": "a"}', once_per=["odd"])


def test_once_per_names_arguments() -> None:
    def handler(a: int, **rest: Any) -> None: ...

    for wrong in ("b", "rest", "ctx"):
        with pytest.raises(TypeError, match=wrong):
            PgQueue().job("t", once_per=[wrong])(handler)


def test_without_once_per_the_effect_is_the_jobs_own() -> None:
    def handler(a: int) -> None: ...

    job_type = PgQueue().job("t", at_most_once=True)(handler)
    assert job_type.effect(1, {"a": 1}) != job_type.effect(2, {"a": 1})
    assert job_type.effect(1, {"a": 1}) == job_type.effect(1, {"a": 2})


# Who has it


class Two:
    """Two running jobs that are about to have the same effect."""

    def __init__(self, conn: psycopg.AsyncConnection, worker: MiniWorker, jobs: list[Any]) -> None:
        self.conn = conn
        self.worker = worker
        self.jobs = jobs

    def lease(self, n: int) -> Lease:
        id = self.jobs[n].id
        return Lease(id, self.worker.tokens[id])

    async def begin(self, n: int, effect: Effect = KEYED) -> Standing:
        return await idempotency.begin_effect(self.conn, self.lease(n), effect)

    async def done(self, n: int, result: str | None = None) -> None:
        async with self.conn.transaction():
            assert await self.worker.complete([self.jobs[n]], result)
            assert await idempotency.effect_done(self.conn, self.jobs[n].id, KEYED, result)

    async def end(self, n: int, **how: Any) -> None:
        await self.worker.fail([self.jobs[n]], delay=None, **how)

    async def duplicate(self, n: int) -> bool:
        return await idempotency.complete_duplicate(self.conn, self.lease(n), "k")


@pytest.fixture
def two(conn: psycopg.AsyncConnection, runner: asyncio.Runner) -> Two:
    async def make() -> Two:
        await add(conn, NewJob(type="t"), NewJob(type="t"))
        worker = await MiniWorker(conn).register()
        return Two(conn, worker, await worker.claim())

    return runner.run(make())


@pytest.mark.parametrize("effect", [KEYED, AT_MOST_ONCE], ids=["keyed", "at_most_once"])
async def test_the_first_has_it_and_the_second_waits(two: Two, effect: Effect) -> None:
    assert await two.begin(0, effect) is Standing.OURS
    assert await two.begin(1, effect) is Standing.BUSY
    assert await two.begin(0, effect) is Standing.AGAIN
    assert not await two.duplicate(1)


async def test_the_second_gets_the_first_ones_result(conn, two: Two) -> None:
    await two.begin(0)
    await two.done(0, '{"sent": 1}')
    assert await two.begin(1) is Standing.DONE
    assert await two.duplicate(1)
    row = await (await conn.execute("SELECT * FROM pgqueue.jobs WHERE id = %s", [two.jobs[1].id])).fetchone()
    assert row is not None
    found = await value(
        conn, "SELECT jsonb_build_array(status, result, reason) FROM pgqueue.jobs WHERE id = %s", row[0]
    )
    assert found == ["completed", {"sent": 1}, f"duplicate of job {two.jobs[0].id}"]


async def test_without_a_lease_nothing_is_begun_or_completed(conn, two: Two) -> None:
    await two.begin(1)
    await two.done(1)
    two.worker.tokens[two.jobs[0].id] = "00000000-0000-0000-0000-000000000000"
    with pytest.raises(LeaseLost):
        await two.begin(0)
    with pytest.raises(LeaseLost):
        await two.begin(0, Effect("other", False, 60))
    assert not await two.duplicate(0)
    assert await value(conn, "SELECT count(*) FROM pgqueue.effects") == 1
    assert await value(conn, "SELECT count(*) FROM pgqueue.jobs_live") == 1


async def test_one_whose_job_is_gone_is_taken_over(two: Two) -> None:
    await two.begin(0)
    await two.end(0)
    assert await two.begin(1) is Standing.OURS


async def test_one_that_must_not_happen_twice_is_not(two: Two) -> None:
    await two.begin(0, AT_MOST_ONCE)
    await two.end(0, reason="in_doubt")
    assert await two.begin(1, AT_MOST_ONCE) is Standing.UNSETTLED


@pytest.mark.parametrize("fate", ["cancelled", "deleted", "failed"])
async def test_a_doubt_whose_job_cannot_be_resolved_is_told_by_the_next(conn, two: Two, fate: str) -> None:
    """Otherwise all that come after it would wait for ever."""
    await two.begin(0, AT_MOST_ONCE)
    id, other = (job.id for job in two.jobs)
    if fate == "cancelled":
        await finish.release(conn, [two.lease(0)])
        await control.cancel_job(conn, id)
    else:
        await two.end(0)
        if fate == "deleted":
            await control.delete_job(conn, id)
    assert await two.begin(1, AT_MOST_ONCE) is Standing.AGAIN
    await two.end(1, reason="in_doubt")
    await conn.execute("SELECT pgqueue.resolve_job(%s, 'retry')", [other])
    assert await value(conn, "SELECT count(*) FROM pgqueue.effects") == 0


async def test_what_the_handler_did_not_do_is_free_again(conn, two: Two) -> None:
    await two.begin(0, AT_MOST_ONCE)
    await idempotency.effect_undone(conn, two.lease(0), AT_MOST_ONCE)
    assert await two.begin(1, AT_MOST_ONCE) is Standing.OURS
    # Somebody else's, or one that is done, is not undone.
    await idempotency.effect_undone(conn, two.lease(0), AT_MOST_ONCE)
    assert await two.begin(1, AT_MOST_ONCE) is Standing.AGAIN
    await two.done(1)
    await idempotency.effect_undone(conn, two.lease(1), AT_MOST_ONCE)
    assert await two.begin(0, AT_MOST_ONCE) is Standing.DONE


async def test_an_error_that_cannot_be_stored_is_the_handlers_word_all_the_same(conn, two: Two) -> None:
    """Such as one with letters that the database's encoding does not have."""
    await conn.execute("ALTER TABLE pgqueue.attempts ADD CHECK (error <> 'unheard of')")
    await two.begin(0, AT_MOST_ONCE)
    lease = two.lease(0)
    failed = finish.Failed(lease.id, lease.lease_token, 0, 0, 1, 60.0, "error", "E", "unheard of")
    assert await settle(conn, failed, AT_MOST_ONCE) == {lease.id: 60.0}
    assert await value(conn, "SELECT error FROM pgqueue.attempts") != "unheard of"
    assert await two.begin(1, AT_MOST_ONCE) is Standing.OURS


async def test_what_an_earlier_attempt_began_is_not_undone_by_a_later_one(conn, two: Two) -> None:
    """Unless it may happen twice."""
    later = Lease(two.jobs[0].id, "00000000-0000-0000-0000-000000000000")
    for effect, left in ((AT_MOST_ONCE, 1), (KEYED, 0)):
        await two.begin(0, effect)
        await idempotency.effect_undone(conn, later, effect)
        assert await value(conn, "SELECT count(*) FROM pgqueue.effects") == left


async def test_past_its_time_it_may_happen_anew(conn, two: Two) -> None:
    await two.begin(0)
    await two.done(0)
    await conn.execute("UPDATE pgqueue.effects SET expires_at = now() - interval '1 s'")
    assert not await two.duplicate(1)
    assert await two.begin(1) is Standing.OURS
    assert await value(conn, "SELECT job_id FROM pgqueue.effects WHERE done_at IS NULL") == two.jobs[1].id


async def test_past_its_time_a_doubt_remains(conn, two: Two) -> None:
    await two.begin(0, AT_MOST_ONCE)
    await two.end(0, reason="in_doubt")
    await conn.execute("UPDATE pgqueue.effects SET expires_at = now() - interval '1 year'")
    assert await two.begin(1, AT_MOST_ONCE) is Standing.UNSETTLED


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[psycopg.AsyncConnection]:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        yield conn


async def somebody_waits(conn: psycopg.AsyncConnection) -> None:
    for _ in range(1000):
        if await value(conn, "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"):
            return
        await asyncio.sleep(0.01)
    pytest.fail("nobody waits for a lock")


async def test_a_job_that_is_newer_than_the_snapshot_is_not_gone(conn, dsn, two: Two) -> None:
    """Otherwise a statement that was held up would take an effect from a job that it cannot see."""
    late = two.lease(0)
    await two.end(1)
    async with connected(dsn) as holder, connected(dsn) as slow:
        async with holder.transaction():
            await holder.execute("SELECT FROM pgqueue.jobs_live WHERE id = %s FOR UPDATE", [late.id])
            waiting = asyncio.create_task(idempotency.begin_effect(slow, late, KEYED))
            await somebody_waits(conn)
            await add(conn, NewJob(type="t"))
            [newer] = await two.worker.claim()
            lease = Lease(newer.id, two.worker.tokens[newer.id])
            assert await idempotency.begin_effect(conn, lease, KEYED) is Standing.OURS
        assert await waiting is Standing.BUSY


async def test_two_at_the_same_time(dsn, two: Two) -> None:
    """The second waits for the first on the key, and has not begun it then."""
    async with connected(dsn) as one, connected(dsn) as other:
        async with one.transaction():
            assert await idempotency.begin_effect(one, two.lease(0), KEYED) is Standing.OURS
            waiting = asyncio.create_task(idempotency.begin_effect(other, two.lease(1), KEYED))
            await asyncio.sleep(0.1)
            assert not waiting.done()
        assert await waiting is Standing.BUSY


async def test_an_end_that_is_under_way_is_waited_for(dsn, two: Two) -> None:
    await two.begin(0)
    async with connected(dsn) as other:
        async with two.conn.transaction():
            await two.worker.complete([two.jobs[0]])
            await idempotency.effect_done(two.conn, two.jobs[0].id, KEYED, None)
            waiting = asyncio.create_task(idempotency.begin_effect(other, two.lease(1), KEYED))
            await asyncio.sleep(0.1)
            assert not waiting.done()
        assert await waiting is not Standing.OURS
    assert await two.begin(1) is Standing.DONE


async def test_only_its_owner_says_that_it_is_done(conn, two: Two) -> None:
    await two.begin(0)
    assert not await idempotency.effect_done(conn, two.jobs[1].id, KEYED, None)
    assert await value(conn, "SELECT done_at FROM pgqueue.effects") is None
    assert await idempotency.effect_done(conn, two.jobs[0].id, KEYED, None)


# Doubts, and how operators end them


async def in_doubt(two: Two) -> int:
    await two.begin(0, AT_MOST_ONCE)
    await two.end(0, reason="in_doubt")
    return int(two.jobs[0].id)


AUDIT = """
    SELECT array_agg(jsonb_build_array(actor, action, reason, detail) ORDER BY id) FROM pgqueue.audit WHERE job_id = %s
"""


async def test_it_happened(conn, two: Two) -> None:
    id = await in_doubt(two)
    answer = await control.resolve_job(conn, id, "completed", result={"ok": 1}, actor="ana", reason="it is in the log")
    assert answer is Status.COMPLETED
    job = await value(conn, "SELECT to_jsonb(j) FROM pgqueue.jobs j WHERE id = %s", id)
    assert (job["status"], job["result"], job["reason"]) == ("completed", {"ok": 1}, "resolved")
    assert await value(conn, AUDIT, id) == [["ana", "resolve", "it is in the log", {"outcome": "completed"}]]
    assert await two.begin(1, AT_MOST_ONCE) is Standing.DONE
    assert await two.duplicate(1)
    assert await value(conn, "SELECT result FROM pgqueue.jobs WHERE id = %s", two.jobs[1].id) == {"ok": 1}


async def test_it_did_not(conn, two: Two) -> None:
    id = await in_doubt(two)
    assert await control.resolve_job(conn, id, "retry", actor="ana") is Status.PENDING
    assert await value(conn, "SELECT status::text FROM pgqueue.jobs WHERE id = %s", id) == "pending"
    actions = [entry[1] for entry in await value(conn, AUDIT, id)]
    assert sorted(actions) == ["resolve", "retry"]
    [job] = await two.worker.claim()
    lease = Lease(job.id, two.worker.tokens[job.id])
    assert await idempotency.begin_effect(conn, lease, AT_MOST_ONCE) is Standing.OURS


async def test_in_sql(conn, two: Two) -> None:
    id = await in_doubt(two)
    assert await value(conn, "SELECT pgqueue.resolve_job(%s, 'retry')::text", id) == "pending"
    with pytest.raises(psycopg.Error, match="only a failed and in doubt job can be resolved") as error:
        await conn.execute("SELECT pgqueue.resolve_job(%s, 'completed')", [id])
    assert error.value.sqlstate == "PQ003"


async def test_resolved_late_it_is_still_remembered(conn, two: Two) -> None:
    """Others have waited for the answer; it must not have expired before it was given."""
    id = await in_doubt(two)
    ago = "interval '9 days'"
    await conn.execute(f"UPDATE pgqueue.effects SET begun_at = begun_at - {ago}, expires_at = expires_at - {ago}")
    await control.resolve_job(conn, id, "completed")
    assert await value(conn, "SELECT expires_at - done_at BETWEEN '59 min' AND '61 min' FROM pgqueue.effects")
    assert await two.begin(1, AT_MOST_ONCE) is Standing.DONE


async def test_what_cannot_be_resolved(conn, two: Two) -> None:
    with pytest.raises(JobNotFound):
        await control.resolve_job(conn, 999, "retry")
    for id in (two.jobs[0].id, two.jobs[1].id):
        with pytest.raises(WrongStatus):
            await control.resolve_job(conn, id, "completed")
    await two.end(1, reason="error")
    with pytest.raises(WrongStatus):
        await control.resolve_job(conn, two.jobs[1].id, "completed")
    id = await in_doubt(two)
    for outcome in ("perhaps", None):
        with pytest.raises(pg.CheckViolation, match="outcome must be completed or retry"):
            await conn.execute("SELECT pgqueue.resolve_job(%s, %s)", [id, outcome])
    assert await value(conn, "SELECT count(*) FROM pgqueue.audit") == 0


async def test_a_doubt_without_an_effect_can_be_resolved_too(conn, two: Two) -> None:
    """Any handler may say that it does not know."""
    await two.end(0, reason="in_doubt")
    assert await control.resolve_job(conn, two.jobs[0].id, "completed") is Status.COMPLETED
    assert await value(conn, "SELECT count(*) FROM pgqueue.effects") == 0


async def test_retried_without_an_answer_it_is_in_doubt_again(conn, two: Two) -> None:
    id = await in_doubt(two)
    await control.retry_job(conn, id)
    [job] = await two.worker.claim()
    lease = Lease(job.id, two.worker.tokens[job.id])
    assert await idempotency.begin_effect(conn, lease, AT_MOST_ONCE) is Standing.AGAIN


# What is forgotten


async def test_only_effects_that_are_done_and_expired_are_forgotten(conn) -> None:
    await conn.execute(
        """
        INSERT INTO pgqueue.effects (key, job_id, done_at, expires_at) VALUES
            ('done and expired', 1, now(), now() - interval '1 s'), ('done', 1, now(), now() + interval '1 h'),
            ('begun', 1, NULL, now() + interval '1 h'), ('begun and expired', 1, NULL, now() - interval '1 year')
        """
    )
    await prune.prune(conn, 30)
    assert await value(conn, "SELECT array_agg(key ORDER BY key) FROM pgqueue.effects") == [
        "begun",
        "begun and expired",
        "done",
    ]


async def test_only_steps_of_jobs_that_cannot_be_retried_are_forgotten(conn) -> None:
    ids = await add(conn, *[NewJob(type=type) for type in ("completed", "failed", "cancelled", "waiting")])
    worker = await MiniWorker(conn, types=["completed", "failed"]).register()
    completed, failed = await worker.claim()
    await worker.complete([completed])
    await worker.fail([failed], delay=None)
    await control.cancel_job(conn, ids[2])
    old = "INSERT INTO pgqueue.steps (job_id, name, created_at) SELECT unnest(%s), 'charge', now() - interval '31 days'"
    await conn.execute(old, [[*ids, 10**9]])
    await prune.prune(conn, 30)
    assert await value(conn, "SELECT array_agg(job_id ORDER BY job_id) FROM pgqueue.steps") == ids[1:]


async def test_only_keys_that_are_expired_and_whose_job_has_ended_are_forgotten(conn) -> None:
    names = ("expired", "fresh", "expired unfinished")
    for name in names:
        await add(conn, NewJob(type=name, idempotency_key=name))
    worker = await MiniWorker(conn, types=["expired", "fresh"]).register()
    await worker.complete(await worker.claim())
    await conn.execute("UPDATE pgqueue.idempotency_keys SET expires_at = now() - interval '1 s' WHERE key <> 'fresh'")
    await prune.prune(conn, 30)
    assert await value(conn, "SELECT array_agg(key ORDER BY key) FROM pgqueue.idempotency_keys") == [
        "expired unfinished",
        "fresh",
    ]


async def test_a_key_that_outlives_its_job_keeps_the_result(conn, dsn) -> None:
    for key, ttl in (("long", 90 * 86400), ("short", 60)):
        await add(conn, NewJob(type="t", idempotency_key=key, key_ttl=ttl))
    worker = await MiniWorker(conn).register()
    await worker.complete(await worker.claim(), '{"paid": 7}')
    # As if it had been long ago.
    ago = "finished_at - interval '40 days'"
    day = await value(conn, f"SELECT min({ago})::date FROM pgqueue.jobs")
    await conn.execute(
        f"CREATE TABLE pgqueue.jobs_finished_{day:%Y%m%d} PARTITION OF pgqueue.jobs_finished"
        f" FOR VALUES FROM ('{day}') TO ('{day + timedelta(days=2)}')"
    )
    await conn.execute(f"UPDATE pgqueue.jobs SET finished_at = {ago}")
    await conn.execute("UPDATE pgqueue.idempotency_keys SET expires_at = now() WHERE key = 'short'")
    async with connected(dsn) as holder, holder.transaction():
        # Somebody repeats the key and does not end: the history waits.
        await holder.execute("SELECT pgqueue.add_job('t', idempotency_key => 'long')")
        assert await prune.prune(conn, 30) == 0
    assert await prune.prune(conn, 30) == 1
    assert await value(conn, "SELECT count(*) FROM pgqueue.jobs") == 0
    assert await value(conn, "SELECT json_object_agg(key, result) FROM pgqueue.idempotency_keys") == {
        "long": {"paid": 7}
    }
    again = await add_jobs(conn, [NewJob(type="t", idempotency_key="long")])
    assert [added.inserted for added in again] == [False]


async def test_one_that_is_in_use_is_passed_over(conn, dsn) -> None:
    await conn.execute("INSERT INTO pgqueue.effects (key, job_id, done_at, expires_at) VALUES ('k', 1, now(), now())")
    async with connected(dsn) as holder:
        async with holder.transaction():
            await holder.execute("SELECT FROM pgqueue.effects FOR UPDATE")
            await asyncio.wait_for(prune.prune(conn, 30), 10)
        assert await value(conn, "SELECT count(*) FROM pgqueue.effects") == 1
    await prune.prune(conn, 30)
    assert await value(conn, "SELECT count(*) FROM pgqueue.effects") == 0


async def test_one_that_cannot_be_begun_is_told_of_and_put_off(conn, dsn, caplog: pytest.LogCaptureFixture) -> None:
    app = PgQueue()

    @app.job("mail", at_most_once=True)
    async def mail() -> None: ...

    await conn.execute("ALTER TABLE pgqueue.effects RENAME TO elsewhere")
    [id] = await add(conn, NewJob(type="mail"))
    async with worker_inside(app, dsn), asyncio.timeout(20):
        while not await value(conn, "SELECT run_at > now() + interval '1 s' FROM pgqueue.jobs"):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        told = [record.getMessage() for record in caplog.records if getattr(record, "event", "") == "effect.refused"]
        assert len(told) == 1
        assert told[0].startswith(f"put off job {id} mail, whose effect cannot be begun: relation")
        await conn.execute("ALTER TABLE pgqueue.elsewhere RENAME TO effects")
        await control.retry_job(conn, id)
        while await value(conn, "SELECT status <> 'completed' FROM pgqueue.jobs"):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert await value(conn, "SELECT attempt FROM pgqueue.jobs") == 1


async def test_an_end_is_known_by_its_token(conn, two: Two) -> None:
    """What a cut COMMIT is resolved by: owned, or ended under this very lease, or neither."""
    lease = two.lease(0)
    assert await finish.owned(conn, [lease]) == {lease.id}
    assert await finish.ended(conn, [lease]) == set()
    await two.worker.complete([two.jobs[0]])
    assert await finish.owned(conn, [lease]) == set()
    assert await finish.ended(conn, [lease]) == {lease.id}
    stranger = Lease(lease.id, "00000000-0000-0000-0000-000000000000")
    assert await finish.ended(conn, [stranger]) == set()
