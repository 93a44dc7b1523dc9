"""The HTTP API as an ASGI app: create_app(settings)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from pgqueue import accounts
from pgqueue.api.accounts import Passwords
from pgqueue.api.auth import Keys, Principal, Verifier
from pgqueue.api.cursors import Cursors
from pgqueue.api.docs import installed_version
from pgqueue.api.edge import Edge
from pgqueue.api.limits import Limiter
from pgqueue.api.metrics import Cluster, Metrics
from pgqueue.api.problems import Problem
from pgqueue.api.stream import Tail
from pgqueue.api.waiter import Waiter
from pgqueue.errors import InvalidSettings
from pgqueue.pools import ServerPool
from pgqueue.settings import Settings

REVOKED_EVERY = 1.0
"""Seconds for which another process's revocation may go unnoticed."""


class State:
    """What all requests of a process share."""

    def __init__(self, settings: Settings, dsn: str) -> None:
        self.settings = settings
        keys = Keys(settings)
        if not settings.jwt_secret and not settings.jwks_file:
            problem = "JWT_SECRET: must be set, or PGQUEUE_JWKS_FILE; make one with: openssl rand -hex 32"
            raise InvalidSettings([problem])
        self.pool = ServerPool(dsn, settings.api_connections, "pgqueue-api")
        self.verifier = Verifier(settings, keys)
        self.cursors = Cursors(settings.jwt_secret or dsn)
        self.limiter = Limiter(settings.rate_limit)
        self.guesses_by_name = Limiter(20, "login")
        self.guesses_by_address = Limiter(120, "login")
        self.passwords = Passwords()
        self.stopping = asyncio.Event()
        self.waiter = Waiter(self.pool.connection, self.stopping)
        self.tail = Tail(self.pool.connection, self.stopping)
        self.metrics = Metrics(Cluster(self.pool.connection), installed_version())
        self._looked = -REVOKED_EVERY

    def look_for_revoked(self) -> None:
        """At the next request."""
        self._looked = -REVOKED_EVERY

    async def is_revoked(self, principal: Principal) -> bool:
        now = time.monotonic()
        if now - self._looked >= REVOKED_EVERY:
            # Whoever comes meanwhile goes by what was known a second ago.
            before, self._looked = self._looked, now
            try:
                async with self.pool.connection() as conn:
                    self.verifier.revoked = await accounts.revoked_tokens(conn)
            except BaseException:
                self._looked = before
                raise
        return self.verifier.is_revoked(principal)


def create_app(settings: Settings, dsn: str | None = None) -> Starlette:
    """`dsn`: where the database is, if the settings do not say."""
    from pgqueue.api.routes import TABLE, routes

    url = dsn or settings.database_url
    if url is None:
        raise InvalidSettings(["DATABASE_URL: must be set"])
    state = State(settings, url)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await state.pool.open()
        try:
            yield
        finally:
            state.stopping.set()
            await state.waiter.close()
            await state.tail.close()
            await state.pool.close()

    middleware = [Middleware(Edge, count=state.metrics.count)]
    if settings.cors_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(settings.cors_origins),
                allow_methods=["GET", "POST", "PATCH", "DELETE"],
                allow_headers=["authorization", "content-type", "idempotency-key", "if-match", "last-event-id"],
                expose_headers=["etag", "link", "location", "x-total-count", "x-request-id", "idempotent-replayed"],
            )
        )
    app = Starlette(
        routes=routes(state, TABLE),
        middleware=middleware,
        lifespan=lifespan,
        exception_handlers={HTTPException: _not_found},
    )
    app.router.redirect_slashes = False
    app.state.pgqueue = state
    return app


async def _not_found(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    kind = {404: "not-found", 405: "method-not-allowed"}.get(status, "validation")
    text = "there is no such route" if status == 404 else "the request is not valid"
    return Problem(status, kind, text).response(request.scope["path"], request.scope["pgqueue.request_id"])
