"""Those who add jobs, one or many, with and without keys; and those who lose patience."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import count

import psycopg

from pgqueue import PgQueue
from pgqueue.enqueue import add_jobs
from pgqueue.errors import DatabaseUnavailable
from pgqueue.job import NewJob
from tests.chaos.cuts.stage import COMMIT, Stage, Theatre, counted, nonzero
from tests.chaos.lab import until

MANY = 4
Add = Callable[[PgQueue, str], Awaitable[object]]


async def one(app: PgQueue, mark: str) -> None:
    await app.enqueue("part", {"mark": mark}, queue="made")


async def one_with_a_key(app: PgQueue, mark: str) -> None:
    await app.enqueue("part", {"mark": mark}, queue="made", idempotency_key=mark)


async def many_alike(app: PgQueue, mark: str) -> None:
    await app.types["part"].enqueue_many([{"mark": mark}] * MANY)


async def many(app: PgQueue, mark: str) -> None:
    async with app.pools.connection() as conn, conn.transaction():
        await add_jobs(conn, [new_job(mark, priority=number) for number in range(MANY)])


async def many_with_keys(app: PgQueue, mark: str) -> None:
    async with app.pools.connection() as conn:
        await add_jobs(conn, [new_job(mark, idempotency_key=f"{mark} {number}") for number in range(MANY)])


def new_job(mark: str, **options: object) -> NewJob:
    return NewJob(type="part", queue="made", payload=json.dumps({"mark": mark}), **options)  # type: ignore[arg-type]


PATHS: dict[str, tuple[Add, int, bool, tuple[str, ...]]] = {
    "enqueue": (one, 1, False, ("add_job",)),
    "enqueue with a key": (one_with_a_key, 1, True, ("add_job",)),
    "enqueue many alike": (many_alike, MANY, False, ("add_alike", COMMIT)),
    "enqueue many": (many, MANY, False, ("add_jobs", COMMIT)),
    "enqueue many with keys": (many_with_keys, MANY, True, ("lock_keys", "add_job", COMMIT)),
}
"""How, how many, whether it is safe to repeat, and the statements; the last one commits."""


async def part(mark: str) -> None: ...


def app_behind(stage: Stage) -> PgQueue:
    app = PgQueue(stage.wire.dsn)
    app.job(name="part", queue="made")(part)
    return app


async def add(theatre: Theatre, path: str) -> None:
    how, size, repeats, statements = PATHS[path]
    stage = await theatre.stage(path, *statements)
    expected = Counter[str]()
    async with app_behind(stage) as app:
        for number in count():
            if not stage.goes_on:
                break
            mark = f"{path} {number}"
            while True:
                try:
                    await how(app, mark)
                except (DatabaseUnavailable, psycopg.OperationalError):
                    done = stage.happened(statements[-1])
                    expected[mark] += size if done and not repeats else 0
                    if not repeats:
                        break
                else:
                    expected[mark] += size
                    break
    query = "SELECT payload->>'mark', count(*)::int FROM pgqueue.jobs WHERE payload->>'mark' LIKE %s GROUP BY 1"
    # Followed by a number: "enqueue" is not "enqueue many".
    found = counted(await theatre.ground.rows(query.replace("LIKE", "~"), f"^{path} [0-9]+$"))
    theatre.same(found, nonzero(expected), path)


async def lose_patience(theatre: Theatre, tries: int) -> dict[str, int]:
    """The caller's task is cancelled while it waits for an answer, be it that to COMMIT."""
    stage = await theatre.stage("impatience")
    stage.wire.delay = 0.004
    expected, unsure, usual = Counter[str](), set[str](), 0.0
    async with app_behind(stage) as app:
        for number in range(tries):
            mark = f"impatience {number}"
            # Every fourth has patience, and tells how much the others need.
            patience = theatre.lab.random.uniform(0, 1.1 * usual) if number % 4 else None
            began = time.monotonic()
            try:
                async with asyncio.timeout(patience):
                    await many_alike(app, mark)
                expected[mark] = MANY
            except TimeoutError:
                unsure.add(mark)
            if patience is None:
                usual = time.monotonic() - began
        stage.wire.delay = 0.0
        for number in range(8):
            await many_alike(app, f"impatience after {number}")  # on each connection of the pool, as before
            expected[f"impatience after {number}"] = MANY
        clean = "SELECT count(*) = 0 FROM pg_stat_activity WHERE datname = current_database()"
        clean += " AND application_name = 'pgqueue-producer' AND state NOT IN ('idle', 'active')"
        # The pool rolls back on its own time.
        await until(lambda: theatre.ground.value(clean), "no connection of a pool is left in a transaction", 30)
    query = "SELECT payload->>'mark', count(*)::int FROM pgqueue.jobs WHERE payload->>'mark' ~ '^impatience' GROUP BY 1"
    found = counted(await theatre.ground.rows(query))
    outcomes = Counter("added" if mark in found else "not added" for mark in unsure)
    for mark in unsure & found.keys():
        theatre.same(found.pop(mark), MANY, "all or none of what was given up")
    theatre.same(found, nonzero(expected), "of callers that waited")
    return {"waited": tries - len(unsure), **{f"gave up, {what}": number for what, number in outcomes.items()}}
