"""The registry of worker processes, their heartbeats, and the marks by which they are woken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from pgqueue.db import Connection
from pgqueue.job import Lease
from pgqueue.sql import SQL


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    id: UUID
    name: str
    host: str
    pid: int
    version: str
    queues: list[str] | None
    types: list[str] | None
    threads: int
    listening: bool
    lease_timeout: float


class Pulse(NamedTuple):
    """What a heartbeat brings back."""

    draining: bool
    notify_queue: float
    """How full PostgreSQL's notification queue is, 0 to 1."""
    idle: bool
    """Whether it is marked as one that may be woken."""


def channel(worker_id: UUID) -> str:
    return f"pgqueue_{worker_id}"


async def register(conn: Connection, worker: Worker) -> None:
    await conn.execute(SQL.register_worker, asdict(worker), prepare=False)


async def describe_types(conn: Connection, described: Sequence[tuple[str, str, str]]) -> None:
    """Tells of each type its name, its queue and the JSON Schema of its payload, for those who add jobs by hand."""
    names, queues, schemas = zip(*described, strict=True) if described else ((), (), ())
    parameters = {"names": list(names), "queues": list(queues), "schemas": list(schemas)}
    await conn.execute(SQL.describe_types, parameters, prepare=False)


async def knows_type(conn: Connection, type: str) -> bool:
    """Whether a live worker knows it."""
    row = await (await conn.execute(SQL.knows_type, {"type": type}, prepare=False)).fetchone()
    return bool(row and row[0])


async def heartbeat(
    conn: Connection, worker: Worker, *, threads_used: int, completed: int, failed: int, listening: bool
) -> Pulse | None:
    """None: this worker was retired and must not go on."""
    cursor = await conn.execute(
        SQL.heartbeat,
        {
            "id": worker.id,
            "lease_timeout": worker.lease_timeout,
            "threads_used": threads_used,
            "completed": completed,
            "failed": failed,
            "listening": listening,
        },
        prepare=False,
    )
    row = await cursor.fetchone()
    return Pulse(*row) if row else None


async def retire(conn: Connection, worker_id: UUID, *, completed: int = 0, failed: int = 0) -> None:
    await conn.execute(SQL.retire_worker, {"id": worker_id, "completed": completed, "failed": failed}, prepare=False)


async def mark_idle(conn: Connection, worker_id: UUID) -> None:
    await conn.execute(SQL.mark_idle, {"id": worker_id}, prepare=False)


async def mark_busy(conn: Connection, worker_id: UUID) -> None:
    await conn.execute(SQL.mark_busy, {"id": worker_id}, prepare=False)


async def may_sleep(conn: Connection) -> bool:
    """Whether nobody who may have seen this worker busy is still enqueuing. Ask after mark_idle, claim again, sleep."""
    row = await (await conn.execute(SQL.may_sleep, prepare=False)).fetchone()
    return bool(row and row[0])


async def cancellations(conn: Connection, worker_id: UUID) -> list[Lease]:
    """The running jobs of this worker that somebody wants stopped."""
    cursor = await conn.execute(SQL.cancellations, {"worker_id": worker_id}, prepare=False)
    return [Lease(*row) for row in await cursor.fetchall()]


async def claimed_by(conn: Connection, worker_id: UUID, age: float) -> list[Lease]:
    """The leases that this worker has had for longer than `age` seconds."""
    cursor = await conn.execute(SQL.claimed_by, {"worker_id": worker_id, "age": age}, prepare=False)
    return [Lease(*row) for row in await cursor.fetchall()]


class Tick(NamedTuple):
    due_in: float | None
    """Seconds until the next scheduled job is due."""
    cancelled: list[int]
    parked: bool


async def tick(conn: Connection, worker_id: UUID, due_floor: datetime) -> Tick:
    """All that a worker asks once a second, in one statement."""
    row = await (await conn.execute(SQL.tick, {"worker_id": worker_id, "floor": due_floor}, prepare=False)).fetchone()
    assert row is not None
    return Tick(*row)
