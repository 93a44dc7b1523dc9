"""The whole state machine against a simple model of it: Hypothesis invents what happens, and after every step the
database has to look like the model, job by job.

The default is short and always the same. A long run, with steps that were never tried before:

    MODEL_EXAMPLES=2000 python -m pytest tests/db/test_model.py

A failure tells its story: each step, and what it moved. The long run looks for the shortest story, which takes minutes.
"""

import functools
import os
import time
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from pgqueue import claim, control, enqueue, finish, promote, prune, rescue, workers
from pgqueue.errors import InvalidJob, JobNotFound, KeyReused, WrongStatus
from pgqueue.job import LIVE, TRANSITIONS, Lease, NewJob
from tests.db.queue import MiniWorker

EXAMPLES = int(os.environ.get("MODEL_EXAMPLES", "0"))
STEPS = int(os.environ.get("MODEL_STEPS", "60"))

QUEUES = ("q1", "q2", "q3")
KINDS = (
    {"threads": 8},
    {"threads": 2, "types": ["a"]},
    {"threads": 4, "queues": ["q1", "q2"]},
    {"threads": 2, "types": ["b"], "queues": ["q2", "q3"]},
)
LEAVES = {
    "scheduled": "jobs_live",
    "pending": "jobs_live",
    "running": "jobs_live",
    "failed": "jobs_failed",
    "completed": "jobs_finished_",
    "cancelled": "jobs_finished_",
}
# The moves that are not in the table: coming into being, and the end of history.
OTHER_MOVES = {
    "add": {(None, "pending"), (None, "scheduled")},
    "prune": {("completed", None), ("cancelled", None)},
    "nothing": set(),
}

# Small worlds: the same lane, type, key and job come up again and again.
picks = st.integers(0, 63)
some = st.lists(picks, min_size=1, max_size=3)
limits = st.sampled_from((1, 2, 3, 20))
delays = st.sampled_from((0.0, 3600.0))
new_jobs = st.builds(
    NewJob,
    type=st.sampled_from("ab"),
    queue=st.sampled_from(QUEUES),
    priority=st.sampled_from((0, 0, 7, -7)),
    delay=st.sampled_from((None, None, None, 0.0, 3600.0)),
    thread_demand=st.sampled_from((1, 1, 1, 4, 100)),
    max_attempts=st.sampled_from((1, 2, 5)),
)
batches = st.lists(new_jobs, min_size=1, max_size=5)
edits = st.one_of(
    st.just({"payload": {"edited": True}}),
    st.fixed_dictionaries(
        {},
        optional={
            "queue": st.sampled_from(QUEUES),
            "priority": st.sampled_from((0, 7)),
            "thread_demand": st.sampled_from((1, 4)),
            "max_attempts": st.sampled_from((1, 5)),
            "run_at": st.sampled_from(("2020-01-01T00:00:00Z", "2990-01-01T00:00:00Z")),
        },
    ),
)

KEPT = "kept"
"""In place of a seq: what the database says is right, as long as the job is not in line."""


@dataclass
class ModelJob:
    queue: str
    type: str
    priority: int
    demand: int
    max_attempts: int
    key: str | None
    status: str
    parked: bool = False
    attempt: int = 0
    lost: int = 0
    announced: bool = False
    """Whether it said that it runs now, as jobs do that were lost before."""
    cancelling: bool = False
    worker: str | None = None
    token: str | None = None
    reason: str | None = None
    attempts: list[tuple[int, str, str]] = field(default_factory=list)
    seq: Any = None
    """As the database gave it. None: a new place in line, which must be behind all others."""
    run_at: Any = None

    @property
    def lane(self):
        return (self.queue, self.priority)


@dataclass
class ModelKey:
    id: int
    fingerprint: tuple[str, str]
    expired: bool = False


def step(**draws):
    """A rule, and what must hold after it."""

    def make(function):
        @rule(**draws)
        @functools.wraps(function)
        def do_and_check(self, **arguments):
            self.operation = None
            function(self, **arguments)
            # None: there was nothing to do.
            if self.operation is not None:
                self.check()

        return do_and_check

    return make


class Queue(RuleBasedStateMachine):
    runner = conn = late_conn = None

    @initialize()
    def begin(self):
        self.sql(
            "TRUNCATE pgqueue.jobs, pgqueue.attempts, pgqueue.workers, pgqueue.drains, pgqueue.queues,"
            " pgqueue.idempotency_keys, pgqueue.audit"
        )
        # The same story always ends in the same way: the sweep asks random(), the rescue goes by the workers' ids.
        self.sql("SELECT setseed(0)")
        self.jobs = {}
        self.statuses = {}
        self.keys = {}
        self.paused = set()
        self.late = []
        self.dropped = set()
        self.zombies = []
        self.last_seq = 0
        self.actions = 0
        self.due_floor = promote.DueFloor()
        self.hired = 0
        self.alive = []
        for kind in KINDS[:3]:
            self.hire_one(kind)
        # Something to work with from the first step on.
        self.add(
            new=[NewJob(type="ab"[i % 2], queue=QUEUES[i % 3], priority=i % 2 * 7) for i in range(9)], how="in bulk"
        )
        for who in range(3):
            self.sweep(who=who, limit=2)

    def teardown(self):
        if getattr(self, "late", None):
            self.run(self.late_conn.execute("ROLLBACK"))

    # Shortcuts

    def run(self, awaitable):
        return self.runner.run(awaitable)

    def sql(self, query, *parameters):
        async def send():
            cursor = await self.conn.execute(query, parameters)
            return await cursor.fetchall() if cursor.description else []

        return self.run(send())

    def did(self, operation):
        self.operation = operation

    def hire_one(self, kind):
        self.hired += 1
        worker = MiniWorker(self.conn, **kind)
        worker.who.worker_id = UUID(int=self.hired << 64)
        self.alive.append(self.run(worker.register(lease_timeout=600)))

    def one_of(self, number, *statuses):
        found = sorted(id for id, job in self.jobs.items() if not statuses or job.status in statuses)
        return found[number % len(found)] if found else None

    def some_of(self, numbers, *statuses):
        return sorted({self.one_of(number, *statuses) for number in numbers} - {None})

    def mostly(self, number, *statuses):
        """A job that allows it; now and then one that may not, which must be refused."""
        return (self.one_of(number, *statuses) if number % 4 else None) or self.one_of(number)

    def leases(self, ids):
        return [Lease(id, self.jobs[id].token) for id in ids]

    def stale(self, number):
        """A lease that is nobody's any more, for a batch to carry along: it must not be honoured."""
        return [self.zombies[number % len(self.zombies)]] if self.zombies else []

    def end_lease(self, id):
        self.zombies.append(Lease(id, self.jobs[id].token))

    def take_back(self, id):
        self.end_lease(id)
        self.jobs[id].worker = self.jobs[id].token = None

    def make_ready(self, job):
        job.status, job.parked, job.seq = "pending", False, None

    def is_live(self, id):
        return id in self.jobs and self.jobs[id].status in LIVE

    def waits_for(self, worker, job):
        """Whether it is pending in one of the worker's queues."""
        return (
            job.status == "pending"
            and job.queue not in self.paused
            and (worker.who.queues is None or job.queue in worker.who.queues)
        )

    def fits(self, worker, job):
        def knows(who):
            known = who.types is None or job.type in who.types
            return known and (who.queues is None or job.queue in who.queues)

        large = [each for each in self.alive if knows(each.who) and job.demand <= each.who.threads]
        return knows(worker.who) and (worker in large or not large)

    def refused(self, error, action):
        with pytest.raises(error):
            self.run(action)

    # Adding

    def remember(self, id, new):
        self.jobs[id] = ModelJob(
            queue=new.queue,
            type=new.type,
            priority=new.priority,
            demand=new.thread_demand,
            max_attempts=new.max_attempts,
            key=new.idempotency_key,
            status="scheduled" if new.delay else "pending",
        )

    @step(new=batches, how=st.sampled_from(("in bulk", "one by one", "by SQL")))
    def add(self, new, how):
        self.did("add")
        if how == "in bulk":
            ids = [added.id for added in self.run(enqueue.add_jobs(self.conn, new))]
        elif how == "one by one":
            ids = [self.run(enqueue.add_job(self.conn, job)).id for job in new]
        else:
            new = [NewJob(queue=job.queue, type=job.type) for job in new]
            insert = "INSERT INTO pgqueue.jobs (queue, type) VALUES (%s, %s) RETURNING id"
            ids = [self.sql(insert, job.queue, job.type)[0][0] for job in new]
        for id, job in zip(ids, new, strict=True):
            self.remember(id, job)

    @step(
        type=st.sampled_from("ab"), key=st.sampled_from("kl"), payload=st.sampled_from(("{}", "[1]")), old=st.booleans()
    )
    def add_with_key(self, type, key, payload, old):
        self.did("add")
        known = self.keys.get(key)
        if known and old:
            self.sql("UPDATE pgqueue.idempotency_keys SET expires_at = now() WHERE key = %s", key)
            known.expired = True
        new = NewJob(type=type, queue="q1", idempotency_key=key, payload=payload, max_attempts=2)
        if self.is_free(key):
            added = self.run(enqueue.add_job(self.conn, new))
            assert added.inserted
            assert added.id not in self.jobs
            self.keys[key] = ModelKey(added.id, (type, payload))
            self.remember(added.id, new)
        elif known.fingerprint == (type, payload):
            assert self.run(enqueue.add_job(self.conn, new)) == (known.id, False)
        else:
            self.refused(KeyReused, enqueue.add_job(self.conn, new))

    def is_free(self, key):
        known = self.keys.get(key)
        return known is None or (known.expired and not self.is_live(known.id))

    @step(new=batches, commits=st.sampled_from((True, True, False)))
    def transaction(self, new, commits):
        """Enqueues now, and commits or rolls back at its next turn: below the floors that have risen meanwhile."""
        if not self.late:
            self.did("nothing")
            self.run(self.late_conn.execute("BEGIN"))
            self.late = list(zip(self.run(enqueue.add_jobs(self.late_conn, new)), new, strict=True))
            return
        self.did("add")
        self.run(self.late_conn.execute("COMMIT" if commits else "ROLLBACK"))
        for added, job in self.late if commits else ():
            self.remember(added.id, job)
            [(self.jobs[added.id].seq,)] = self.sql("SELECT seq FROM pgqueue.jobs WHERE id = %s", added.id)
        self.late = []

    # Claiming

    def lanes_of(self, ids, lane):
        lanes = {}
        for id in sorted(ids, key=lambda id: (-self.jobs[id].priority, self.jobs[id].seq)):
            lanes.setdefault(lane(self.jobs[id]), []).append(id)
        return lanes

    def check_order(self, lanes, taken, limit, lane):
        """As many as there are or may be, and in each lane those at its head."""
        assert len(taken) == min(limit, sum(map(len, lanes.values())))
        for one, ids in lanes.items():
            mine = [id for id in taken if lane(self.jobs[id]) == one]
            assert mine == ids[: len(mine)], f"in {one} {mine} instead of {ids}"

    def check_priorities(self, lanes, taken):
        lowest = min((self.jobs[id].priority for id in taken), default=0)
        passed = [id for ids in lanes.values() for id in ids if id not in taken and self.jobs[id].priority > lowest]
        assert not passed, f"jobs {passed} have a higher priority than some of {taken}"

    def take(self, worker, claimed):
        for job in claimed.jobs:
            mine = self.jobs[job.id]
            assert (job.attempt, job.lost, job.seq) == (mine.attempt, mine.lost, mine.seq)
            assert job.parked == (not self.fits(worker, mine))
            mine.parked, mine.announced = job.parked, False
            if not job.parked:
                mine.status, mine.worker, mine.token = "running", str(worker.who.worker_id), str(claimed.lease_token)

    @step(who=picks, limit=limits)
    def claim(self, who, limit):
        self.did("claim")
        worker = self.alive[who % len(self.alive)]
        floors = dict(worker.lanes.floors)
        lanes = self.lanes_of(
            [
                id
                for id, job in self.jobs.items()
                if self.waits_for(worker, job) and not job.parked and job.seq >= floors.get(job.lane, 2**63)
            ],
            lambda job: job.lane,
        )
        claimed = self.run(claim.claim(self.conn, worker.who, worker.lanes, limit))
        taken = [job.id for job in claimed.jobs]
        self.check_order(lanes, taken, limit, lambda job: job.lane)
        self.check_priorities(lanes, taken)
        for job in claimed.jobs:
            floors[(job.queue, job.priority)] = max(floors[(job.queue, job.priority)], job.seq - claim.BEHIND)
        assert worker.lanes.floors == floors
        self.take(worker, claimed)

    @step(who=picks, limit=limits)
    def sweep(self, who, limit):
        self.did("claim")
        worker = self.alive[who % len(self.alive)]
        lanes = self.lanes_of(
            [id for id, job in self.jobs.items() if self.waits_for(worker, job) and not job.parked],
            lambda job: job.lane,
        )
        claimed = self.run(claim.sweep(self.conn, worker.who, worker.lanes, limit))
        taken = [job.id for job in claimed.jobs]
        self.check_order(lanes, taken, limit, lambda job: job.lane)
        self.check_priorities(lanes, taken)
        for lane, ids in lanes.items():
            last = max((id for id in taken if id in ids), key=ids.index, default=ids[0])
            floor = max(self.jobs[ids[0]].seq, self.jobs[last].seq - claim.BEHIND)
            assert worker.lanes.floors[lane] == floor, "the floor must be where the lane begins"
        self.take(worker, claimed)

    @step(who=picks, limit=limits)
    def claim_parked(self, who, limit):
        self.did("claim")
        worker = self.alive[who % len(self.alive)]
        kinds = self.lanes_of(
            [
                id
                for id, job in self.jobs.items()
                if self.waits_for(worker, job) and job.parked and self.fits(worker, job)
            ],
            lambda job: (job.queue, job.type),
        )
        claimed = self.run(claim.claim_parked(self.conn, worker.who, limit))
        self.check_order(kinds, [job.id for job in claimed.jobs], limit, lambda job: (job.queue, job.type))
        self.take(worker, claimed)

    @step(who=picks, sweep_first=st.booleans())
    def claim_all(self, who, sweep_first):
        """As a worker does it, until it finds nothing: then there is nothing for it."""
        self.did("claim")
        worker = self.alive[who % len(self.alive)]
        found = True
        while found:
            worker.lanes.next_sweep = 0.0
            worker.lanes.last_sweep = 0.0 if sweep_first else time.monotonic()
            found = self.run(claim.claim_next(self.conn, worker.who, worker.lanes, 20))
            for one in found:
                self.take(worker, one)
        overlooked = [
            id
            for id, job in self.jobs.items()
            if self.waits_for(worker, job) and (not job.parked or self.fits(worker, job))
        ]
        assert not overlooked

    @step(who=picks, limit=limits)
    def claim_in_vain(self, who, limit):
        """Rolled back: the floors have risen, the jobs stay, and only a sweep finds them again."""
        self.did("nothing")
        worker = self.alive[who % len(self.alive)]

        async def roll_back():
            async with self.conn.transaction(force_rollback=True):
                await claim.sweep(self.conn, worker.who, worker.lanes, limit)

        self.run(roll_back())

    # Ending attempts

    @step(numbers=some, other=picks)
    def complete(self, numbers, other):
        if ids := self.some_of(numbers, "running"):
            self.did("complete")
            now = time.monotonic()
            jobs = [
                finish.Completed(lease.id, lease.lease_token, now, now, 1, None)
                for lease in self.leases(ids) + self.stale(other)
            ]
            assert self.run(finish.complete(self.conn, jobs)) == set(ids)
            for id in ids:
                job = self.jobs[id]
                job.status, job.attempt, job.reason = "completed", job.attempt + 1, None
                self.end_lease(id)

    @step(numbers=some, other=picks, delay=st.one_of(st.none(), delays))
    def fail(self, numbers, other, delay):
        if ids := self.some_of(numbers, "running"):
            self.did("fail")
            now = time.monotonic()
            jobs = [
                finish.Failed(lease.id, lease.lease_token, now, now, 1, delay, "error", "E", "no")
                for lease in self.leases(ids) + self.stale(other)
            ]
            fates = self.run(finish.fail(self.conn, jobs))
            assert sorted(fates) == ids
            for id in ids:
                job = self.jobs[id]
                if job.cancelling:
                    assert fates[id] == (False, None)
                    self.stop(id)
                    continue
                job.attempt += 1
                again = delay is not None and job.attempt < job.max_attempts
                assert fates[id] == (again, delay if again else None)
                job.attempts.append((job.attempt, "retried" if again else "failed", "error"))
                if again:
                    job.status, job.reason = "scheduled", "error"
                    self.take_back(id)
                else:
                    spent = delay is not None and job.attempt >= job.max_attempts
                    job.status, job.reason = "failed", "max_attempts" if spent else "error"
                    self.end_lease(id)

    @step(numbers=some, other=picks, delay=delays)
    def snooze(self, numbers, other, delay):
        if ids := self.some_of(numbers, "running"):
            self.did("snooze")
            jobs = [
                finish.Snoozed(lease.id, lease.lease_token, delay) for lease in self.leases(ids) + self.stale(other)
            ]
            assert self.run(finish.snooze(self.conn, jobs)) == set(ids)
            for id in ids:
                if self.jobs[id].cancelling:
                    self.stop(id)
                else:
                    self.jobs[id].status = "scheduled"
                    self.take_back(id)

    @step(numbers=some, other=picks)
    def release(self, numbers, other):
        if ids := self.some_of(numbers, "running"):
            self.did("release")
            assert self.run(finish.release(self.conn, self.leases(ids) + self.stale(other))) == set(ids)
            for id in ids:
                if self.jobs[id].cancelling:
                    self.stop(id)
                else:
                    self.make_ready(self.jobs[id])
                    self.take_back(id)

    @step(number=picks, other=picks)
    def obey_cancel(self, number, other):
        """The workers ask which of their jobs are to stop, and stop them."""
        if number % 2:
            self.cancel_job(number=number)
        asked = {id for id, job in self.jobs.items() if job.status == "running" and job.cancelling}
        if asked:
            self.did("cancel")
            for worker in self.alive:
                mine = sorted(id for id in asked if self.jobs[id].worker == str(worker.who.worker_id))
                leases = self.run(workers.cancellations(self.conn, worker.who.worker_id))
                assert sorted(leases, key=lambda lease: lease.id) == self.leases(mine)
                now = time.monotonic()
                jobs = [
                    finish.Cancelled(lease.id, lease.lease_token, now, now, 1) for lease in leases + self.stale(other)
                ]
                assert self.run(finish.cancel(self.conn, jobs)) == set(mine)
                for id in mine:
                    self.stop(id)

    def stop(self, id):
        job = self.jobs[id]
        job.status = job.reason = "cancelled"
        job.attempts.append((job.attempt + 1, "cancelled", "cancelled"))
        self.end_lease(id)

    @step(numbers=some)
    def announce(self, numbers):
        for id in self.some_of(numbers, "running"):
            self.did("nothing")
            assert self.run(finish.start(self.conn, *self.leases([id]), 1))
            self.jobs[id].announced = True

    @step(number=picks)
    def zombie(self, number):
        """Whatever it tries with a lease that is not its own any more, nothing happens."""
        for old in self.stale(number):
            self.did("nothing")
            conn, run = self.conn, self.run
            now = time.monotonic()
            ended = (old.id, old.lease_token, now, now, 1)
            assert run(finish.complete(conn, [finish.Completed(*ended, '"zombie"')])) == set()
            assert run(finish.fail(conn, [finish.Failed(*ended, 0.0, "error", "Zombie", "no")])) == {}
            assert run(finish.cancel(conn, [finish.Cancelled(*ended)])) == set()
            assert run(finish.snooze(conn, [finish.Snoozed(old.id, old.lease_token, 0.0)])) == set()
            assert run(finish.release(conn, [old])) == set()
            assert not run(finish.start(conn, old, 1))
            assert not run(finish.progress(conn, old, "1"))
            with pytest.raises(psycopg.Error) as error:
                run(conn.execute("SELECT pgqueue.assert_lease(%s, %s)", [old.id, old.lease_token]))
            assert error.value.sqlstate == "PQ001"
            owned = self.some_of(range(64), "running")
            assert run(finish.owned(conn, self.leases(owned) + self.zombies)) == set(owned)
            # Who ended a job, and did not hear of it, can find out; nobody else takes it for his work.
            token = self.jobs[old.id].token if old.id in self.jobs else None
            assert run(finish.ended(conn, [old])) == ({old.id} if token == old.lease_token else set())

    # Time and death

    @step(numbers=st.lists(picks, max_size=3), limit=limits, everywhere=st.booleans())
    def promote(self, numbers, limit, everywhere):
        """Time passes for some jobs. A promoter that looks only from its floor on may overlook them, one that looks
        everywhere may not."""
        past = self.some_of(numbers, "scheduled")
        self.sql("UPDATE pgqueue.jobs_live SET run_at = '2021-01-01+00' WHERE id = ANY (%s)", past)
        times = self.sql(
            "SELECT run_at, id, run_at <= clock_timestamp() FROM pgqueue.jobs_live"
            " WHERE status = 'scheduled' ORDER BY 1, 2"
        )
        if times:
            self.did("promote")
            floor = promote.DueFloor() if everywhere else self.due_floor
            ids = [id for run_at, id, due in times if due and run_at >= floor.run_at][:limit]
            assert self.run(promote.promote(self.conn, floor, limit)) == len(ids)
            for id in past:
                self.jobs[id].run_at = None
            for id in ids:
                self.make_ready(self.jobs[id])
            line = self.sql("SELECT id FROM pgqueue.jobs_live WHERE id = ANY (%s) ORDER BY seq", ids)
            assert [id for (id,) in line] == ids, "who was due first must be first in line"

    @step(
        who=picks,
        how=st.sampled_from(("expires", "retires", "is forgotten")),
        rescued=st.sampled_from((True, True, False)),
    )
    def die(self, who, how, rescued):
        """Its jobs stay with it until a rescue; until then it may still end them."""
        if len(self.alive) == 1:
            self.hire_one(KINDS[0])
        self.sweep(who=who, limit=3)
        self.did("nothing")
        worker_id = self.alive.pop(who % len(self.alive)).who.worker_id
        if how == "retires":
            self.run(workers.retire(self.conn, worker_id))
        elif how == "expires":
            self.sql("UPDATE pgqueue.workers SET expires_at = now() - interval '1 s' WHERE id = %s", worker_id)
        else:
            self.sql("DELETE FROM pgqueue.workers WHERE id = %s", worker_id)
        if rescued:
            self.check()
            self.rescue(limit=500)

    @step(kind=st.sampled_from(KINDS))
    def hire(self, kind):
        if len(self.alive) < 4:
            self.did("nothing")
            self.hire_one(kind)

    @step(limit=st.sampled_from((1, 500)))
    def rescue(self, limit):
        living = {str(worker.who.worker_id) for worker in self.alive}
        orphans = [id for id, job in self.jobs.items() if job.status == "running" and job.worker not in living]
        if orphans:
            self.did("rescue")
            poisoned = 0
            for id in orphans:
                job = self.jobs[id]
                # The second loss makes it a suspect; after that only those are charged that said that they run.
                job.lost += job.lost <= 1 or job.announced
                outcome = "cancelled" if job.cancelling else "failed" if job.lost >= 3 else "retried"
                job.attempts.append((job.attempt + 1, outcome, "worker_lost"))
                self.take_back(id)
                if outcome == "retried":
                    self.make_ready(job)
                else:
                    poisoned += outcome == "failed"
                    job.status, job.reason = outcome, "poison" if outcome == "failed" else "cancelled"
            assert self.run(rescue.rescue(self.conn, limit)) == (len(orphans), poisoned)

    # Operators

    @step(number=picks)
    def cancel_job(self, number):
        self.did("cancel_job")
        id = self.mostly(number, *(("running",) if number % 2 else LIVE))
        job = self.jobs.get(id)
        if job is None:
            self.refused(JobNotFound, control.cancel_job(self.conn, 10**9))
        elif job.status not in LIVE:
            self.refused(WrongStatus, control.cancel_job(self.conn, id))
        elif job.status == "running":
            assert self.run(control.cancel_job(self.conn, id)) == "running"
            job.cancelling = True
            self.actions += 1
        else:
            assert self.run(control.cancel_job(self.conn, id)) == "cancelled"
            job.status = job.reason = "cancelled"
            job.parked = False
            self.actions += 1

    @step(number=picks)
    def retry_job(self, number):
        self.did("retry_job")
        id = self.mostly(number, "failed", "cancelled", "scheduled")
        job = self.jobs.get(id)
        if job is None:
            return self.refused(JobNotFound, control.retry_job(self.conn, 10**9))
        if job.status not in ("failed", "cancelled", "scheduled"):
            return self.refused(WrongStatus, control.retry_job(self.conn, id))
        if job.status != "scheduled":
            if job.key and (job.key not in self.keys or self.keys[job.key].id != id):
                if not self.is_free(job.key):
                    return self.refused(InvalidJob, control.retry_job(self.conn, id))
                [print] = self.sql("SELECT type, payload::text FROM pgqueue.jobs WHERE id = %s", id)
                self.keys[job.key] = ModelKey(id, print)
            elif job.key:
                self.keys[job.key].expired = False  # the job lives again, and so does its key
            job.attempt = job.lost = 0
            job.cancelling = False
            job.reason = job.worker = job.token = None
        assert self.run(control.retry_job(self.conn, id)) == "pending"
        self.actions += 1
        self.make_ready(job)

    @step(number=picks, changes=edits)
    def edit_job(self, number, changes):
        self.did("edit_job")
        id = self.mostly(number, "scheduled", "pending", "failed")
        job = self.jobs.get(id)
        if job is None:
            return self.refused(JobNotFound, control.edit_job(self.conn, 10**9, changes))
        if job.status not in ("scheduled", "pending", "failed"):
            return self.refused(WrongStatus, control.edit_job(self.conn, id, changes))
        [(due,)] = self.sql("SELECT run_at <= clock_timestamp() FROM pgqueue.jobs WHERE id = %s", id)
        self.run(control.edit_job(self.conn, id, changes))
        self.actions += 1
        lane = job.lane
        job.queue = changes.get("queue", job.queue)
        job.priority = changes.get("priority", job.priority)
        job.demand = changes.get("thread_demand", job.demand)
        job.max_attempts = changes.get("max_attempts", job.max_attempts)
        if "run_at" in changes:
            due, job.run_at = changes["run_at"].startswith("2020"), None
        if job.status == "failed":
            return None
        if not due:
            job.status, job.parked, job.seq = "scheduled", False, KEPT
        elif job.status == "scheduled" or job.parked or job.lane != lane:
            self.make_ready(job)
        elif "run_at" in changes:
            job.seq = KEPT
        return None

    @step(queue=st.sampled_from(QUEUES))
    def pause_or_resume(self, queue):
        self.did("nothing")
        self.actions += 1
        act = control.resume_queue if queue in self.paused else control.pause_queue
        self.run(act(self.conn, queue))
        self.paused ^= {queue}

    # The janitor

    @step(numbers=some)
    def prune(self, numbers):
        """Some jobs ended long ago: those that completed or were cancelled go, those that failed stay."""
        if old := self.some_of(numbers, "completed", "cancelled", "failed"):
            self.did("prune")
            self.sql(
                "CREATE TABLE pgqueue.jobs_finished_20200101 PARTITION OF pgqueue.jobs_finished"
                " FOR VALUES FROM ('2020-01-01 00:00+00') TO ('2020-01-02 00:00+00')"
            )
            self.sql("UPDATE pgqueue.jobs SET finished_at = '2020-01-01 12:00+00' WHERE id = ANY (%s)", old)
            assert self.run(prune.prune(self.conn, 30)) == 1
            assert self.run(prune.make_partitions(self.conn)) == 0
            for id in old:
                if self.jobs[id].status != "failed":
                    self.dropped.add(id)
                    del self.jobs[id]
            self.keys = {key: one for key, one in self.keys.items() if not one.expired or self.is_live(one.id)}

    # What must hold after every step

    def check(self):
        self.check_moves()
        self.check_jobs()
        self.check_history()

    def check_moves(self):
        after = {id: job.status for id, job in self.jobs.items()}
        allowed = TRANSITIONS.get(self.operation, OTHER_MOVES.get(self.operation))
        if self.operation in ("fail", "snooze", "release"):
            allowed |= TRANSITIONS["cancel"]  # of what was asked to stop
        for id in sorted(self.statuses.keys() | after.keys()):
            move = (self.statuses.get(id), after.get(id))
            if move[0] != move[1]:
                note(f"        job {id}: {move[0]} -> {move[1]}")
                assert move in allowed, f"job {id}: {move[0]} -> {move[1]} by {self.operation}"
        self.statuses = after

    def check_jobs(self):
        rows = self.sql(
            "SELECT id, tableoid::regclass::text, seq, run_at, worker_id::text, lease_token::text,"
            " threads_used IS NOT NULL, finished_at IS NOT NULL, status::text, parked, queue, type, priority,"
            " thread_demand, max_attempts, attempt, lost, cancel_requested_at IS NOT NULL, reason"
            " FROM pgqueue.jobs ORDER BY id"
        )
        ids = [row[0] for row in rows]
        assert len(ids) == len(set(ids)), f"doubled: {sorted({id for id in ids if ids.count(id) > 1})}"
        assert ids == sorted(self.jobs), f"lost or from nowhere: {set(ids) ^ set(self.jobs)}"
        newest = self.last_seq
        for id, table, seq, run_at, worker, token, announced, finished, *rest in rows:
            job = self.jobs[id]
            assert [id, *rest] == [
                id,
                job.status,
                job.parked,
                job.queue,
                job.type,
                job.priority,
                job.demand,
                job.max_attempts,
                job.attempt,
                job.lost,
                job.cancelling,
                job.reason,
            ]
            assert table.startswith(f"pgqueue.{LEAVES[job.status]}"), f"{job.status} job {id} is in {table}"
            assert finished == (job.status not in LIVE)
            if job.status in LIVE:
                assert (job.status == "running") == (worker is not None) == (token is not None)
                assert (id, worker, token) == (id, job.worker, job.token)
            if job.status == "running":
                assert (id, announced) == (id, job.announced)
            if job.seq is None:
                assert seq > self.last_seq, f"job {id} became ready, but is not at the end of the line"
            elif job.seq != KEPT:
                assert (id, seq) == (id, job.seq)
            job.seq, job.run_at = seq, run_at
            newest = max(newest, seq)
        self.last_seq = newest

    def check_history(self):
        [(attempts, keys, actions)] = self.sql(
            "SELECT (SELECT coalesce(json_agg(json_build_array(job_id, attempt, outcome, reason) ORDER BY id), '[]')"
            "        FROM pgqueue.attempts),"
            "       (SELECT coalesce(json_object_agg(key, job_id), '{}') FROM pgqueue.idempotency_keys),"
            "       (SELECT count(*) FROM pgqueue.audit)"
        )
        told = {}
        for id, *attempt in attempts:
            if id not in self.dropped:
                told.setdefault(id, []).append(tuple(attempt))
        assert told == {id: job.attempts for id, job in self.jobs.items() if job.attempts}
        assert keys == {key: one.id for key, one in self.keys.items()}
        assert actions == self.actions


def test_model(request, dsn, conn, runner, monkeypatch):
    monkeypatch.setattr(claim, "BEHIND", 2)  # its stories are too short for more
    monkeypatch.setattr(rescue, "BESIDE", 3600.0)  # and should not depend on how long they take
    late = runner.run(psycopg.AsyncConnection.connect(dsn, autocommit=True))
    machine = type("Queue", (Queue,), {"runner": runner, "conn": conn, "late_conn": late})
    short = 60 if "pg18" in request.node.name else 15
    try:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=EXAMPLES or short,
                stateful_step_count=STEPS,
                derandomize=not EXAMPLES,
                phases=[Phase.generate, Phase.shrink] if EXAMPLES else [Phase.generate],
                report_multiple_bugs=False,
                database=None,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        runner.run(late.close())
