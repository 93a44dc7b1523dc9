"""The API on a real socket: in a thread of the test (`api`), or as a process of its own (`start_api`)."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
import uvicorn
from argon2 import PasswordHasher

from pgqueue.api.accounts import Passwords
from pgqueue.api.app import State, create_app
from pgqueue.api.auth import SCOPES, create_token
from pgqueue.api.protocol import Protocol
from pgqueue.settings import Settings

SECRET = "test-0123456789-abcdefghij-0123456789"


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    # The SQL of these routes does not differ between the versions of PostgreSQL, and tests/db runs it on all.
    if "server" in metafunc.fixturenames:
        metafunc.definition.add_marker(pytest.mark.parametrize("server", ["pg18"], indirect=True, scope="session"))


@dataclass
class Answer:
    status: int
    headers: http.client.HTTPMessage
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


@dataclass
class Client:
    port: int
    token: str | None = None

    def __call__(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        raw: bytes | None = None,
        token: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        sent = dict(headers or {})
        if body is not None:
            raw = json.dumps(body).encode()
        if raw is not None:
            sent.setdefault("Content-Type", "application/json")
        token = self.token if token is None else token
        if token:
            sent["Authorization"] = f"Bearer {token}"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, raw, sent)
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read().decode())
        finally:
            connection.close()


@dataclass
class Api(Client):
    dsn: str = ""
    settings: Settings = field(default_factory=Settings)
    state: State | None = None

    def query(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            cursor = conn.execute(statement, parameters)
            return cursor.fetchall() if cursor.description else []

    def value(self, statement: str, *parameters: Any) -> Any:
        return self.query(statement, *parameters)[0][0]

    def count(self) -> int:
        return int(self.value("SELECT count(*) FROM pgqueue.jobs"))

    def make_token(self, scope: str = "jobs:read jobs:write", ttl: float = 600, **more: Any) -> str:
        return create_token(self.settings, more.pop("subject", "test"), scope.split(), ttl, **more)[0]


@contextmanager
def served(settings: Settings, dsn: str) -> Iterator[Api]:
    app = create_app(settings, dsn)
    app.state.pgqueue.passwords = Passwords(PasswordHasher(time_cost=1, memory_cost=64, parallelism=1))
    config = uvicorn.Config(
        app, port=0, log_config=None, access_log=False, server_header=False, lifespan="on", http=Protocol, ws="none"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        token = create_token(settings, "admin", SCOPES, 600)[0] if settings.jwt_secret else None
        yield Api(port, token, dsn, settings, app.state.pgqueue)
    finally:
        app.state.pgqueue.stopping.set()
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture
def serve(dsn: str) -> Callable[..., Any]:
    """`with serve(signup=True) as api:` with other settings."""
    return lambda **settings: served(Settings(**({"jwt_secret": SECRET} | settings)), dsn)


@pytest.fixture
def api(dsn: str) -> Iterator[Api]:
    with served(Settings(jwt_secret=SECRET), dsn) as api:
        yield api


def environment(dsn: str, **more: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return kept | {"DATABASE_URL": dsn, "JWT_SECRET": SECRET, "PYTHONUNBUFFERED": "1"} | more


class Process:
    """`pgqueue api` or `pgqueue worker`, and all that it says."""

    def __init__(self, arguments: list[str], environ: dict[str, str], until: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pgqueue", *arguments], env=environ, stderr=subprocess.PIPE, text=True, cwd="/"
        )
        self.lines: list[str] = []
        self._ready = threading.Event()
        self._until = until
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        if not self._ready.wait(30) or until not in self.log:
            self.end(signal.SIGKILL)
            pytest.fail(f"it did not start: {self.log}")

    def _read(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            self.lines.append(line)
            if self._until in line:
                self._ready.set()
        self._ready.set()

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def end(self, number: int = signal.SIGTERM, seconds: float = 20) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(seconds)
        self._thread.join(5)
        assert self.process.stderr
        self.process.stderr.close()
        return code


@contextmanager
def api_process(dsn: str, *arguments: str, **environ: str) -> Iterator[tuple[Api, Process]]:
    process = Process(["api", "--port", "0", *arguments], environment(dsn, **environ), "listening on")
    try:
        found = re.search(r"listening on http://[\d.]+:(\d+)", process.log)
        assert found, process.log
        settings = Settings(jwt_secret=SECRET)
        yield Api(int(found[1]), create_token(settings, "admin", SCOPES, 600)[0], dsn, settings), process
    finally:
        process.end(signal.SIGKILL)


@contextmanager
def worker_process(dsn: str, **environ: str) -> Iterator[Process]:
    process = Process(["worker", "--threads", "8"], environment(dsn, **environ), "started with")
    try:
        yield process
    finally:
        process.end()


def until(condition: Callable[[], Any], seconds: float = 15) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
    return found
