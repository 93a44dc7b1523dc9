"""Jobs as JSON. Payloads and results go out as PostgreSQL has them: no number is rounded, none is too deep."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

from pgqueue.api.calls import dumps
from pgqueue.arguments import loads
from pgqueue.job import Job, Status
from pgqueue.outcome import Undecodable

SHOWN = {
    Status.SCHEDULED: "Pending",
    Status.PENDING: "Pending",
    Status.RUNNING: "Running",
    Status.COMPLETED: "Completed",
    Status.FAILED: "Failed",
    Status.CANCELLED: "Cancelled",
}


def time(value: datetime | None) -> str | None:
    return None if value is None else value.astimezone(UTC).isoformat().replace("+00:00", "Z")


def job_text(job: Job, **more: Any) -> str:
    omitted = [name for name, text in (("payload", job.payload), ("result", job.result)) if text == ""]
    members = {
        "id": job.id,
        "type": job.type,
        "queue": job.queue,
        "name": job.name,
        "status": job.status,
        "priority": job.priority,
        "thread_demand": job.thread_demand,
        "attempt": job.attempt,
        "max_attempts": job.max_attempts,
        "lost": job.lost,
        "timeout": job.timeout,
        "tags": job.tags,
        "idempotency_key": job.idempotency_key,
        "run_at": time(job.run_at),
        "created_at": time(job.created_at),
        "started_at": time(job.started_at),
        "finished_at": time(job.finished_at),
        "worker_id": job.worker_id,
        "threads_used": job.threads_used,
        "cancel_requested": job.cancel_requested_at is not None,
        "reason": job.reason,
        "error_type": job.error_type,
        "error": job.error,
        "omitted": omitted,
        **more,
    }
    return _with_raw(members, job)


def seed_text(job: Job) -> str:
    begun = job.started_at or job.finished_at
    members = {
        "id": job.id,
        "type": job.type,
        "name": job.name,
        "queue": job.queue,
        "priority": job.priority,
        "thread_demand": job.thread_demand,
        "status": SHOWN[job.status],
        "created_at": time(job.created_at),
        "started_at": time(job.started_at),
        "completed_at": time(job.finished_at),
        "error": job.error,
        "attempts": job.attempt,
        "worker_id": job.worker_id,
        "threads_used": job.threads_used,
    }
    if job.finished_at and begun:
        members |= {
            "queue_time": _seconds(begun, job.created_at),
            "execution_time": _seconds(job.finished_at, begun),
            "total_time": _seconds(job.finished_at, job.created_at),
        }
    return _with_raw(members, job, progress=False)


def _seconds(end: datetime, start: datetime) -> float:
    """A clock that was set back makes no negative times."""
    return max(0.0, (end - start).total_seconds())


def failed_text(job: Job) -> str:
    """The payload's members, and ours over them."""
    ours = {
        "id": job.id,
        "type": job.type,
        "error": job.error,
        "reason": job.reason,
        "attempts": job.attempt,
        "retries": max(0, job.attempt - 1),
        "failed_at": time(job.finished_at),
    }
    if not job.payload:
        return dumps({**ours, "omitted": ["payload"]})
    try:
        payload = loads(job.payload)
    except Undecodable:
        return dumps(ours)[:-1] + f', "payload": {job.payload}}}'
    if isinstance(payload, dict):
        return dumps({**payload, **ours})
    return dumps({"payload": payload, **ours})


def array(texts: list[str]) -> str:
    return "[" + ", ".join(texts) + "]"


def etag(job: Job) -> str:
    """Another one after every change that an editor should know of."""
    parts = (
        job.id, job.status, job.payload, job.queue, job.priority, job.run_at, job.thread_demand, job.timeout,
        job.max_attempts, job.attempt, job.lost, job.tags, job.name, job.lease_token, job.seq,
    )  # fmt: skip
    return '"' + hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32] + '"'


def _with_raw(members: dict[str, Any], job: Job, *, progress: bool = True) -> str:
    text = dumps(members)[:-1]
    text += f', "payload": {job.payload or "null"}, "result": {job.result or "null"}'
    if progress:
        text += f', "progress": {job.progress or "null"}'
    return text + "}"
