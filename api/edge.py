"""The outermost layer: request ids, headers that every answer has, the access log, and the last catch."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from uuid import uuid4

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pgqueue.api.problems import Problem
from pgqueue.log import say

logger = logging.getLogger("pgqueue.api.access")

HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'; base-uri 'none'",
}
PROBES = ("/health", "/readyz", "/metrics")
METHODS = ("GET", "HEAD", "POST", "PATCH", "DELETE", "PUT", "OPTIONS")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Edge:
    def __init__(self, app: ASGIApp, count: Callable[[str, str, int, float], None]) -> None:
        """`count` is told of every answer: route, method, status, seconds."""
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status = time.perf_counter(), 0
        given = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"), "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid4().hex
        scope["pgqueue.request_id"] = request_id

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except Exception as error:
            say(logger, logging.ERROR, "api.error", f"{type(error).__name__} outside of a route", request_id=request_id)
            if status:
                raise RuntimeError("an answer broke off") from None
            problem = Problem(500, "internal", "something went wrong here")
            await problem.response(scope["path"], request_id)(scope, receive, send_with_headers)
        finally:
            route, seconds = scope.get("pgqueue.route", "-"), time.perf_counter() - begun
            self._count(route, scope["method"] if scope["method"] in METHODS else "other", status, seconds)
            if route not in PROBES:
                took = seconds * 1000
                # The route and not the path, and never the query: both may hold what is nobody's business.
                text = f"{scope['method'][:20]} {route} {status} {took:.1f} ms"
                fields = {"status": status, "ms": round(took, 1), "request_id": request_id}
                say(logger, logging.INFO, "api.request", text, **fields, subject=scope.get("pgqueue.subject"))
