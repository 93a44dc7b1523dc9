"""What people look at, a page at a time: jobs, the dead letter queue and its groups, queues, workers, types, audit."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from pgqueue.db import Connection, translated
from pgqueue.job import Job, Status
from pgqueue.sql import SQL

LARGEST = 8192
"""Bytes, as stored, of a payload or result that a page shows; a larger one is left out, as an empty text."""


class FailureGroup(NamedTuple):
    id: str
    type: str
    reason: str | None
    error_type: str | None
    message: str | None
    jobs: int
    first_failed_at: datetime
    last_failed_at: datetime
    latest_job_id: int


class QueueStats(NamedTuple):
    queue: str
    paused: bool
    paused_by: str | None
    paused_because: str | None
    pending: int
    scheduled: int
    running: int
    failed: int
    oldest_wait: float | None


class WorkerRow(NamedTuple):
    id: UUID
    name: str
    host: str
    pid: int
    version: str
    state: str
    draining: bool
    queues: list[str] | None
    types: list[str] | None
    threads: int
    threads_used: int
    completed: int
    failed: int
    started_at: datetime
    heartbeat_at: datetime
    expires_at: datetime
    stopped_at: datetime | None


class TypeRow(NamedTuple):
    name: str
    queue: str | None
    schema: str | None
    workers: int


class AuditRow(NamedTuple):
    id: int
    at: datetime
    actor: str
    db_user: str
    action: str
    job_id: int | None
    queue: str | None
    reason: str | None
    detail: str


def like(patterns: Sequence[str] | None) -> list[str] | None:
    """Patterns of queues with * as LIKE has them."""
    if patterns is None:
        return None
    table = str.maketrans({"\\": r"\\", "%": r"\%", "_": r"\_", "*": "%"})
    return [pattern.translate(table) for pattern in patterns]


async def page_jobs(
    conn: Connection,
    *,
    statuses: Sequence[Status] | None = None,
    queue: str | None = None,
    queues: Sequence[str] | None = None,
    type: str | None = None,
    tag: str | None = None,
    before: int | None = None,
    limit: int = 50,
) -> list[Job]:
    """Newest first. The next page is `before` the id of the last job of this one."""
    parameters = {
        "statuses": None if statuses is None else [str(status) for status in statuses],
        "queue": queue,
        "queues": like(queues),
        "type": type,
        "tag": tag,
        "before": before,
        "limit": limit,
        "largest": LARGEST,
    }
    return [Job(*row) for row in await _rows(conn, SQL.page_jobs, parameters)]


async def page_failed(
    conn: Connection,
    *,
    queues: Sequence[str] | None = None,
    before: tuple[datetime, int] | None = None,
    limit: int = 50,
    offset: int = 0,
) -> list[Job]:
    """The dead letter queue, newest first. The next page is `before` the last job's (finished_at, id)."""
    finished_at, id = before or (None, None)
    parameters = {
        "finished_at": finished_at,
        "id": id,
        "queues": like(queues),
        "limit": limit,
        "offset": offset,
        "largest": LARGEST,
    }
    return [Job(*row) for row in await _rows(conn, SQL.page_failed, parameters)]


async def match_jobs(
    conn: Connection,
    *,
    statuses: Sequence[Status],
    limit: int,
    queue: str | None = None,
    queues: Sequence[str] | None = None,
    type: str | None = None,
    tag: str | None = None,
    group: str | None = None,
    ids: Sequence[int] | None = None,
) -> list[int]:
    """The ids, oldest first, of the jobs that a filter matches."""
    parameters = {
        "statuses": [str(status) for status in statuses],
        "queue": queue,
        "queues": like(queues),
        "type": type,
        "tag": tag,
        "group": group,
        "ids": None if ids is None else list(ids),
        "limit": limit,
    }
    return [id for (id,) in await _rows(conn, SQL.match_jobs, parameters)]


async def list_failures(
    conn: Connection, *, queues: Sequence[str] | None = None, limit: int = 100
) -> list[FailureGroup]:
    parameters = {"queues": like(queues), "limit": limit}
    return [FailureGroup(*row) for row in await _rows(conn, SQL.list_failures, parameters)]


async def list_queues(conn: Connection, *, queues: Sequence[str] | None = None) -> list[QueueStats]:
    return [QueueStats(*row) for row in await _rows(conn, SQL.list_queues, {"queues": like(queues)})]


async def list_workers(conn: Connection, *, all: bool = False, limit: int = 1000) -> list[WorkerRow]:
    return [WorkerRow(*row) for row in await _rows(conn, SQL.list_workers, {"all": all, "limit": limit})]


async def list_types(conn: Connection) -> list[TypeRow]:
    return [TypeRow(*row) for row in await _rows(conn, SQL.list_types, {})]


async def list_audit(
    conn: Connection, *, job_id: int | None = None, before: int | None = None, limit: int = 50
) -> list[AuditRow]:
    parameters = {"job_id": job_id, "before": before, "limit": limit}
    return [AuditRow(*row) for row in await _rows(conn, SQL.list_audit, parameters)]


async def _rows(conn: Connection, statement: Any, parameters: dict[str, Any]) -> list[Any]:
    with translated():
        # In binary, because a session's DateStyle can make times unreadable as text.
        cursor = await conn.execute(statement, parameters, prepare=False, binary=True)
        return await cursor.fetchall()
