"""Which errors mean that the server or the connection is gone."""

import psycopg
import pytest
from psycopg import errors as pg

from pgqueue.db import is_outage


@pytest.mark.parametrize(
    "error",
    [
        psycopg.OperationalError("server closed the connection unexpectedly"),
        psycopg.InternalError("got no result from the query"),  # cut between the statement and its answer
        pg.AdminShutdown(),
        pg.TooManyConnections(),
        pg.ReadOnlySqlTransaction(),
        ConnectionResetError(),
    ],
)
def test_they_pass(error: BaseException) -> None:
    assert is_outage(error)


@pytest.mark.parametrize(
    "error", [pg.UndefinedTable(), pg.InFailedSqlTransaction(), psycopg.ProgrammingError(), ValueError()]
)
def test_they_do_not(error: BaseException) -> None:
    assert not is_outage(error)
