"""Ending attempts in batches. Every write is fenced: it holds only while the job has the lease token of the claim.

Each function answers with the ids that it ended. The others' leases are lost: somebody else has the job, or has ended
it, and the result at hand must be dropped.

A job that was asked to stop gets no other attempt: if its attempt fails, is put off or given back, it is cancelled.
Only doubt whether it had its effect goes to the dead letter queue all the same.

Who gives a dict `held` waits for nobody for long: jobs whose rows somebody else holds are left as they are, and put
there, with who holds them. Without one, and in a transaction, a row is waited for.

A value that PostgreSQL cannot store ends its own job, and no other: a result as a failed attempt (`bad_result`), an
error without its text. Left as it was, the job would be running for as long as its worker lives.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, LiteralString, NamedTuple, TypeVar

from psycopg import errors as pg
from psycopg.pq import TransactionStatus

from pgqueue.db import Connection, array, array_of_texts, is_overtaken, retrying
from pgqueue.job import Lease
from pgqueue.log import say
from pgqueue.sql import SQL
from pgqueue.wake import wake

logger = logging.getLogger("pgqueue.finish")

UNSTORABLE = (pg.DataError, pg.IntegrityError, pg.ProgramLimitExceeded, pg.StatementTooComplex, UnicodeEncodeError)
LONGEST_DELAY = 10 * 365 * 86400.0
"""Seconds. What a handler asks for may be infinite or not a number; a job's run_at may not."""
PATIENCE = "500ms"
"""So long does a batch wait for a row that somebody else holds."""


@dataclass(slots=True)
class Ended(Lease):
    """Times are this process's monotonic clock: the database makes instants of their ages."""

    started: float
    ended: float
    threads: int


@dataclass(slots=True)
class Completed(Ended):
    result: str | None
    """JSON text."""


@dataclass(slots=True)
class Failed(Ended):
    delay: float | None
    """Seconds until the next attempt; None: no other attempt, whatever budget is left."""
    reason: str
    error_type: str
    error: str
    traceback: str | None = None


@dataclass(slots=True)
class Cancelled(Ended):
    error: str | None = None


@dataclass(slots=True)
class Snoozed(Lease):
    delay: float


@dataclass(slots=True)
class Written(Lease):
    """Ended already, by the handler's own transaction or as the duplicate of another job."""

    how: str


class Fate(NamedTuple):
    again: bool
    delay: float | None


Released = Lease
L = TypeVar("L", bound=Lease)
T = TypeVar("T")
Held = dict[int, str]


async def complete(conn: Connection, jobs: Sequence[Completed], held: Held | None = None) -> set[int]:
    async def send(batch: Sequence[Completed]) -> set[int]:
        results = None if all(job.result is None for job in batch) else array_of_texts(job.result for job in batch)
        lost = await ids(conn, SQL.complete, {**ages(batch, held), "results": results})
        return {job.id for job in batch if job.id not in lost}

    async def mend(job: Completed, error: Exception) -> set[int]:
        return set(await fail(conn, [unstorable(job, error)], held))

    return await isolating(conn, send, mend, jobs, held)


def unstorable(job: Completed, error: Exception) -> Failed:
    text = f"the result cannot be stored: {error}"
    return Failed(job.id, job.lease_token, job.started, job.ended, job.threads, None, "bad_result", "BadResult", text)


def untellable(job: Failed, error: Exception) -> Failed:
    text = f"the error cannot be stored: {error}"
    return replace(job, error_type=type(error).__name__, error=text, traceback=None)


async def fail(conn: Connection, jobs: Sequence[Failed], held: Held | None = None) -> dict[int, Fate]:
    fates: dict[int, Fate] = {}

    async def send(batch: Sequence[Failed]) -> set[int]:
        parameters = {
            **ages(batch, held),
            "delays": [None if job.delay is None else bounded(job.delay) for job in batch],
            "reasons": [job.reason for job in batch],
            "error_types": [job.error_type for job in batch],
            "errors": [job.error for job in batch],
            "tracebacks": [job.traceback for job in batch],
        }
        cursor = await conn.execute(SQL.fail, parameters, prepare=False)
        answered = {id: Fate(again, delay) for id, again, delay in await cursor.fetchall()}
        fates.update(answered)
        return set(answered)

    async def mend(job: Failed, error: Exception) -> set[int]:
        return await unless_held(conn, send, [untellable(job, error)], held)

    await isolating(conn, send, mend, jobs, held)
    if left := [job for job in jobs if job.id not in fates and job.id not in (held or ())]:
        stopped = [
            Cancelled(job.id, job.lease_token, job.started, job.ended, job.threads, f"{job.error_type}: {job.error}")
            for job in left
        ]
        fates |= dict.fromkeys(await cancel(conn, stopped, held), Fate(False, None))
    return fates


async def cancel(conn: Connection, jobs: Sequence[Cancelled], held: Held | None = None) -> set[int]:
    async def send(batch: Sequence[Cancelled]) -> set[int]:
        return await ids(conn, SQL.cancel, {**ages(batch, held), "errors": [job.error for job in batch]})

    async def mend(job: Cancelled, error: Exception) -> set[int]:
        return await unless_held(conn, send, [replace(job, error=f"the error cannot be stored: {error}")], held)

    return await isolating(conn, send, mend, jobs, held)


async def stop(conn: Connection, jobs: Sequence[Lease], done: set[int], held: Held | None) -> set[int]:
    """Cancels those of the jobs that were left out because they are to stop."""

    async def send(batch: Sequence[Lease]) -> set[int]:
        unknown = array(["NULL"] * len(batch))
        times = {"started_ago": unknown, "ended_ago": array([0] * len(batch)), "threads": unknown}
        return await ids(conn, SQL.cancel, {**leases(batch, held), **times, "errors": [None] * len(batch)})

    left = [job for job in jobs if job.id not in done and job.id not in (held or ())]
    return await unless_held(conn, send, left, held) if left else set()


def completion(job: Completed) -> dict[str, Any]:
    """What complete.sql asks for, to end one job in a transaction of somebody else's."""
    return {**ages([job]), "results": None if job.result is None else [job.result]}


async def snooze(conn: Connection, jobs: Sequence[Snoozed], held: Held | None = None) -> set[int]:
    async def send(batch: Sequence[Snoozed]) -> set[int]:
        delays = array(bounded(job.delay) for job in batch)
        return await ids(conn, SQL.snooze, {**leases(batch, held), "delays": delays})

    if not jobs:
        return set()
    done = await unless_held(conn, send, jobs, held)
    return done | await stop(conn, jobs, done, held)


async def release(conn: Connection, jobs: Sequence[Released], held: Held | None = None) -> set[int]:
    """Gives the jobs back at once and uncharged, and wakes somebody for them. In a transaction that is for the caller
    to do, after its COMMIT, which the lock of all NOTIFYs must not hold up."""

    async def send(batch: Sequence[Released]) -> list[Any]:
        return await (await conn.execute(SQL.release, leases(batch, held), prepare=False)).fetchall()

    back = await unless_held(conn, send, jobs, held)
    if back and conn.info.transaction_status is TransactionStatus.IDLE:
        _, queues, types, demands = map(list, zip(*back, strict=True))
        await wake(conn, queues, types, demands)
    done = {row[0] for row in back}
    return done | await stop(conn, jobs, done, held)


async def start(conn: Connection, job: Lease, threads: int) -> bool:
    """A job that was lost before says that it runs now: if the worker dies again, only it is charged."""
    parameters = {"id": job.id, "lease_token": job.lease_token, "threads": threads}
    return bool(await ids(conn, SQL.start, parameters))


async def progress(conn: Connection, job: Lease, progress: str) -> bool:
    parameters = {"id": job.id, "lease_token": job.lease_token, "progress": progress}
    return bool(await ids(conn, SQL.progress, parameters))


async def owned(conn: Connection, jobs: Sequence[Lease]) -> set[int]:
    """Which leases still stand. It waits for commits that are under way: the way to resolve an unknown outcome."""
    return await ids(conn, SQL.owned, leases(jobs))


async def still_leased(conn: Connection, jobs: Sequence[Lease]) -> set[int]:
    return await ids(conn, SQL.still_leased, leases(jobs))


async def ended(conn: Connection, jobs: Sequence[Lease]) -> set[int]:
    """Which jobs were ended under these very leases."""
    return await ids(conn, SQL.ended, leases(jobs))


async def holders(conn: Connection, jobs: Sequence[Lease]) -> Held:
    """Which of these jobs' rows somebody else holds at this moment, and who. It waits for nobody."""
    try:
        rows = await (await conn.execute(SQL.holders, leases(jobs, {}), prepare=False)).fetchall()
    except pg.LockNotAvailable:
        return {}  # somebody has the whole table
    return dict(rows)


async def unless_held(
    conn: Connection, send: Callable[[Sequence[L]], Awaitable[T]], jobs: Sequence[L], held: Held | None
) -> T:
    """One statement for all of them but those whose rows somebody else holds."""
    while True:
        try:
            return await retrying(partial(send, jobs))
        except pg.LockNotAvailable:
            if held is None or conn.info.transaction_status is TransactionStatus.INERROR:
                raise
        found = await holders(conn, jobs)
        held |= found
        jobs = [job for job in jobs if job.id not in found]


async def isolating(
    conn: Connection,
    send: Callable[[Sequence[L]], Awaitable[set[int]]],
    mend: Callable[[L, Exception], Awaitable[set[int]]],
    jobs: Sequence[L],
    held: Held | None,
) -> set[int]:
    """One statement for all of them; if PostgreSQL cannot store some value, halves, down to the job to mend."""
    if not jobs:
        return set()
    try:
        return await unless_held(conn, send, jobs, held)
    except UNSTORABLE as error:
        if conn.info.transaction_status is TransactionStatus.INERROR or is_overtaken(error):
            # The transaction is the caller's, and so is the error. Or it is no value that is in the way.
            raise
        if len(jobs) == 1:
            return await _mended(mend, jobs[0], error)
    if held:
        jobs = [job for job in jobs if job.id not in held]
    half = len(jobs) // 2
    done = await isolating(conn, send, mend, jobs[:half], held)
    return done | await isolating(conn, send, mend, jobs[half:], held)


async def _mended(mend: Callable[[L, Exception], Awaitable[set[int]]], job: L, error: Exception) -> set[int]:
    """Its row itself may be beyond repair (somebody wrote an attempt of 2^31 - 1): that must not hold up the others."""
    try:
        return await mend(job, error)
    except UNSTORABLE as worse:
        say(logger, logging.ERROR, "job.unwritable", f"job {job.id} cannot be ended: {worse}", job=job.id)
        return set()


def bounded(delay: float) -> float:
    # In this order NaN becomes 0.
    return min(max(0.0, delay), LONGEST_DELAY)


async def ids(conn: Connection, statement: LiteralString, parameters: dict[str, Any]) -> set[int]:
    cursor = await conn.execute(statement, parameters, prepare=False)
    return {id for (id,) in await cursor.fetchall()}


def leases(jobs: Sequence[Lease], held: Held | None = None) -> dict[str, Any]:
    return {
        "ids": array([job.id for job in jobs]),
        "tokens": array([job.lease_token for job in jobs]),
        "patience": None if held is None else PATIENCE,
    }


def ages(jobs: Sequence[Ended], held: Held | None = None) -> dict[str, Any]:
    now = time.monotonic()
    return {
        **leases(jobs, held),
        "threads": array([job.threads for job in jobs]),
        # To the microsecond, as PostgreSQL keeps them: all digits of a float would take three times as long to write.
        "started_ago": array(["%.6f" % (now - job.started) for job in jobs]),
        "ended_ago": array(["%.6f" % (now - job.ended) for job in jobs]),
    }
