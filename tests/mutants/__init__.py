"""Faults that queues have had, put into this one on purpose: for each there is a test that notices it.

`python -m tests.mutants` runs the named tests with and without each of them. The environment variable MUTANT puts one
into every Python process that has tests/mutants/site on its path; the tests of tests/once/test_mutants.py put it into
themselves or into a worker. Nothing of this is known to the product.
"""

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pgqueue.sql import SQL

Patch = Callable[[Any, str, Any], None]
"""setattr, or one that can be undone."""
PATIENCE = 10.0
"""Seconds for Redis: who must hear what it says waits for it."""


@dataclass(frozen=True)
class Mutant:
    name: str
    what: str
    apply: Callable[[Patch], None]
    test: str
    """The one that must fail."""


def altered(patch: Patch, statement: str, old: str, new: str) -> None:
    """A private statement with other words. That it had the old ones is checked, or the fault would be none."""
    text: str = getattr(SQL, statement)
    assert old in text, f"{statement}.sql no longer says {old!r}"
    patch(SQL, statement, text.replace(old, new))


def unfenced_finish(patch: Patch) -> None:
    """Whoever has the job now: its token is looked up by the job's id."""
    tokens = """(
        SELECT array_agg(coalesce(j.lease_token, o.lease_token) ORDER BY o.place)
        FROM unnest(%(ids)s::bigint[], %(tokens)s::uuid[]) WITH ORDINALITY AS o(id, lease_token, place)
        LEFT JOIN pgqueue.jobs_live j USING (id))"""
    altered(patch, "complete", "%(tokens)s::uuid[]", tokens)
    altered(patch, "fail", " AND j.lease_token = e.lease_token", "")


def setnx_before_execute(patch: Patch) -> None:
    from pgqueue import idempotency
    from pgqueue.finish import Completed
    from pgqueue.worker.once import Once

    async def begin(self: Once, job: Any, lease_token: str, threads: int, effect: Any) -> Completed | None:
        assert self.l1 is not None
        if await self.l1._redis.set(idempotency._name(effect.key), job.id, nx=True, ex=86400):
            return None
        now = time.monotonic()
        return Completed(job.id, lease_token, now, now, threads, None)

    patch(Once, "begin", begin)
    patch(idempotency, "BUDGET", PATIENCE)


def trusted_l1(patch: Patch) -> None:
    from pgqueue import idempotency
    from pgqueue.finish import Completed
    from pgqueue.worker.once import Once

    real = Once.begin

    async def begin(self: Once, job: Any, lease_token: str, threads: int, effect: Any) -> Any:
        if self.l1 is not None and await self.l1.is_done(effect.key):
            now = time.monotonic()
            return Completed(job.id, lease_token, now, now, threads, None)
        return await real(self, job, lease_token, threads, effect)

    patch(Once, "begin", begin)
    patch(idempotency, "BUDGET", PATIENCE)


def plain_select_resolution(patch: Patch) -> None:
    altered(patch, "owned", " FOR UPDATE", "")


def rescue_from_a_stale_read(patch: Patch) -> None:
    """What was read is neither locked nor compared with what is there: the update goes by the id."""
    old = "FOR UPDATE SKIP LOCKED"
    lock_and_look = SQL.rescue[SQL.rescue.index("CROSS JOIN LATERAL (SELECT FROM pgqueue.jobs_live j") :].split("\n")[0]
    assert old in SQL.rescue
    patch(SQL, "rescue", SQL.rescue.replace(old, "").replace(lock_and_look, ""))


def no_poll(patch: Patch) -> None:
    from pgqueue.worker.claimer import Claimer

    real = Claimer.__init__

    def init(self: Claimer, *arguments: Any, **named: Any) -> None:
        real(self, *arguments, **named)
        self.poll_interval = 86400.0

    patch(Claimer, "__init__", init)


def unsorted_batches(patch: Patch) -> None:
    """C40 of the fault suite sees it, too: tests/chaos/test_mutants.py."""
    for statement in ("fail", "cancel", "snooze", "release"):
        altered(patch, statement, " ORDER BY id", "")


def heartbeat_on_the_job(patch: Patch) -> None:
    touch = "WITH touched AS (UPDATE pgqueue.jobs_live SET progress = progress WHERE worker_id = %(id)s)\n"
    altered(patch, "heartbeat", "UPDATE pgqueue.workers w\n", touch + "UPDATE pgqueue.workers w\n")


def batch_decoded_at_once(patch: Patch) -> None:
    from pgqueue import claim

    def claimed_row(_: Any) -> Callable[[Any], claim.Claimed]:
        def make(values: Any) -> claim.Claimed:
            job = claim.Claimed._make(values)
            json.loads(job.payload)
            return job

        return make

    patch(claim, "claimed_row", claimed_row)


def heartbeat_from_the_handlers_pool(patch: Patch) -> None:
    from pgqueue.worker.heartbeat import Heartbeat
    from pgqueue.worker.host import WorkerHost
    from pgqueue.worker.runtime import Runtime

    real = Runtime._assemble

    class Sharing(Heartbeat):
        host: WorkerHost

        def start(self) -> None:
            self.task = asyncio.get_running_loop().create_task(self._run())

        async def _run(self) -> None:
            while True:
                with suppress(Exception):
                    async with self.host.held_connection() as conn:
                        await self._beat(conn)
                await asyncio.sleep(self.interval)

        def stop(self) -> None:
            self.task.cancel()

    def assemble(self: Runtime) -> None:
        real(self)
        self.heartbeat.__class__ = Sharing
        self.heartbeat.host = self.host  # type: ignore[attr-defined]

    patch(Runtime, "_assemble", assemble)


MUTANTS = {
    mutant.name: mutant
    for mutant in (
        Mutant(
            "M1",
            "finish without the lease token",
            unfenced_finish,
            "tests/db/test_life.py::test_every_owner_write_is_fenced[pg18]",
        ),
        Mutant(
            "M2",
            "SETNX, skip if it exists, then execute",
            setnx_before_execute,
            "tests/once/test_failpoints.py::test_outcome[tx.begun-in_transaction-once]",
        ),
        Mutant(
            "M3",
            "rescue by id from a stale read",
            rescue_from_a_stale_read,
            "tests/db/test_races.py::test_a_rescue_acts_on_what_is_there_and_not_on_what_it_saw[pg18]",
        ),
        Mutant(
            "M4",
            "no poll, only NOTIFY",
            no_poll,
            "tests/worker/test_wakeups.py::test_without_notify_the_poll_finds_every_job[pg18]",
        ),
        Mutant(
            "M5",
            "batches locked in the caller's order",
            unsorted_batches,
            "tests/db/test_races.py::test_batches_of_the_same_jobs_in_any_order[pg18]",
        ),
        Mutant(
            "M6",
            "heartbeat writes the job's row",
            heartbeat_on_the_job,
            "tests/once/test_commit.py::test_what_the_worker_writes_meanwhile_does_not_disturb[repeatable read-async]",
        ),
        Mutant(
            "M7",
            "Redis is believed without a look at PostgreSQL",
            trusted_l1,
            "tests/once/test_concurrent.py::test_one_effect_a_key_whatever_redis_does[Forged]",
        ),
        Mutant(
            "M8",
            "a cut COMMIT resolved by a plain SELECT",
            plain_select_resolution,
            "tests/once/test_commit.py::test_a_frozen_commit_is_waited_for",
        ),
        Mutant(
            "M9",
            "a claim decodes its batch at once",
            batch_decoded_at_once,
            "tests/db/test_hostile.py::test_strange_jobs_harm_nobody[pg18]",
        ),
        Mutant(
            "M10",
            "heartbeats share the handlers' connections",
            heartbeat_from_the_handlers_pool,
            "tests/once/test_commit.py::test_handlers_that_hold_every_connection_do_not_cost_their_leases",
        ),
    )
}
