"""/api/v1 beside jobs: failures, queues, workers, types, stats, audit, tokens, me."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

from starlette.responses import Response

from pgqueue import accounts, control, pages, read, tally
from pgqueue.api.accounts import signing
from pgqueue.api.auth import create_token
from pgqueue.api.calls import Call, answer, dumps
from pgqueue.api.problems import Problem
from pgqueue.api.render import array, time
from pgqueue.api.schemas import (
    AuditQuery,
    LimitQuery,
    ReasonBody,
    RevokeBody,
    SeriesQuery,
    TokenBody,
    WorkersQuery,
)
from pgqueue.errors import JobNotFound
from pgqueue.job import Status

_QUEUE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,62}")


EVENTS = ("enqueued", "completed", "failed", "cancelled", "retried")
STEPS = (60, 300, 900, 3600, 21600, 86400)
MOST_POINTS = 1500


async def failures(call: Call) -> Response:
    query: LimitQuery = call.query
    async with call.connection() as conn:
        groups = await pages.list_failures(conn, queues=call.principal.queues, limit=query.limit)
    return answer(200, dumps({"data": [_shown(one) for one in groups]}))


async def queues(call: Call) -> Response:
    async with call.connection() as conn:
        found = await pages.list_queues(conn, queues=call.principal.queues)
    return answer(200, dumps({"data": [one._asdict() for one in found]}))


async def pause(call: Call) -> Response:
    given: ReasonBody = call.body
    queue = _queue(call)
    async with call.connection() as conn:
        await control.pause_queue(conn, queue, actor=call.actor, reason=given.reason)
    return answer(200, dumps({"queue": queue, "paused": True}))


async def resume(call: Call) -> Response:
    given: ReasonBody = call.body
    queue = _queue(call)
    async with call.connection() as conn:
        await control.resume_queue(conn, queue, actor=call.actor, reason=given.reason)
    return answer(200, dumps({"queue": queue, "paused": False}))


async def workers(call: Call) -> Response:
    query: WorkersQuery = call.query
    async with call.connection() as conn:
        found = await pages.list_workers(conn, all=query.all)
    return answer(200, dumps({"data": [_shown(one) for one in found]}))


async def drain(call: Call) -> Response:
    given: ReasonBody = call.body
    try:
        id = UUID(call.path("id"))
    except ValueError:
        raise Problem(404, "not-found", "worker not found") from None
    async with call.connection() as conn:
        try:
            await control.drain_worker(conn, id, actor=call.actor, reason=given.reason)
        except JobNotFound:
            raise Problem(404, "not-found", "worker not found") from None
    return answer(202, dumps({"id": id, "draining": True}))


async def types(call: Call) -> Response:
    async with call.connection() as conn:
        found = await pages.list_types(conn)
    texts = [
        dumps({"name": one.name, "queue": one.queue, "workers": one.workers})[:-1]
        + f', "json_schema": {one.schema or "null"}}}'
        for one in found
    ]
    return answer(200, f'{{"data": {array(texts)}}}')


async def stats(call: Call) -> Response:
    async with call.connection() as conn:
        counts = {str(status): (await read.count_jobs(conn, status))._asdict() for status in Status}
        live = await pages.list_workers(conn)
        await tally.fold(conn, wait=False)
        totals = await tally.read_totals(conn)
    states = dict.fromkeys(("available", "busy", "unavailable"), 0)
    for worker in live:
        states[worker.state] += 1
    body = {
        "jobs": counts,
        "workers": states,
        "threads": sum(worker.threads for worker in live),
        "threads_used": sum(worker.threads_used for worker in live),
        "totals": _totals(totals),
        "queues": {queue: _totals(totals, queue) for queue in sorted({one.queue for one in totals if one.queue})},
    }
    return answer(200, dumps(body))


def _totals(totals: list[tally.Total], queue: str | None = None) -> dict[str, Any]:
    """Since the beginning."""
    mine = [one for one in totals if queue in (None, one.queue)]

    def count(name: str, *labels: str) -> int:
        return int(sum(one.value for one in mine if one.name == name and (not labels or one.label in labels)))

    waited = [(one.bucket, one.value) for one in mine if one.name == "waited"]
    took = [(one.bucket, one.value) for one in mine if one.name == "took"]
    return {
        "enqueued": count("enqueued"),
        "completed": count("finished", "completed"),
        "failed": count("finished", "failed", "timeout"),
        "cancelled": count("finished", "cancelled"),
        "retried": count("retried"),
        "lost": count("lost"),
        **_point({"waited": waited, "took": took}),
    }


async def series(call: Call) -> Response:
    query: SeriesQuery = call.query
    step = query.step or next(step for step in STEPS if query.range / step <= 240 or step == STEPS[-1])
    if query.range / step > MOST_POINTS:
        raise Problem(422, "validation", f"step: at most {MOST_POINTS} points; take a longer step")
    if step % tally.HOUR and query.range > 86400:
        raise Problem(422, "validation", "step: minutes are kept for a day; take whole hours for a longer range")
    now = int(datetime.now(UTC).timestamp())
    first = (now - query.range) // step * step + step
    since, until = datetime.fromtimestamp(first, UTC), datetime.fromtimestamp(now // step * step + step, UTC)
    async with call.connection() as conn:
        await tally.fold(conn, wait=False)
        pieces = await tally.read_series(conn, since, until, step, queue=query.queue, queues=call.principal.queues)
    points: dict[datetime, dict[str, Any]] = {}
    for start in range(first, now + 1, step):
        points[datetime.fromtimestamp(start, UTC)] = dict.fromkeys(EVENTS, 0) | {"waited": [], "took": []}
    for piece in pieces:
        if piece.name in EVENTS:
            points[piece.at][piece.name] = int(piece.value)
        else:
            points[piece.at][piece.name].append((piece.bucket, piece.value))
    data = [{"at": time(at), **_point(point)} for at, point in points.items()]
    return answer(200, dumps({"step": step, "queue": query.queue, "data": data}))


def _point(point: dict[str, Any]) -> dict[str, Any]:
    for name in ("waited", "took"):
        counts = point.pop(name)
        point[name] = {f"p{share}": tally.percentile(counts, share / 100) for share in (50, 95, 99)}
    return point


async def audit(call: Call) -> Response:
    query: AuditQuery = call.query
    filters = ["audit", query.job_id]
    before = call.state.cursors.decode(filters, query.cursor)[0] if query.cursor is not None else None
    async with call.connection() as conn:
        rows = await pages.list_audit(conn, job_id=query.job_id, before=before, limit=query.limit + 1)
    cursor = None
    if len(rows) > query.limit:
        rows = rows[: query.limit]
        cursor = call.state.cursors.encode(filters, rows[-1].id)
    texts = []
    for row in rows:
        members = _shown(row)
        del members["detail"]
        texts.append(dumps(members)[:-1] + f', "detail": {row.detail}}}')
    return answer(200, f'{{"data": {array(texts)}, "next_cursor": {json.dumps(cursor)}}}')


async def me(call: Call) -> Response:
    who = call.principal
    expires_at = None if who.expires_at is None else time(datetime.fromtimestamp(who.expires_at, UTC))
    body = {
        "subject": who.subject,
        "scopes": sorted(who.scopes),
        "queues": None if who.queues is None else list(who.queues),
        "jti": who.jti,
        "expires_at": expires_at,
    }
    return answer(200, dumps(body))


async def add_token(call: Call) -> Response:
    given: TokenBody = call.body
    signing(call)
    token, claims = create_token(call.state.settings, given.subject, given.scopes, given.ttl, queues=given.queues)
    detail = {name: value for name, value in claims.items() if name in ("sub", "scope", "queues", "jti", "exp")}
    async with call.connection() as conn:
        await accounts.note_token(conn, detail, actor=call.actor)
    expires_at = time(datetime.fromtimestamp(claims["exp"], UTC))
    return answer(201, dumps({"token": token, "jti": claims["jti"], "expires_at": expires_at}))


async def list_tokens(call: Call) -> Response:
    query: LimitQuery = call.query
    async with call.connection() as conn:
        found = await accounts.list_tokens(conn, query.limit)
    return answer(200, dumps({"data": [_shown(one) for one in found]}))


async def revoke_token(call: Call) -> Response:
    given: RevokeBody = call.body
    # The token itself is not here: no token lives longer than this.
    expires_at = datetime.now(UTC) + timedelta(seconds=call.state.settings.jwt_max_ttl + 60)
    async with call.connection() as conn:
        await accounts.revoke_token(conn, given.jti, expires_at, actor=call.actor, reason=given.reason)
    call.state.look_for_revoked()
    return Response(status_code=204)


def _queue(call: Call) -> str:
    queue = call.path("queue")
    if not _QUEUE.fullmatch(queue):
        raise Problem(404, "not-found", "queue not found")
    return call.queue(queue)


def _shown(row: NamedTuple) -> dict[str, Any]:
    return {name: time(value) if isinstance(value, datetime) else value for name, value in row._asdict().items()}
