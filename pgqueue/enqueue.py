"""Adding jobs, one or many, on the caller's connection and in the caller's transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, LiteralString, NamedTuple

from pgqueue.db import Connection, array_of_texts, translated
from pgqueue.failpoints import failpoint
from pgqueue.job import NewJob
from pgqueue.sql import SQL


class Added(NamedTuple):
    id: int
    inserted: bool
    """False: the idempotency key was known, and this is the id of the first job."""


async def add_job(conn: Connection, job: NewJob) -> Added:
    with translated():
        failpoint("enqueue.before")
        cursor = await conn.execute(SQL.add_job, job.parameters(), prepare=False)
        row = await cursor.fetchone()
    failpoint("enqueue.after")
    assert row is not None
    return Added(*row)


async def add_jobs(conn: Connection, jobs: Sequence[NewJob]) -> list[Added]:
    """All of them or none; the answers are in the order of the jobs."""
    if not jobs:
        return []
    if keys := [job.idempotency_key for job in jobs if job.idempotency_key is not None]:
        # A key may be known already, so each of these needs an answer of its own.
        async with conn.transaction():
            await conn.execute(SQL.lock_keys, {"keys": keys}, prepare=False)
            return [await add_job(conn, job) for job in jobs]
    with translated():
        cursor = await conn.execute(*statement_for(jobs), prepare=False)
        return [Added(id, True) for (id,) in await cursor.fetchall()]


def statement_for(jobs: Sequence[NewJob]) -> tuple[LiteralString, dict[str, Any]]:
    """Adds jobs without keys. What is the same for all of them is sent once."""
    first = _options(jobs[0])
    if all(_options(job) == first for job in jobs):
        payloads = array_of_texts([job.payload for job in jobs])
        return SQL.add_alike, jobs[0].parameters() | {"payloads": payloads}
    return SQL.add_jobs, columns(jobs)


_options = attrgetter(*(each.name for each in fields(NewJob) if each.name != "payload"))


def columns(jobs: Sequence[NewJob]) -> dict[str, Any]:
    return {
        "types": array_of_texts(job.type for job in jobs),
        "payloads": array_of_texts(job.payload for job in jobs),
        "queues": array_of_texts(job.queue for job in jobs),
        "priorities": [job.priority for job in jobs],
        "delays": [job.delay for job in jobs],
        "run_ats": [job.run_at for job in jobs],
        "thread_demands": [job.thread_demand for job in jobs],
        "max_attempts": [job.max_attempts for job in jobs],
        "timeouts": [job.timeout for job in jobs],
        # An array of arrays would have to be rectangular: each job's tags travel as the text of one array.
        "tags": array_of_texts(array_of_texts(job.tags) for job in jobs) if any(job.tags for job in jobs) else None,
        "names": [job.name for job in jobs],
    }
