"""Fixtures for tests with real workers: a view of the database, and a fleet that ends with the test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.processes import Database, Fleet


@pytest.fixture
def db(dsn: str) -> Iterator[Database]:
    database = Database(dsn)
    yield database
    database.close()


@pytest.fixture
def fleet(db: Database, tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(db.dsn, tmp_path, db)
    yield fleet
    fleet.close()
