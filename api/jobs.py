"""/api/v1/jobs: add, look at, wait for, and act on jobs, one or many."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from pgqueue import control, enqueue, pages, read
from pgqueue.answers import Answer
from pgqueue.api.body import text_of
from pgqueue.api.calls import Call, answer, dumps, once
from pgqueue.api.problems import Problem
from pgqueue.api.render import array, etag, job_text, time
from pgqueue.api.schemas import (
    BatchBody,
    BulkBody,
    EditBody,
    NewJobBody,
    PageQuery,
    ReasonBody,
    ResolveBody,
    WaitQuery,
)
from pgqueue.db import Connection, retrying
from pgqueue.errors import JobNotFound
from pgqueue.job import LIVE, Job, NewJob, Status

EVERY = tuple(Status)


def new_job(call: Call, given: NewJobBody, where: str = "") -> NewJob:
    if given.run_at is not None and given.delay is not None:
        raise Problem(422, "validation", f"{where}delay: give delay or run_at, not both")
    return NewJob(
        type=given.type,
        payload=text_of(given.payload),
        queue=call.queue(given.queue),
        priority=given.priority,
        delay=given.delay,
        run_at=given.run_at,
        thread_demand=given.thread_demand,
        max_attempts=given.max_attempts,
        timeout=given.timeout,
        idempotency_key=given.idempotency_key,
        tags=given.tags,
        name=given.name,
    )


async def create(call: Call) -> Response:
    job = new_job(call, call.body)

    async def do(conn: Connection) -> Answer:
        async with conn.transaction():
            added = await enqueue.add_job(conn, job)
            try:
                stored = await read.get_job(conn, added.id)
            except JobNotFound:
                detail = f"idempotency_key: belongs to job {added.id}, which has been deleted; use another key"
                raise Problem(409, "conflict", detail) from None
        if not call.principal.sees(stored.queue):
            raise Problem(409, "conflict", "idempotency_key: belongs to a job of another queue")
        status = 201 if added.inserted else 200
        return Answer(status, job_text(stored, inserted=added.inserted), f"/api/v1/jobs/{added.id}")

    return await once(call, do)


async def create_batch(call: Call) -> Response:
    given: BatchBody = call.body
    jobs = [new_job(call, each, f"jobs.{place}.") for place, each in enumerate(given.jobs)]

    async def do(conn: Connection) -> Answer:
        added = await enqueue.add_jobs(conn, jobs)
        return Answer(201, dumps({"jobs": [{"id": one.id, "inserted": one.inserted} for one in added]}), None)

    return await once(call, do)


async def list_page(call: Call) -> Response:
    query: PageQuery = call.query
    filters = ["v1", query.status, query.type, query.queue, query.tag, call.principal.queues]
    before = call.state.cursors.decode(filters, query.cursor)[0] if query.cursor is not None else None
    async with call.connection() as conn:
        jobs = await pages.page_jobs(
            conn,
            statuses=None if query.status is None else _statuses(query.status),
            queue=query.queue,
            queues=call.principal.queues,
            type=query.type,
            tag=query.tag,
            before=before,
            limit=query.limit + 1,
        )
    cursor = None
    if len(jobs) > query.limit:
        jobs = jobs[: query.limit]
        cursor = call.state.cursors.encode(filters, jobs[-1].id)
    texts = array([job_text(job) for job in jobs])
    return answer(200, f'{{"data": {texts}, "next_cursor": {json.dumps(cursor)}}}')


async def get(call: Call) -> Response:
    async with call.connection() as conn:
        job = await seen(call, conn)
    return answer(200, job_text(job), {"etag": etag(job)})


async def wait(call: Call) -> Response:
    """200 when it has ended, 202 when it has not within the timeout."""
    query: WaitQuery = call.query
    async with call.connection() as conn:
        job = await seen(call, conn)
    if job.status in LIVE:
        await call.state.waiter.ended(job.id, query.timeout)
        async with call.connection() as conn:
            job = await seen(call, conn)
    return answer(202 if job.status in LIVE else 200, job_text(job), {"etag": etag(job)})


async def attempts(call: Call) -> Response:
    async with call.connection() as conn:
        job = await seen(call, conn)
        found = await read.list_attempts(conn, job.id)
    data = []
    for one in found:
        shown = one._asdict() | {"started_at": time(one.started_at), "finished_at": time(one.finished_at)}
        del shown["job_id"]
        data.append(shown)
    return answer(200, dumps({"data": data}))


async def why(call: Call) -> Response:
    async with call.connection() as conn:
        job = await seen(call, conn)
        reasons = await read.why(conn, job.id)
    return answer(200, dumps({"data": [one._asdict() for one in reasons]}))


async def retry(call: Call) -> Response:
    given: ReasonBody = call.body
    async with call.connection() as conn:
        job = await seen(call, conn)
        status = await control.retry_job(conn, job.id, actor=call.actor, reason=given.reason)
    return answer(202, dumps({"id": job.id, "status": status, "cancel_requested": False}))


async def cancel(call: Call) -> Response:
    given: ReasonBody = call.body
    async with call.connection() as conn:
        job = await seen(call, conn)
        status = await control.cancel_job(conn, job.id, actor=call.actor, reason=given.reason)
    return answer(202, dumps({"id": job.id, "status": status, "cancel_requested": status is Status.RUNNING}))


async def resolve(call: Call) -> Response:
    given: ResolveBody = call.body
    async with call.connection() as conn:
        job = await seen(call, conn)
        status = await control.resolve_job(
            conn, job.id, given.outcome, result=given.result, actor=call.actor, reason=given.reason
        )
    return answer(202, dumps({"id": job.id, "status": status, "cancel_requested": False}))


async def delete(call: Call) -> Response:
    async with call.connection() as conn:
        job = await seen(call, conn)
        await control.delete_job(conn, job.id, actor=call.actor)
    return Response(status_code=204)


async def edit(call: Call) -> Response:
    given: EditBody = call.body
    changes: dict[str, Any] = {name: value for name, value in call.raw.items() if name != "reason"}
    if not changes:
        raise Problem(422, "validation", "body: there is nothing to change")
    if given.timeout is not None:
        changes["timeout"] = f"{given.timeout} seconds"
    if given.queue is not None:
        call.queue(given.queue)
    text_of(changes)
    wanted = [tag.strip() for tag in call.request.headers.get("if-match", "*").split(",")]

    async def do() -> Job:
        async with call.connection() as conn, conn.transaction():
            # In one snapshot: a change after the comparison makes PostgreSQL refuse the edit, and we look again.
            await conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            job = await seen(call, conn)
            if "*" not in wanted and etag(job) not in wanted:
                raise Problem(412, "precondition-failed", f"job {job.id} has changed: look at it again")
            await control.edit_job(conn, job.id, changes, actor=call.actor, reason=given.reason)
            return await read.get_job(conn, job.id)

    job = await retrying(do)
    return answer(200, job_text(job), {"etag": etag(job)})


async def bulk(call: Call) -> Response:
    given: BulkBody = call.body
    if (given.ids is None) == (given.filter is None):
        raise Problem(422, "validation", "ids: give ids or filter, and not both")
    if given.filter is not None and not given.all and not given.filter.model_dump(exclude_none=True):
        raise Problem(422, "validation", 'filter: an empty filter needs "all": true')
    allowed = control.ACTIONS[given.action]
    async with call.connection() as conn:
        if given.filter is not None:
            asked = set(given.filter.status) if given.filter.status is not None else allowed
            rest = given.filter.model_dump(exclude={"status"})
            ids = await _matching(call, conn, sorted(asked & allowed), given.max + 1, **rest)
        else:
            statuses = sorted(allowed) if given.dry_run else EVERY
            ids = await _matching(call, conn, statuses, 1001, ids=given.ids)
        ids, more = ids[: given.max], len(ids) > given.max
        acted = []
        if not given.dry_run and ids:
            acted = await control.act_on_jobs(conn, ids, given.action, actor=call.actor, reason=given.reason)
    results = [one._asdict() for one in acted]
    if given.ids is not None and not given.dry_run:
        results += [
            {"id": id, "status": None, "problem": "job not found"} for id in dict.fromkeys(given.ids) if id not in ids
        ]
    body = {
        "action": given.action,
        "dry_run": given.dry_run,
        "matched": len(ids),
        "more": more,
        "done": sum(one.problem is None for one in acted),
        "results": results,
    }
    return answer(200, dumps(body))


async def seen(call: Call, conn: Connection) -> Job:
    """The job of the path, if the caller may know of it."""
    job = await read.get_job(conn, call.job_id())
    if not call.principal.sees(job.queue):
        raise JobNotFound("job not found")
    return job


async def _matching(call: Call, conn: Connection, statuses: Sequence[Status], limit: int, **filters: Any) -> list[int]:
    if not statuses:
        return []
    return await pages.match_jobs(conn, statuses=statuses, queues=call.principal.queues, limit=limit, **filters)


def _statuses(text: str) -> list[Status]:
    try:
        return [Status(name.strip()) for name in text.split(",")]
    except ValueError:
        raise Problem(422, "validation", f"status: must be of {', '.join(Status)}") from None
