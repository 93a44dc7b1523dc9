"""Jobs on the caller's own connection, in the caller's own transaction, whichever driver it is.

The kind of a connection is told by the names of its classes, so no driver is imported that the caller does not use.
All parameters travel as text, which PostgreSQL casts, so that no driver's view of types matters. A driver's errors stay
as they are: the transaction is the caller's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache
from importlib import import_module
from typing import Any

from pgqueue.db import array_of_texts
from pgqueue.enqueue import Added, statement_for
from pgqueue.job import NewJob
from pgqueue.sql import SQL

Parameters = Mapping[str, Any]
Rows = Sequence[Any]

SUPPORTED = (
    "a psycopg Connection or AsyncConnection, a psycopg2 connection, an asyncpg Connection (also from a pool), "
    "a SQLAlchemy Connection, Session, scoped_session, AsyncConnection or AsyncSession, "
    "or a Django connection (django.db.connection)"
)


async def add_job(conn: Any, job: NewJob) -> Added:
    return _added(await _run(conn, SQL.add_job, job.parameters()))[0]


def add_job_sync(conn: Any, job: NewJob) -> Added:
    return _added(_run_sync(conn, SQL.add_job, job.parameters()))[0]


async def add_jobs(conn: Any, jobs: Sequence[NewJob]) -> list[Added]:
    """Without idempotency keys."""
    return _added(await _run(conn, *statement_for(jobs)))


def add_jobs_sync(conn: Any, jobs: Sequence[NewJob]) -> list[Added]:
    return _added(_run_sync(conn, *statement_for(jobs)))


def _added(rows: Rows) -> list[Added]:
    return [Added(row[0], row[1] if len(row) > 1 else True) for row in rows]


async def _run(conn: Any, statement: str, parameters: Parameters) -> Rows:
    is_async, send = _kind(type(conn))
    if not is_async:
        raise TypeError(f"a {_name(type(conn))} is synchronous: use enqueue_sync, without await")
    rows: Rows = await send(conn, statement, parameters)
    return rows


def _run_sync(conn: Any, statement: str, parameters: Parameters) -> Rows:
    is_async, send = _kind(type(conn))
    if is_async:
        raise TypeError(f"a {_name(type(conn))} is asynchronous: use await enqueue(…)")
    rows: Rows = send(conn, statement, parameters)
    return rows


def _psycopg(conn: Any, statement: str, parameters: Parameters) -> Rows:
    # The caller's rows may be dicts or what not.
    cursor = conn.cursor(row_factory=import_module("psycopg.rows").tuple_row)
    rows: Rows = cursor.execute(_named(statement), _texts(parameters), prepare=False).fetchall()
    return rows


async def _psycopg_async(conn: Any, statement: str, parameters: Parameters) -> Rows:
    cursor = conn.cursor(row_factory=import_module("psycopg.rows").tuple_row)
    await cursor.execute(_named(statement), _texts(parameters), prepare=False)
    rows: Rows = await cursor.fetchall()
    return rows


def _psycopg2(conn: Any, statement: str, parameters: Parameters) -> Rows:
    with conn.cursor(cursor_factory=import_module("psycopg2.extensions").cursor) as cursor:
        cursor.execute(_named(statement), _texts(parameters))
        rows: Rows = cursor.fetchall()
    return rows


async def _asyncpg(conn: Any, statement: str, parameters: Parameters) -> Rows:
    text, names = _numbered(statement)
    values = _texts(parameters)
    rows: Rows = await conn.fetch(text, *(values[name] for name in names))
    return rows


def _sqlalchemy(conn: Any, statement: str, parameters: Parameters) -> Rows:
    text = import_module("sqlalchemy").text(_coloned(statement))
    rows: Rows = conn.execute(text, _texts(parameters)).all()
    return rows


async def _sqlalchemy_async(conn: Any, statement: str, parameters: Parameters) -> Rows:
    text = import_module("sqlalchemy").text(_coloned(statement))
    rows: Rows = (await conn.execute(text, _texts(parameters))).all()
    return rows


def _django(conn: Any, statement: str, parameters: Parameters) -> Rows:
    if conn.vendor != "postgresql":
        raise TypeError(f"jobs live in PostgreSQL, and Django's connection {conn.alias!r} goes to {conn.vendor}")
    with conn.cursor() as cursor:
        cursor.execute(_named(statement), _texts(parameters))
        rows: Rows = cursor.fetchall()
    return rows


# By top-level module and class: whether it is asynchronous, and how to send a statement.
KINDS: dict[tuple[str, str], tuple[bool, Callable[..., Any]]] = {
    ("psycopg", "Connection"): (False, _psycopg),
    ("psycopg", "AsyncConnection"): (True, _psycopg_async),
    ("psycopg2", "connection"): (False, _psycopg2),
    ("asyncpg", "Connection"): (True, _asyncpg),
    ("asyncpg", "PoolConnectionProxy"): (True, _asyncpg),
    ("sqlalchemy", "Connection"): (False, _sqlalchemy),
    ("sqlalchemy", "Session"): (False, _sqlalchemy),
    ("sqlalchemy", "scoped_session"): (False, _sqlalchemy),
    ("sqlalchemy", "AsyncConnection"): (True, _sqlalchemy_async),
    ("sqlalchemy", "AsyncSession"): (True, _sqlalchemy_async),
    ("sqlalchemy", "async_scoped_session"): (True, _sqlalchemy_async),
    ("django", "BaseDatabaseWrapper"): (False, _django),
    ("django", "ConnectionProxy"): (False, _django),
}


def _kind(cls: type) -> tuple[bool, Callable[..., Any]]:
    for base in cls.__mro__:
        if (kind := KINDS.get((base.__module__.split(".")[0], base.__name__))) is not None:
            return kind
    raise TypeError(f"conn is a {_name(cls)}; it must be {SUPPORTED}")


def _name(cls: type) -> str:
    return f"{cls.__module__.split('.')[0]} {cls.__name__}"


# Statements in each placeholder style. `text()` of SQLAlchemy cannot have "::", so every cast is spelt out.
_PARAMETER = re.compile(r"%\((\w+)\)s::(\w+(?:\[\])?)")
_LEFT_OUT = re.compile(r"%\(\w+\)s(?!::)")


@cache
def _named(statement: str) -> str:
    return _styled(statement, lambda name: f"%({name})s")


@cache
def _coloned(statement: str) -> str:
    return _styled(statement, lambda name: f":{name}")


@cache
def _numbered(statement: str) -> tuple[str, list[str]]:
    names: list[str] = []

    def number(name: str) -> str:
        if name not in names:
            names.append(name)
        return f"${names.index(name) + 1}"

    return _styled(statement, number), names


def _styled(statement: str, placeholder: Callable[[str], str]) -> str:
    assert not _LEFT_OUT.search(statement), "every parameter needs a cast"
    text = re.sub(r"--.*", "", statement)
    return _PARAMETER.sub(lambda found: f"CAST(CAST({placeholder(found[1])} AS text) AS {found[2]})", text)


def _texts(parameters: Parameters) -> dict[str, str | None]:
    return {name: _text(value) for name, value in parameters.items()}


def _text(value: Any) -> str | None:
    match value:
        case None:
            return None
        case datetime():
            return value.isoformat()
        case list():
            return "{" + ",".join("NULL" if each is None else _quoted(each) for each in value) + "}"
    return str(value)


def _quoted(value: Any) -> str:
    return array_of_texts([str(_text(value))])[1:-1]
