"""The pytest plugin: a real PostgreSQL, a database for each test, and jobs that run when the test says so.

    def test_signup(client, pgqueue):
        client.post("/signup", json={"email": "a@x.org"})
        pgqueue.assert_enqueued(send_email, to="a@x.org")
        pgqueue.run()
        assert pgqueue.get(send_email).status == "completed"

The server is that of DATABASE_URL, in which databases are made and dropped, or else an embedded one. During the test
every PgQueue that exists, and DATABASE_URL, lead to the test's database. A project that has a database of its own for
its tests overrides the fixture `pgqueue_db`, which returns a URL.

Nothing is imported before a fixture is used, so that the plugin costs other tests nothing.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pgqueue.testing.harness import Harness

_numbers = count(1)


@pytest.fixture(scope="session")
def pgqueue_server() -> Iterator[str]:
    """The URL of a server in which databases may be made."""
    from pgqueue.settings import Settings

    settings = Settings.from_env()
    if settings.database_url is not None:
        yield settings.database_url
        return
    from pgqueue.embedded import start_postgres

    with tempfile.TemporaryDirectory(prefix="pgqueue-") as directory:
        Path(directory).chmod(0o711)  # as root the server runs as another user, who must get in
        server = start_postgres(Path(directory), bin_dir=settings.pg_bin, fast=True)
        try:
            yield server.dsn
        finally:
            server.stop()


@pytest.fixture(scope="session")
def pgqueue_template(pgqueue_server: str) -> Iterator[str]:
    """The URL of a database with pgqueue's schema, of which each test gets a copy; add tables of your own to it."""
    from pgqueue import migrate
    from pgqueue.testing.databases import temporary

    with temporary(pgqueue_server, f"pgqueue_template_{os.getpid()}") as dsn:
        migrate.up(dsn)
        yield dsn


@pytest.fixture
def pgqueue_db(pgqueue_server: str, pgqueue_template: str) -> Iterator[str]:
    """The URL of a database for this test."""
    from pgqueue.testing.databases import temporary

    with temporary(pgqueue_server, f"pgqueue_test_{os.getpid()}_{next(_numbers)}", pgqueue_template) as dsn:
        yield dsn


@pytest.fixture
def pgqueue(pgqueue_db: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    """What a test asks about its jobs, and how it runs them."""
    from pgqueue.testing.harness import Harness

    monkeypatch.setenv("DATABASE_URL", pgqueue_db)
    with Harness(pgqueue_db) as harness:
        yield harness
