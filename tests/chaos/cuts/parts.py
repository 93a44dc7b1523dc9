"""The parts of a worker: those that end jobs, claim them, keep their leases, and write for handlers."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import Any

from pgqueue import finish, rescue, steps, workers
from pgqueue.claim import Claimed, Lanes
from pgqueue.db import Connection
from pgqueue.finish import Cancelled, Completed, Failed, Snoozed
from pgqueue.idempotency import Effect, Standing, begin_effect
from pgqueue.job import Lease
from pgqueue.worker.claimer import Claimer
from pgqueue.worker.finisher import Finisher, Outcome
from pgqueue.worker.heartbeat import Heartbeat, Vitals
from pgqueue.worker.janitor import Janitor
from pgqueue.worker.link import Link
from pgqueue.worker.slots import Slots
from tests.chaos.cuts.stage import COMMIT, OUTAGES, Stage, Theatre, counted
from tests.chaos.lab import RESCUE, until
from tests.db.queue import MiniWorker

BATCH = 20
LONG = 3600.0
ADD = "INSERT INTO pgqueue.jobs (queue, type, payload) SELECT %s, 'part', '{}' FROM generate_series(1, %s)"


# Ending jobs


def completed(lease: Lease) -> Outcome:
    now = time.monotonic()
    return Completed(lease.id, lease.lease_token, now, now, 1, '"done"')


def failed(lease: Lease, delay: float | None) -> Outcome:
    now = time.monotonic()
    return Failed(lease.id, lease.lease_token, now, now, 1, delay, "error", "ValueError", "as ordered")


def cancelled(lease: Lease) -> Outcome:
    now = time.monotonic()
    return Cancelled(lease.id, lease.lease_token, now, now, 1, "as ordered")


def snoozed(lease: Lease) -> Outcome:
    return Snoozed(lease.id, lease.lease_token, LONG)


def released(lease: Lease) -> Outcome:
    return lease


ENDS: dict[str, tuple[Callable[[Lease], Outcome], str, int, int, tuple[str, ...]]] = {
    "complete": (completed, "completed", 1, 0, ("complete",)),
    "complete, with an effect": (completed, "completed", 1, 0, ("complete", "effect_done", COMMIT)),
    "fail": (partial(failed, delay=LONG), "scheduled", 1, 1, ("fail",)),
    "fail for good": (partial(failed, delay=None), "failed", 1, 1, ("fail",)),
    "fail, with an effect": (partial(failed, delay=LONG), "scheduled", 1, 1, ("fail", "effect_undone", COMMIT)),
    "stop": (cancelled, "cancelled", 0, 1, ("cancel",)),
    "snooze": (snoozed, "scheduled", 0, 0, ("snooze",)),
    "release": (released, "pending", 0, 0, ("release",)),
}
"""The outcome, then the status, the attempts that are charged, the rows of history, and the statements."""


async def end(theatre: Theatre, path: str) -> None:
    make, status, charged, history, statements = ENDS[path]
    stage = await theatre.stage(path, *statements)
    finisher = Finisher(stage.link(), lambda seconds: None, lambda id, effect: None)
    queue = path.replace(" ", "_").replace(",", "")
    sent = 0
    async with stage.direct() as direct, beside(finisher.run()):
        worker = await MiniWorker(direct, queues=[queue]).register(lease_timeout=LONG)
        async for job, lease in jobs_for(stage, worker, queue):
            effect = Effect(f"{queue} {job.id}", True, LONG) if "effect" in path else None
            if effect is not None:
                await begin_effect(direct, lease, effect)
            finisher.put(make(lease), job, effect)
            sent += 1
            await until(lambda: not len(finisher), f"{path}: it is written", every=0.001)
        finisher.stop()
    await finisher.link.close()
    rows = await theatre.ground.rows(
        "SELECT status::text, attempt, lost, count(*)::int AS jobs,"
        " (SELECT count(*) FROM pgqueue.attempts a WHERE a.job_id = j.id)::int AS history"
        " FROM pgqueue.jobs j WHERE queue = %s GROUP BY 1, 2, 3, 5",
        queue,
    )
    wanted = {"status": status, "attempt": charged, "lost": 0, "history": history}
    left = await theatre.ground.value("SELECT count(*)::int FROM pgqueue.jobs WHERE queue = %s", queue)
    theatre.expect(rows == [wanted | {"jobs": left}], f"{path}: {rows}, not all {wanted}")
    if status in ("completed", "failed", "cancelled"):
        theatre.same(finisher.lost, 0, f"{path}: results that were taken for lost")
    if "effect" in path:
        effects = "SELECT count(*)::int, count(done_at)::int AS done FROM pgqueue.effects WHERE key LIKE %s"
        [row] = await theatre.ground.rows(effects, f"{queue} %")
        wanted = {"count": sent, "done": sent} if status == "completed" else {"count": 0, "done": 0}
        theatre.same(row, wanted, f"{path}: effects")


async def jobs_for(stage: Stage, worker: MiniWorker, queue: str) -> AsyncIterator[tuple[Claimed, Lease]]:
    """Jobs that this worker has claimed, for as long as the stage wants. All that it claims are handed out."""
    while stage.goes_on:
        await worker.conn.execute(ADD.encode(), [queue, BATCH])
        for job in await worker.claim(BATCH):
            yield job, Lease(job.id, worker.tokens[job.id])


# Claiming them


async def claim(theatre: Theatre) -> None:
    """A real claimer, whose jobs end at once. An answer that is lost costs nothing, and no job is handed out twice."""
    stage = await theatre.stage("claim", "claim", "sweep", "claim_parked")
    marks = await theatre.stage("mark idle and busy", "mark_idle", "mark_busy", "may_sleep", wire=stage.wire)
    handled, slots = Counter[int](), Slots(4)
    finisher = Finisher(Link(theatre.ground.dsn, "pgqueue-finish"), lambda seconds: None, lambda id, effect: None)
    async with stage.direct() as direct:
        worker = await MiniWorker(direct, queues=["claims"], threads=4).register(lease_timeout=LONG)
        janitor = janitor_for(stage.link(), worker, lambda: slots.waiting_ids() | finisher.ids())
        claimer = Claimer(
            stage.link(), worker.who, slots, finisher, 0.01, partial(janitor.reconcile, age=0), lambda: True
        )
        async with beside(finisher.run(), claimer.run(), run_all(slots, finisher, claimer, handled)):
            added = 0
            query = "SELECT count(*)::int FROM pgqueue.jobs_live WHERE queue = 'claims'"
            while stage.goes_on or marks.goes_on:
                await direct.execute(ADD.encode(), ["claims", 3])
                added += 3
                await until(lambda: nothing(direct, query), "what is added is claimed and completed", every=0.01)
                if theatre.lab.random.random() < 0.1:
                    await asyncio.sleep(0.05)  # or it would not go to sleep
    for link in (claimer.link, finisher.link):
        await link.close()
    theatre.same(dict(handled), dict.fromkeys(handled, 1), "claim: how often jobs were handed out")
    theatre.same(len(handled), added, "claim: jobs that were handed out")
    row = (
        "SELECT count(*)::int, sum(lost)::int AS lost, max(attempt) AS attempt FROM pgqueue.jobs WHERE queue = 'claims'"
    )
    theatre.same(await theatre.ground.rows(row), [{"count": added, "lost": 0, "attempt": 1}], "claim: what it cost")


async def nothing(conn: Connection, query: str) -> bool:
    row = await (await conn.execute(query.encode())).fetchone()
    return row == (0,)


async def run_all(slots: Slots, finisher: Finisher, claimer: Claimer, handled: Counter[int]) -> None:
    while True:
        if (entry := slots.take()) is None:
            await slots.something_to_do()
            continue
        job, token, threads = entry
        handled[job.id] += 1
        finisher.put(completed(Lease(job.id, token)), job)
        slots.give_back(job, threads)
        claimer.ran(0.01)


def janitor_for(link: Link, worker: MiniWorker, known: Callable[[], set[int]]) -> Janitor:
    return Janitor(
        link,
        worker.who.worker_id,
        poll_interval=1,
        rescue_interval=RESCUE,
        retention_days=30,
        known=known,
        cancel=lambda ids: None,
        ready=lambda: None,
    )


async def claim_and_die(theatre: Theatre) -> float:
    """Whoever claimed does not come back: seconds from the end of its lease until all its jobs were rescued."""
    lease = 1.0
    stage = await theatre.stage("claim and die", "sweep")
    link, claimed = stage.link(), 0
    async with stage.direct() as direct:
        worker = await MiniWorker(direct, queues=["orphans"]).register(lease_timeout=lease)
        while stage.goes_on:
            await direct.execute(ADD.encode(), ["orphans", 1])
            worker.conn, worker.lanes = await link.get(), Lanes()
            try:
                claimed += len(await worker.claim(1))
            except OUTAGES as error:
                claimed += stage.happened("sweep")
                await link.failed(error, "it is dead")
        await link.close()
        await workers.heartbeat(direct, worker.worker, threads_used=0, completed=0, failed=0, listening=False)
        died = time.monotonic()
        query = "SELECT count(*)::int FROM pgqueue.jobs_live WHERE queue = 'orphans' AND status = 'running'"
        theatre.same(await theatre.ground.value(query), claimed, "jobs of claims whose answers were lost")
        while not await nothing(direct, query):
            await asyncio.sleep(RESCUE)
            await rescue.rescue(direct)
        seconds = time.monotonic() - died - lease
    theatre.expect(seconds < RESCUE + 5, f"the jobs of lost claims were rescued {seconds:.1f} s after the lease")
    charged = "SELECT sum(attempt)::int FROM pgqueue.jobs_live WHERE queue = 'orphans'"
    theatre.same(await theatre.ground.value(charged), 0, "attempts that were charged for lost claims")
    return max(0.0, seconds)


# Leases


async def beat(theatre: Theatre) -> None:
    """A real heartbeat; its row is deleted now and then, so that it registers anew."""
    stage = await theatre.stage("heartbeat", "heartbeat")
    registering = await theatre.stage("register", "register_worker", wire=stage.wire)
    vitals = Vitals()
    async with stage.direct() as direct:
        worker = await MiniWorker(direct, queues=["beats"]).register(lease_timeout=1.0)
        heart = Heartbeat(stage.wire.dsn, worker.worker, 0.005, lambda: vitals, lambda pulse: None)
        heart.start()
        mine = "SELECT count(*)::int FROM pgqueue.workers WHERE id = %s AND completed = %s AND stopped_at IS NULL"
        try:
            while stage.goes_on or registering.goes_on:
                await asyncio.sleep(0.02)
                if registering.goes_on:
                    await direct.execute("DELETE FROM pgqueue.workers WHERE id = %s", [worker.who.worker_id])
            vitals.completed = 77
            await until(lambda: theatre.ground.value(mine, worker.who.worker_id, 77), "the heart beats as before")
        finally:
            await asyncio.to_thread(heart.stop)


async def retire(theatre: Theatre) -> None:
    stage = await theatre.stage("retire", "retire_worker")
    link, gone = stage.link(), list[Any]()
    async with stage.direct() as direct:
        while stage.goes_on:
            worker = await MiniWorker(direct, queues=["retired"]).register(lease_timeout=LONG)
            gone.append(worker.who.worker_id)
            await insisting(link, partial(retire_one, worker))
    await link.close()
    query = "SELECT count(*)::int FROM pgqueue.workers WHERE id = ANY(%s) AND stopped_at IS NOT NULL AND completed = 3"
    theatre.same(await theatre.ground.value(query, gone), len(gone), "retired workers")


async def retire_one(worker: MiniWorker, conn: Connection) -> None:
    await workers.retire(conn, worker.who.worker_id, completed=3, failed=0)


# What handlers write


async def write(theatre: Theatre, path: str) -> None:
    """Written again until it is answered, as the next attempt would."""
    statement, kept = WRITES[path]
    stage = await theatre.stage(path, statement)
    link, wanted = stage.link(), {}
    async with stage.direct() as direct:
        worker = await MiniWorker(direct, queues=[statement]).register(lease_timeout=LONG)
        numbers = count(1)
        async for _, lease in jobs_for(stage, worker, statement):
            number = next(numbers)
            wanted[lease.id] = number
            unheard = stage.rules[0].after
            standing = await insisting(link, partial(WRITERS[path], lease, number))
            if standing is not None:
                known = Standing.AGAIN if stage.rules[0].after > unheard else Standing.OURS
                theatre.same(standing, known, "how an effect stands")
    await link.close()
    theatre.same(counted(await theatre.ground.rows(kept, list(wanted))), wanted, path)


async def step(lease: Lease, number: int, conn: Connection) -> None:
    await steps.save_step(conn, lease, "first", str(number))


async def progress(lease: Lease, number: int, conn: Connection) -> None:
    assert await finish.progress(conn, lease, json.dumps(number))


async def start(lease: Lease, number: int, conn: Connection) -> None:
    assert await finish.start(conn, lease, number)


async def intend(lease: Lease, number: int, conn: Connection) -> Standing:
    return await begin_effect(conn, lease, Effect(f"intent {number}", True, LONG))


WRITERS: dict[str, Callable[..., Any]] = {"step": step, "progress": progress, "start": start, "intent": intend}
WRITES: dict[str, tuple[str, str]] = {
    "step": (
        "save_step",
        "SELECT job_id, sum((result #>> '{}')::int)::int FROM pgqueue.steps WHERE job_id = ANY(%s) GROUP BY 1",
    ),
    "progress": ("progress", "SELECT id, (progress #>> '{}')::int FROM pgqueue.jobs_live WHERE id = ANY(%s)"),
    "start": ("start", "SELECT id, threads_used FROM pgqueue.jobs_live WHERE id = ANY(%s)"),
    "intent": (
        "begin_effect",
        "SELECT job_id, sum(split_part(key, ' ', 2)::int)::int FROM pgqueue.effects WHERE job_id = ANY(%s) GROUP BY 1",
    ),
}


# Tools


async def insisting(link: Link, write: Callable[[Connection], Any]) -> Any:
    while True:
        try:
            return await write(await link.get())
        except OUTAGES as error:
            await link.failed(error, "again")


@asynccontextmanager
async def beside(*parts: Any) -> AsyncIterator[None]:
    """These run meanwhile. If one of them fails, so does the whole."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        yield
    finally:
        left = set(tasks)
        while left:
            # Again, because a cancellation that meets a cut comes out of the driver as the cut.
            for task in left:
                task.cancel()
            _, left = await asyncio.wait(left, timeout=1)
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome
