"""A route as it is declared, and how a request passes through it: token, limits, models, handler, errors."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pgqueue.answers import InProgress
from pgqueue.api import body as bodies
from pgqueue.api.auth import SCOPES, Principal, Unauthorized
from pgqueue.api.calls import Call
from pgqueue.api.problems import Problem, invalid
from pgqueue.db import is_outage
from pgqueue.errors import DatabaseUnavailable, InvalidJob, InvalidSettings, JobNotFound, KeyReused, WrongStatus
from pgqueue.log import say

if TYPE_CHECKING:
    from pgqueue.api.app import State

logger = logging.getLogger("pgqueue.api")

OPEN, ANY = "open", "any"
"""Scopes: no token is needed; any good token will do."""
PATIENCE = 15.0
"""Seconds for a handler."""
_PASSING = ("40001", "40P01", "55P03", "57014")
_NOBODY = Principal("nobody", frozenset())
_LOCAL = Principal("dev", frozenset({"jobs:read", "jobs:write"}))

Handler = Callable[[Call], Awaitable[Response]]


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    method: str
    path: str
    scope: str | None = None
    """OPEN, ANY or one of SCOPES. There is no default that would let anybody in."""
    handler: Handler
    summary: str
    query: type[BaseModel] | None = None
    body: type[BaseModel] | None = None
    answer: Any = None
    status: int = 200
    also: Mapping[int, Any] = field(default_factory=dict)
    """Other good statuses, with their models."""
    errors: tuple[int, ...] = ()
    seed: bool = False
    """From before /api/v1: wrong values are 400, and what curl sends by itself is JSON."""
    dev: bool = False
    """In dev mode it needs no token."""
    confined: bool = True
    """Whether it can keep to the queues of a token that has only some."""
    keyed: bool = False
    """Whether it takes an Idempotency-Key."""
    optional_body: bool = False
    patience: float | None = PATIENCE
    media: str = "application/json"
    response_headers: tuple[str, ...] = ()

    def check(self) -> None:
        if self.scope not in (OPEN, ANY, *SCOPES):
            raise RuntimeError(f"{self.method} {self.path} has no scope: it must be open, any or {', '.join(SCOPES)}")
        if self.dev and not self.seed:
            raise RuntimeError(f"{self.method} {self.path}: only the old routes may be open in dev mode")

    @property
    def invalid(self) -> int:
        return 400 if self.seed else 422


class Dispatcher:
    """All methods of one path."""

    def __init__(self, state: State, endpoints: Mapping[str, Endpoint]) -> None:
        self._state = state
        self._endpoints = dict(endpoints)
        if "GET" in self._endpoints and self._endpoints["GET"].media != "text/event-stream":
            self._endpoints["HEAD"] = self._endpoints["GET"]
        self._allow = ", ".join(sorted(self._endpoints))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        endpoint = self._endpoints.get(scope["method"])
        headers: dict[str, str] = {}
        try:
            if endpoint is None:
                problem = f"{scope['method'][:20]} is not allowed here"
                raise Problem(405, "method-not-allowed", problem, headers={"allow": self._allow})
            scope["pgqueue.route"] = endpoint.path
            response = await self._serve(endpoint, request, headers)
        except Problem as problem:
            response = problem.response(scope["path"], scope["pgqueue.request_id"])
        for name, value in headers.items():
            response.headers.setdefault(name, value)
        await response(scope, receive, send)

    async def _serve(self, endpoint: Endpoint, request: Request, headers: dict[str, str]) -> Response:
        try:
            principal = await self._principal(endpoint, request)
            if endpoint.scope != OPEN:
                headers |= self._state.limiter.count(principal.jti or principal.subject)
            query = _query(endpoint, request)
            raw, body = await _body(endpoint, request)
            call = Call(self._state, request, endpoint, principal, query, body, raw, headers)
            async with asyncio.timeout(endpoint.patience):
                return await endpoint.handler(call)
        except Problem:
            raise
        except Exception as error:
            raise _problem(endpoint, error) from error

    async def _principal(self, endpoint: Endpoint, request: Request) -> Principal:
        if endpoint.scope == OPEN:
            return _NOBODY
        given = request.headers.getlist("authorization")
        if not given and endpoint.dev and self._state.settings.dev:
            return _local(request)
        try:
            kind, _, token = given[0].partition(" ") if len(given) == 1 else ("", "", "")
            if kind.lower() != "bearer" or not token:
                raise Unauthorized("send one header: Authorization: Bearer <token>")
            principal = self._state.verifier.verify(token.strip())
            if await self._state.is_revoked(principal):
                raise Unauthorized("the token was revoked")
        except Unauthorized as error:
            challenge = 'Bearer realm="pgqueue"' + (', error="invalid_token"' if given else "")
            raise Problem(401, "unauthorized", str(error), headers={"www-authenticate": challenge}) from None
        request.scope["pgqueue.subject"] = principal.subject
        assert endpoint.scope is not None
        if endpoint.scope != ANY and not principal.may(endpoint.scope):
            challenge = f'Bearer realm="pgqueue", error="insufficient_scope", scope="{endpoint.scope}"'
            problem = f"this needs the scope {endpoint.scope}"
            raise Problem(403, "forbidden", problem, headers={"www-authenticate": challenge})
        if principal.queues is not None and not endpoint.confined:
            raise Problem(403, "forbidden", "this is not for tokens that are confined to queues")
        return principal


def _local(request: Request) -> Principal:
    """Without a token, in dev mode. A page in the browser of this machine must not use that."""
    origin, host = request.headers.get("origin"), request.headers.get("host", "")
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    if name.strip("[]").lower() not in ("localhost", "127.0.0.1", "::1"):
        raise Problem(403, "forbidden", "without a token this is only for localhost")
    if origin is not None and origin.partition("://")[2] != host:
        raise Problem(403, "forbidden", "without a token this is not for pages of other origins")
    return _LOCAL


def _query(endpoint: Endpoint, request: Request) -> Any:
    if endpoint.query is None:
        return None
    values: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name in values:
            raise Problem(endpoint.invalid, "validation", f"{name}: is given twice")
        if "\0" in value:
            raise Problem(endpoint.invalid, "validation", f"{name}: must not have NUL")
        values[name] = value
    try:
        return endpoint.query.model_validate(values)
    except ValidationError as error:
        raise invalid(error, endpoint.invalid, "query") from None


async def _body(endpoint: Endpoint, request: Request) -> tuple[Any, Any]:
    if endpoint.body is None:
        return None, None
    lenient = endpoint.seed or (endpoint.optional_body and "content-type" not in request.headers)
    data = await bodies.read(request, lenient=lenient)
    raw = {} if endpoint.optional_body and not data else bodies.parse(data)
    try:
        return raw, endpoint.body.model_validate(raw)
    except ValidationError as error:
        raise invalid(error, endpoint.invalid, "body") from None


def _problem(endpoint: Endpoint, error: Exception) -> Problem:
    match error:
        case KeyReused():
            return Problem(422, "idempotency-key-reused", str(error))
        case InvalidJob():
            return Problem(endpoint.invalid, "validation", str(error).replace("pgqueue.jobs: ", ""))
        case JobNotFound():
            return Problem(404, "not-found", "job not found" if "job" in str(error) else str(error))
        case WrongStatus():
            return Problem(409, "invalid-status", str(error))
        case InvalidSettings():
            return Problem(422, "validation", str(error))
        case InProgress():
            text = "a request with this Idempotency-Key is under way"
            return Problem(409, "idempotency-in-progress", text, headers={"retry-after": "1"})
        case TimeoutError():
            text = f"no answer within {endpoint.patience:g} s"
            return Problem(503, "unavailable", text, headers={"retry-after": "2"})
    if isinstance(error, DatabaseUnavailable) or is_outage(error):
        say(logger, logging.WARNING, "api.unavailable", f"PostgreSQL does not answer ({type(error).__name__})")
        return Problem(503, "unavailable", "the database does not answer", headers={"retry-after": "2"})
    if getattr(error, "sqlstate", None) in _PASSING:
        return Problem(503, "unavailable", "the database is busy: try again", headers={"retry-after": "1"})
    # Neither the words nor the values: they may hold what was sent.
    where = " < ".join(
        f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)[::-1][:6]
    )
    state = getattr(error, "sqlstate", None)
    text = f"{type(error).__name__}{f' {state}' if state else ''} in {endpoint.method} {endpoint.path}"
    say(logger, logging.ERROR, "api.error", text, where=where)
    return Problem(500, "internal", "something went wrong here; the log knows more under this request_id")
