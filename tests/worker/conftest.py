"""Fixtures for tests with real workers: a view of the database, and a fleet that ends with the test.

Tests with the mark `beside` wait more than they work. Those of a file run beside each other, three at a time, each with
a database and a fleet of its own; pytest hears of their results in its usual order.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pgqueue.embedded import PostgresServer
from tests.worker.processes import Database, Fleet, database_on

AT_A_TIME = 3
_pool = ThreadPoolExecutor(AT_A_TIME)
_running: dict[str, Future[None]] = {}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "beside: takes only db and fleet, and runs beside others of its file")


@pytest.fixture
def db(request: pytest.FixtureRequest, server: PostgresServer) -> Iterator[Database | None]:
    if request.node.get_closest_marker("beside"):
        yield None
        return
    database = Database(request.getfixturevalue("dsn"))
    yield database
    database.close()


@pytest.fixture
def fleet(db: Database | None, tmp_path: Path) -> Iterator[Fleet | None]:
    if db is None:
        yield None
        return
    fleet = Fleet(db.dsn, tmp_path, db)
    yield fleet
    fleet.close()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not pyfuncitem.get_closest_marker("beside"):
        return None
    if pyfuncitem.nodeid not in _running:
        server, places = (pyfuncitem._request.getfixturevalue(name) for name in ("server", "tmp_path_factory"))
        for item in pyfuncitem.session.items:
            if item.path == pyfuncitem.path and item.get_closest_marker("beside"):
                assert isinstance(item, pytest.Function)
                _running[item.nodeid] = _pool.submit(run_alone, item.obj, server, places.mktemp("beside"))
    _running.pop(pyfuncitem.nodeid).result()
    return True


def run_alone(test: Any, server: PostgresServer, directory: Path) -> None:
    with database_on(server) as db:
        fleet = Fleet(db.dsn, directory, db)
        try:
            test(db, fleet)
        except BaseException as error:
            for worker in fleet.workers:
                error.add_note(worker.tail())
            raise
        finally:
            fleet.close()
