"""The values: Job, NewJob, Status, and the table of transitions."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID


class Status(StrEnum):
    SCHEDULED = "scheduled"
    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


LIVE = frozenset({Status.SCHEDULED, Status.PENDING, Status.RUNNING})

TRANSITIONS: dict[str, frozenset[tuple[Status, Status]]] = {
    "promote": frozenset({(Status.SCHEDULED, Status.PENDING)}),
    "claim": frozenset({(Status.PENDING, Status.RUNNING)}),
    "complete": frozenset({(Status.RUNNING, Status.COMPLETED)}),
    "fail": frozenset({(Status.RUNNING, Status.SCHEDULED), (Status.RUNNING, Status.FAILED)}),
    "snooze": frozenset({(Status.RUNNING, Status.SCHEDULED)}),
    "release": frozenset({(Status.RUNNING, Status.PENDING)}),
    "cancel": frozenset({(Status.RUNNING, Status.CANCELLED)}),
    "rescue": frozenset(
        {(Status.RUNNING, Status.PENDING), (Status.RUNNING, Status.FAILED), (Status.RUNNING, Status.CANCELLED)}
    ),
    "cancel_job": frozenset({(Status.SCHEDULED, Status.CANCELLED), (Status.PENDING, Status.CANCELLED)}),
    "retry_job": frozenset(
        {(Status.FAILED, Status.PENDING), (Status.CANCELLED, Status.PENDING), (Status.SCHEDULED, Status.PENDING)}
    ),
    "complete_duplicate": frozenset({(Status.RUNNING, Status.COMPLETED)}),
    "resolve_job": frozenset({(Status.FAILED, Status.COMPLETED), (Status.FAILED, Status.PENDING)}),
    "edit_job": frozenset({(Status.SCHEDULED, Status.PENDING), (Status.PENDING, Status.SCHEDULED)}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """A job to be added. Only the type is needed."""

    type: str
    payload: str = "{}"
    """JSON text."""
    queue: str = "default"
    priority: int = 0
    delay: float | None = None
    """Seconds from now, by the database's clock."""
    run_at: datetime | None = None
    thread_demand: int = 1
    max_attempts: int = 5
    timeout: float | None = None
    """Seconds."""
    idempotency_key: str | None = None
    key_ttl: float = 86400
    """Seconds for which the key is remembered."""
    tags: list[str] = field(default_factory=list)
    name: str | None = None

    def parameters(self) -> dict[str, Any]:
        """For add_job.sql; asdict() copies deeply, which took a tenth of what adding a job costs its producer."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class Lease:
    """The right to write to one running job, until somebody else claims it."""

    id: int
    lease_token: str
    """The text of a UUID: it travels as text, thousands of times a second."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job as it stands in the database."""

    id: int
    queue: str
    type: str
    name: str | None
    payload: str
    """JSON text: strangers can store more than Python can read, so each reader decodes on its own."""
    status: Status
    parked: bool
    priority: int
    seq: int
    run_at: datetime
    thread_demand: int
    timeout: float | None
    max_attempts: int
    attempt: int
    lost: int
    idempotency_key: str | None
    tags: list[str]
    created_at: datetime
    worker_id: UUID | None
    lease_token: UUID | None
    threads_used: int | None
    started_at: datetime | None
    cancel_requested_at: datetime | None
    progress: str | None
    finished_at: datetime | None
    result: str | None
    reason: str | None
    error_type: str | None
    error: str | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "status", Status(self.status))
