"""One call of one route: who calls, what they sent, and the ways to answer."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from pgqueue import answers
from pgqueue.answers import Answer
from pgqueue.api.auth import Principal
from pgqueue.api.body import canonical
from pgqueue.api.problems import Problem
from pgqueue.api.schemas import LARGEST_ID
from pgqueue.db import Connection
from pgqueue.errors import JobNotFound

if TYPE_CHECKING:
    from pgqueue.api.app import State
    from pgqueue.api.endpoint import Endpoint

JSON = "application/json"
_KEY = re.compile(r"[\x21-\x7e]{1,255}")


@dataclass(slots=True)
class Call:
    state: State
    request: Request
    endpoint: Endpoint
    principal: Principal
    query: Any
    body: Any
    """The request's body as its model has it."""
    raw: Any
    """The same as it was sent."""
    headers: dict[str, str] = field(default_factory=dict)
    """For the answer."""

    def connection(self) -> AbstractAsyncContextManager[Connection]:
        return self.state.pool.connection()

    @property
    def actor(self) -> str:
        """Under which name the audit knows the caller."""
        return f"api:{self.principal.subject}"

    def path(self, name: str) -> str:
        return str(self.request.path_params[name])

    def job_id(self) -> int:
        text = self.path("id")
        if not re.fullmatch(r"\d{1,19}", text, re.ASCII) or not 1 <= int(text) <= LARGEST_ID:
            raise JobNotFound("job not found")
        return int(text)

    def queue(self, queue: str) -> str:
        """The queue, if the caller may use it."""
        if not self.principal.sees(queue):
            raise Problem(403, "forbidden", f"queue: this token is not for queue {queue}")
        return queue


def answer(status: int, body: str, headers: Mapping[str, str] | None = None) -> Response:
    """`body` is JSON text."""
    return Response(body, status, headers, JSON)


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


async def once(call: Call, do: Callable[[Connection], Awaitable[Answer]]) -> Response:
    """Does it, or with an Idempotency-Key that is known gives the first answer again."""
    given = call.request.headers.getlist("idempotency-key")
    if not given:
        async with call.connection() as conn:
            return _response(await do(conn))
    text = given[0].strip()
    if len(text) >= 2 and text[0] == text[-1] == '"':
        text = text[1:-1]
    if len(given) > 1 or not _KEY.fullmatch(text):
        raise Problem(400, "validation", "Idempotency-Key: must be one text of 1 to 255 visible ASCII characters")
    route = f"{call.endpoint.method} {call.endpoint.path}"
    key = answers.Key(call.principal.subject, route, text, hashlib.sha256(canonical(call.raw)).digest())
    async with call.connection() as conn, conn.transaction():
        first = await answers.first_answer(conn, key)
        if first is not None:
            return _response(first, {"idempotent-replayed": "true"})
        given_now = await do(conn)
        await answers.keep(conn, key, given_now)
        return _response(given_now)


def _response(given: Answer, more: Mapping[str, str] | None = None) -> Response:
    headers = dict(more or {})
    if given.location:
        headers["location"] = given.location
    return answer(given.status, given.body, headers)
