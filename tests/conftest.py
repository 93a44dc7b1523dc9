"""Fixtures that every test may use.

A test that names `dsn` or `conn` runs on every server there is: PostgreSQL 18 from the wheel ("pg18"), and 15 where one
is installed ("pg15"). Each gets a database of its own, cloned from a migrated template and dropped afterwards; a
connection that the test leaves open fails it.

`async def` tests run on the loop of `runner`, and so does everything that a fixture does with `runner.run(…)`. That is
how `conn`, an async autocommit connection, belongs to the loop of its test; a test opens more of them with
`await psycopg.AsyncConnection.connect(dsn, autocommit=True)`. A task that outlives its test fails it.
"""

import asyncio
import inspect
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from hypothesis import HealthCheck, settings

from pgqueue import migrate
from pgqueue.embedded import PostgresServer, installed_postgres, start_postgres

BIN_DIRS = {"pg18": None} | ({"pg15": found} if (found := installed_postgres(15)) else {})
TEMPLATE = "pgqueue_template"
_numbers = count(1)


def pytest_configure() -> None:
    # Whoever ends pytest, the servers must end, too.
    signal.signal(signal.SIGTERM, lambda *_: pytest.exit("SIGTERM"))
    # How long an example takes is the machine's affair.
    settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("patient")


@pytest.fixture(autouse=True)
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}

    async def test() -> None:
        before = asyncio.all_tasks()
        await pyfuncitem.obj(**arguments)
        leaked = asyncio.all_tasks() - before
        # One that was told to end may have to wait for the server first.
        if ending := {task for task in leaked if task.cancelling()}:
            leaked -= (await asyncio.wait(ending, timeout=10))[0]
        if leaked:
            pytest.fail(f"the test left tasks behind: {leaked}")

    pyfuncitem.funcargs["runner"].run(test())
    return True


@pytest.fixture(scope="session", params=BIN_DIRS)
def server(request: pytest.FixtureRequest) -> Iterator[PostgresServer]:
    """A PostgreSQL of its own, with the template database in it."""
    with tempfile.TemporaryDirectory(prefix="pgqueue-", dir=_ram_disk()) as directory:
        Path(directory).chmod(0o711)  # as root the server runs as another user, who must get in
        server = start_postgres(Path(directory), bin_dir=BIN_DIRS[request.param], fast=True)
        try:
            # The user has the schema's name: "$user" would forgive statements that do not name the schema.
            _execute(server.dsn, "ALTER ROLE CURRENT_USER SET search_path = public")
            _execute(server.dsn, f"CREATE DATABASE {TEMPLATE}")
            migrate.up(_database(server, TEMPLATE))
            yield server
        finally:
            server.stop()


@pytest.fixture
def empty_dsn(server: PostgresServer) -> Iterator[str]:
    """A database without pgqueue's schema."""
    yield from _clone(server, "template1")


@pytest.fixture
def dsn(server: PostgresServer) -> Iterator[str]:
    """A migrated database."""
    yield from _clone(server, TEMPLATE)


@pytest.fixture
def conn(dsn: str, runner: asyncio.Runner) -> Iterator[psycopg.AsyncConnection]:
    """An async autocommit connection to `dsn`, on the test's own loop."""
    connection = runner.run(psycopg.AsyncConnection.connect(dsn, autocommit=True))
    yield connection
    runner.run(connection.close())


def _ram_disk() -> Path | None:
    """A database is cloned there in 20 ms, on a disk in 400; containers often have one that is too small."""
    place = Path("/dev/shm")
    fits = place.is_dir() and os.access(place, os.W_OK) and shutil.disk_usage(place).free > 4 * 2**30
    return place if fits else None


def _clone(server: PostgresServer, template: str) -> Iterator[str]:
    name = f"test_{next(_numbers)}"
    _execute(server.dsn, f"CREATE DATABASE {name} TEMPLATE {template}")
    yield _database(server, name)
    # The server notices a little later that a connection was closed.
    deadline = time.monotonic() + 15
    sessions = f"SELECT pid, application_name, state, query FROM pg_stat_activity WHERE datname = '{name}'"
    sessions += " AND backend_type = 'client backend'"
    while (left := _execute(server.dsn, sessions)) and time.monotonic() < deadline:
        time.sleep(0.02)
    _execute(server.dsn, f"DROP DATABASE {name} WITH (FORCE)")
    assert not left, f"the test left connections open: {left}"


def _database(server: PostgresServer, name: str) -> str:
    return urlsplit(server.dsn)._replace(path=f"/{name}").geturl()


def _execute(dsn: str, statement: Any) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        cursor = connection.execute(statement)
        return cursor.fetchall() if cursor.description else []
