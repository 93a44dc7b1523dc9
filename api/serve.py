"""The API as a process: uvicorn, signals, and an end that lets requests finish."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import socket
from types import FrameType

import uvicorn

from pgqueue import db, migrate
from pgqueue.api.app import State, create_app
from pgqueue.api.protocol import Protocol
from pgqueue.errors import DatabaseUnavailable, InvalidSettings, PgQueueError
from pgqueue.log import say
from pgqueue.settings import Settings

logger = logging.getLogger("pgqueue.api")


class Server(uvicorn.Server):
    """Says when it serves, and tells those who wait at the first signal, so that they do not keep the process."""

    def __init__(self, config: uvicorn.Config, state: State, where: str) -> None:
        super().__init__(config)
        self._state = state
        self._where = where

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        mode = "; dev mode: /submit_job, /jobs and /db/jobs need no token" if self._state.settings.dev else ""
        say(logger, logging.INFO, "api.started", f"listening on {self._where}{mode}", url=self._where)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._state.stopping.set()
        super().handle_exit(sig, frame)
        # uvicorn would send itself the signal again once it has ended; this process has ended well.
        self._captured_signals.clear()


def serve(settings: Settings, dsn: str, host: str, port: int) -> None:
    if settings.dev and not is_loopback(host):
        raise InvalidSettings([f"PGQUEUE_DEV: is only for loopback, and --host is {host}"])
    listener = _listen(host, port)
    try:
        app = create_app(settings, dsn)
        _check_schema(dsn)
        state: State = app.state.pgqueue
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=True,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=max(1, int(settings.shutdown_grace)),
            limit_concurrency=2000,
            backlog=2048,
            http=Protocol,
            ws="none",
            lifespan="on",
        )
        where = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        Server(config, state, where).run([listener])
        say(logger, logging.INFO, "api.stopped", "stopped")
    finally:
        listener.close()


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise PgQueueError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener


def _check_schema(dsn: str) -> None:
    """A schema that this code does not know refuses to start; a database that is not there yet is waited for."""

    async def check() -> None:
        async with await db.connect(dsn, application_name="pgqueue-api") as conn:
            await migrate.check_schema(conn)

    try:
        asyncio.run(check())
    except DatabaseUnavailable:
        say(logger, logging.WARNING, "api.unavailable", "PostgreSQL does not answer yet: serving 503 until it does")
