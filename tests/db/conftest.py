"""Fixtures of the database tests."""

import psycopg
import pytest

from pgqueue.embedded import PostgresServer
from tests.db.logins import LOGINS, PASSWORD


@pytest.fixture(scope="session")
def logins(server: PostgresServer) -> None:
    """A login test_… for each role. Roles belong to the whole server, so they are made once."""
    with psycopg.connect(server.dsn, autocommit=True) as conn:
        for role in LOGINS:
            conn.execute(f"CREATE ROLE test_{role} LOGIN PASSWORD '{PASSWORD}'")
            if role != "stranger":
                conn.execute(f"GRANT pgqueue_{role} TO test_{role}")
