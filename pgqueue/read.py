"""Reading: one job, lists by keyset, counts that stay fast, attempts, and why a job is not running."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from pgqueue.db import Connection, translated
from pgqueue.errors import JobNotFound
from pgqueue.job import Job, Status
from pgqueue.sql import SQL

EXACT_UP_TO = 10_000


class Attempt(NamedTuple):
    id: int
    job_id: int
    attempt: int
    outcome: str
    reason: str
    error_type: str | None
    error: str | None
    traceback: str | None
    worker_id: UUID | None
    started_at: datetime | None
    finished_at: datetime


class Count(NamedTuple):
    value: int
    exact: bool


class Reason(NamedTuple):
    blocking: bool
    reason: str
    detail: str


async def get_job(conn: Connection, id: int) -> Job:
    rows = await _jobs(conn, SQL.get_job, {"id": id})
    if not rows:
        raise JobNotFound(f"job {id} does not exist")
    return rows[0]


async def list_jobs(
    conn: Connection,
    *,
    statuses: Sequence[Status] | None = None,
    queue: str | None = None,
    type: str | None = None,
    tag: str | None = None,
    before: int | None = None,
    limit: int = 50,
) -> list[Job]:
    """Newest first. The next page is `before` the id of the last job of this one."""
    filters = {
        "statuses": [str(status) for status in statuses] if statuses is not None else None,
        "queue": queue,
        "type": type,
        "tag": tag,
        "before": before,
        "limit": limit,
    }
    return await _jobs(conn, SQL.list_jobs, filters)


async def list_failed(
    conn: Connection, *, before: tuple[datetime, int] | None = None, limit: int = 50, offset: int = 0
) -> list[Job]:
    """The dead letter queue, newest first. The next page is `before` the last job's (finished_at, id)."""
    finished_at, id = before or (None, None)
    return await _jobs(conn, SQL.list_failed, {"finished_at": finished_at, "id": id, "limit": limit, "offset": offset})


async def still_live(conn: Connection, ids: Sequence[int]) -> set[int]:
    """Those of the jobs that have not ended."""
    with translated():
        cursor = await conn.execute(SQL.still_live, {"ids": list(ids)}, prepare=False)
        return {id for (id,) in await cursor.fetchall()}


async def list_attempts(conn: Connection, id: int) -> list[Attempt]:
    with translated():
        cursor = await conn.execute(SQL.list_attempts, {"id": id}, prepare=False, binary=True)
    return [Attempt(*row) for row in await cursor.fetchall()]


async def count_jobs(conn: Connection, status: Status, queue: str | None = None) -> Count:
    """Exact up to ten thousand; beyond that the planner's estimate, which costs the same at any size."""
    parameters = {"status": str(status), "queue": queue, "limit": EXACT_UP_TO + 1}
    row = await (await conn.execute(SQL.count_jobs, parameters, prepare=False)).fetchone()
    assert row is not None
    if row[0] <= EXACT_UP_TO:
        return Count(row[0], exact=True)
    plan = await (
        await conn.execute(
            "EXPLAIN (FORMAT JSON) SELECT FROM pgqueue.jobs j WHERE j.status = %(status)s::pgqueue.status"
            " AND (%(queue)s::text IS NULL OR j.queue = %(queue)s::text)",
            parameters,
            prepare=False,
        )
    ).fetchone()
    assert plan is not None
    return Count(max(EXACT_UP_TO, int(plan[0][0]["Plan"]["Plan Rows"])), exact=False)


async def why(conn: Connection, id: int) -> list[Reason]:
    """Why this job is not running; what holds it back comes first."""
    with translated():
        cursor = await conn.execute(SQL.why, {"id": id}, prepare=False)
        reasons = [Reason(*row) for row in await cursor.fetchall()]
    return sorted(reasons, key=lambda reason: not reason.blocking)


async def _jobs(conn: Connection, statement: Any, parameters: dict[str, Any]) -> list[Job]:
    with translated():
        # In binary, because a session's DateStyle can make times unreadable as text.
        cursor = await conn.execute(statement, parameters, prepare=False, binary=True)
        return [Job(*row) for row in await cursor.fetchall()]
