"""/addJob, /failedJobs, /submit_job, /jobs, /db/jobs, as clients of other schedulers know them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from starlette.responses import Response

from pgqueue import enqueue, pages, read, shipped, workers
from pgqueue.answers import Answer
from pgqueue.api.body import text_of
from pgqueue.api.calls import Call, answer, dumps, once
from pgqueue.api.problems import Problem
from pgqueue.api.render import array, failed_text, seed_text
from pgqueue.api.schemas import AddJob, CreateJob, FailedQuery, ListQuery, SubmitJob
from pgqueue.db import Connection
from pgqueue.errors import JobNotFound
from pgqueue.job import Job, NewJob, Status

FINISHED = (Status.COMPLETED, Status.FAILED, Status.CANCELLED)
ATTEMPTS = 5
STATUSES = {
    "pending": (Status.PENDING, Status.SCHEDULED),
    **{str(status): (status,) for status in Status if status is not Status.PENDING},
}


async def add_job(call: Call) -> Response:
    given: AddJob = call.body
    if given.type is None:
        type = shipped.WELCOME
        payload: Any = {name: call.raw[name] for name in ("email", "name") if name in call.raw}
        if not payload:
            raise Problem(400, "validation", "email: is missing (or give a type and its payload)")
    else:
        type, payload = shipped.canonical(given.type), given.payload
    job = NewJob(
        type=type,
        payload=text_of(shipped.checked(type, payload)),
        queue=call.queue(given.queue),
        priority=given.priority,
        thread_demand=given.thread_demand,
        max_attempts=_attempts(given.max_retries),
        idempotency_key=given.idempotency_key,
        name=given.name if given.type is not None else None,
    )

    async def do(conn: Connection) -> Answer:
        added = await enqueue.add_job(conn, job)
        return Answer(200, dumps({"message": "Job added to queue", "id": added.id}), None)

    return await once(call, do)


async def submit_job(call: Call) -> Response:
    given: SubmitJob = call.body
    type = shipped.canonical(given.name) or "default"
    payload = call.raw.get("payload", {})
    job = NewJob(
        type=type,
        payload=text_of(shipped.checked(type, payload)),
        name=given.name,
        queue=call.queue(given.queue),
        priority=given.priority,
        max_attempts=_attempts(given.max_retries),
    )

    async def do(conn: Connection) -> Answer:
        added = await enqueue.add_job(conn, job)
        return Answer(201, dumps({"message": "Job created successfully", "id": added.id}), None)

    return await once(call, do)


async def create_job(call: Call) -> Response:
    given: CreateJob = call.body
    type = shipped.canonical(given.type)
    job = NewJob(
        type=type,
        payload=text_of(shipped.checked(type, given.payload)),
        name=given.name,
        queue=call.queue(given.queue),
        priority=given.priority,
        thread_demand=given.thread_demand,
        max_attempts=_attempts(given.max_retries),
    )

    async def do(conn: Connection) -> Answer:
        if type not in shipped.NAMES and not await workers.knows_type(conn, type):
            raise Problem(400, "validation", "unsupported job type")
        # One transaction: no worker has it before it is told of.
        async with conn.transaction():
            added = await enqueue.add_job(conn, job)
            stored = await read.get_job(conn, added.id)
        return Answer(202, seed_text(stored), f"/jobs/{added.id}")

    return await once(call, do)


async def list_jobs(call: Call) -> Response:
    query: ListQuery = call.query
    return await _list(call, query, None if query.status is None else _statuses(query.status))


async def list_finished(call: Call) -> Response:
    query: ListQuery = call.query
    asked = FINISHED if query.status is None else [one for one in _statuses(query.status) if one in FINISHED]
    return await _list(call, query, asked)


async def get_job(call: Call) -> Response:
    return answer(200, seed_text(await _job(call)))


async def get_finished(call: Call) -> Response:
    job = await _job(call)
    if job.status not in FINISHED:
        raise JobNotFound("job not found")
    return answer(200, seed_text(job))


async def failed_jobs(call: Call) -> Response:
    query: FailedQuery = call.query
    queues = call.principal.queues
    before: tuple[datetime, int] | None = None
    if query.cursor is not None:
        if query.page is not None:
            raise Problem(400, "validation", "page: give page or cursor, not both")
        finished_at, id = call.state.cursors.decode(["failed", queues], query.cursor)
        before = (datetime.fromisoformat(finished_at), id)
    offset = ((query.page or 1) - 1) * query.limit
    async with call.connection() as conn:
        jobs = await pages.page_failed(conn, queues=queues, before=before, limit=query.limit + 1, offset=offset)
        if queues is None:
            total = (await read.count_jobs(conn, Status.FAILED)).value
        else:
            limit = read.EXACT_UP_TO + 1
            total = len(await pages.match_jobs(conn, statuses=[Status.FAILED], queues=queues, limit=limit))
    headers = {"x-total-count": str(total)}
    jobs, more = jobs[: query.limit], len(jobs) > query.limit
    if more:
        cursor = call.state.cursors.encode(["failed", queues], jobs[-1].finished_at, jobs[-1].id)
        headers["link"] = f'</failedJobs?{urlencode({"limit": query.limit, "cursor": cursor})}>; rel="next"'
    return answer(200, array([failed_text(job) for job in jobs]), headers)


async def _list(call: Call, query: ListQuery, statuses: Sequence[Status] | None) -> Response:
    filters = [call.endpoint.path, query.status, query.type, query.queue, call.principal.queues]
    before = call.state.cursors.decode(filters, query.cursor)[0] if query.cursor is not None else None
    async with call.connection() as conn:
        jobs = await pages.page_jobs(
            conn,
            statuses=statuses,
            queue=query.queue,
            queues=call.principal.queues,
            type=None if query.type is None else shipped.canonical(query.type),
            before=before,
            limit=query.limit + 1,
        )
    headers = {}
    if len(jobs) > query.limit:
        jobs = jobs[: query.limit]
        asked = query.model_dump(exclude_none=True) | {"cursor": call.state.cursors.encode(filters, jobs[-1].id)}
        headers["link"] = f'<{call.endpoint.path}?{urlencode(asked)}>; rel="next"'
    return answer(200, array([seed_text(job) for job in jobs]), headers)


async def _job(call: Call) -> Job:
    async with call.connection() as conn:
        job = await read.get_job(conn, call.job_id())
    if not call.principal.sees(job.queue):
        raise JobNotFound("job not found")
    return job


def _attempts(max_retries: int | None) -> int:
    return ATTEMPTS if max_retries is None else max_retries + 1


def _statuses(text: str) -> list[Status]:
    asked: list[Status] = []
    for name in text.split(","):
        if name.strip().lower() not in STATUSES:
            raise Problem(400, "validation", "status: must be Pending, Running, Completed, Failed or Cancelled")
        asked += STATUSES[name.strip().lower()]
    return asked
