"""What operators do: cancel, retry, edit, delete, pause, resume, drain. Each leaves an audit row."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, LiteralString, NamedTuple
from uuid import UUID

from pgqueue.db import Connection, acting_as, translated
from pgqueue.job import Status
from pgqueue.sql import SQL

ACTIONS: dict[str, frozenset[Status]] = {
    "retry": frozenset({Status.FAILED, Status.CANCELLED, Status.SCHEDULED}),
    "cancel": frozenset({Status.SCHEDULED, Status.PENDING, Status.RUNNING}),
    "delete": frozenset({Status.COMPLETED, Status.FAILED, Status.CANCELLED}),
}
"""What can be done to many jobs, and to jobs in which status."""


class Acted(NamedTuple):
    id: int
    status: str | None
    problem: str | None


async def cancel_job(conn: Connection, id: int, *, actor: str | None = None, reason: str | None = None) -> Status:
    """CANCELLED, or RUNNING when the handler has been asked to stop and its worker will end the job."""
    return Status(await _act(conn, SQL.cancel_job, {"id": id, "reason": reason}, actor))


async def retry_job(conn: Connection, id: int, *, actor: str | None = None, reason: str | None = None) -> Status:
    return Status(await _act(conn, SQL.retry_job, {"id": id, "reason": reason}, actor))


async def edit_job(
    conn: Connection, id: int, changes: Mapping[str, Any], *, actor: str | None = None, reason: str | None = None
) -> None:
    await _act(conn, SQL.edit_job, {"id": id, "changes": json.dumps(changes), "reason": reason}, actor)


async def delete_job(conn: Connection, id: int, *, actor: str | None = None, reason: str | None = None) -> None:
    await _act(conn, SQL.delete_job, {"id": id, "reason": reason}, actor)


async def act_on_jobs(
    conn: Connection, ids: Sequence[int], action: str, *, actor: str | None = None, reason: str | None = None
) -> list[Acted]:
    """One action on many jobs; a job that does not allow it has a problem, and the others go on."""
    with translated():
        async with acting_as(conn, actor):
            parameters = {"ids": list(ids), "action": action, "reason": reason}
            rows = await (await conn.execute(SQL.act_on_jobs, parameters, prepare=False)).fetchall()
    return [Acted(*row) for row in rows]


async def drain_worker(conn: Connection, id: UUID, *, actor: str | None = None, reason: str | None = None) -> None:
    await _act(conn, SQL.drain_worker, {"id": id, "reason": reason}, actor)


async def resolve_job(
    conn: Connection,
    id: int,
    outcome: Literal["completed", "retry"],
    *,
    result: Any = None,
    actor: str | None = None,
    reason: str | None = None,
) -> Status:
    """Ends the doubt about a job: `completed` if its effect happened, `retry` if it did not."""
    text = None if result is None else json.dumps(result)
    parameters = {"id": id, "outcome": outcome, "reason": reason, "result": text}
    return Status(await _act(conn, SQL.resolve_job, parameters, actor))


async def pause_queue(conn: Connection, queue: str, *, actor: str | None = None, reason: str | None = None) -> None:
    await _act(conn, SQL.pause_queue, {"queue": queue, "reason": reason}, actor)


async def resume_queue(conn: Connection, queue: str, *, actor: str | None = None, reason: str | None = None) -> None:
    await _act(conn, SQL.resume_queue, {"queue": queue, "reason": reason}, actor)


async def _act(conn: Connection, statement: LiteralString, parameters: dict[str, Any], actor: str | None) -> Any:
    with translated():
        async with acting_as(conn, actor):
            row = await (await conn.execute(statement, parameters, prepare=False)).fetchone()
    return row[0] if row else None
