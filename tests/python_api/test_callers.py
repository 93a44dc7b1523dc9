"""Jobs in the caller's own transaction: every kind of connection, committed and rolled back."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import psycopg
import psycopg2
import psycopg2.extras
import pytest
import sqlalchemy
import sqlalchemy.ext.asyncio
import sqlalchemy.orm
from psycopg.rows import dict_row
from sqlalchemy.pool import NullPool

from pgqueue import PgQueue
from pgqueue.db import Connection

app = PgQueue("postgresql://nobody@127.0.0.1:1/nothing")  # what is tested must never open connections of its own


@app.job(queue="ships", retry=3, tags=["a"])
async def ship(order: int, note: str = "") -> None: ...


class Undo(Exception):
    pass


# Each gives a connection in a transaction, which Undo rolls back and a good end commits.


@contextmanager
def psycopg_connection(dsn: str) -> Iterator[Any]:
    with psycopg.connect(dsn, row_factory=dict_row) as conn:
        yield conn


@contextmanager
def psycopg2_connection(dsn: str) -> Iterator[Any]:
    conn = psycopg2.connect(dsn, cursor_factory=psycopg2.extras.RealDictCursor)
    try:
        with conn:
            yield conn
    finally:
        conn.close()


def engine(dsn: str, driver: str) -> sqlalchemy.Engine:
    return sqlalchemy.create_engine(dsn.replace("postgresql:", f"postgresql+{driver}:"), poolclass=NullPool)


@contextmanager
def sqlalchemy_connection(dsn: str) -> Iterator[Any]:
    with engine(dsn, "psycopg").begin() as conn:
        yield conn


@contextmanager
def sqlalchemy_session(dsn: str) -> Iterator[Any]:
    with sqlalchemy.orm.Session(engine(dsn, "psycopg2")) as session, session.begin():
        yield session


@contextmanager
def sqlalchemy_scoped_session(dsn: str) -> Iterator[Any]:
    session = sqlalchemy.orm.scoped_session(sqlalchemy.orm.sessionmaker(engine(dsn, "psycopg")))
    try:
        with session.begin():
            yield session
    finally:
        session.remove()


@contextmanager
def django_connection(dsn: str, proxy: bool = False) -> Iterator[Any]:
    import django
    from django.conf import settings
    from django.db import transaction
    from django.db.utils import ConnectionHandler
    from django.utils.connection import ConnectionProxy

    if not settings.configured:
        settings.configure(USE_TZ=True)
        django.setup()
    url = urlsplit(dsn)
    database = {"ENGINE": "django.db.backends.postgresql", "NAME": url.path[1:], "USER": url.username}
    database |= {"PASSWORD": url.password, "HOST": url.hostname, "PORT": url.port}
    handler = ConnectionHandler({"default": database})
    conn = handler["default"]
    transaction.connections, real = handler, transaction.connections
    try:
        with transaction.atomic():
            yield ConnectionProxy(handler, "default") if proxy else conn
    finally:
        transaction.connections = real
        conn.close()


@contextmanager
def django_proxy(dsn: str) -> Iterator[Any]:
    with django_connection(dsn, proxy=True) as conn:
        yield conn


@asynccontextmanager
async def psycopg_async_connection(dsn: str) -> AsyncIterator[Any]:
    async with await psycopg.AsyncConnection.connect(dsn, row_factory=dict_row) as conn:
        yield conn


@asynccontextmanager
async def asyncpg_connection(dsn: str) -> AsyncIterator[Any]:
    conn = await asyncpg.connect(dsn)
    # What many applications do; it must not turn our payload into a text.
    await conn.set_type_codec("jsonb", encoder=json.dumps, decoder=json.loads, schema="pg_catalog")
    try:
        async with conn.transaction():
            yield conn
    finally:
        await conn.close()


@asynccontextmanager
async def asyncpg_pool(dsn: str) -> AsyncIterator[Any]:
    async with asyncpg.create_pool(dsn, min_size=0) as pool, pool.acquire() as conn, conn.transaction():
        yield conn


def async_engine(dsn: str, driver: str) -> sqlalchemy.ext.asyncio.AsyncEngine:
    url = dsn.replace("postgresql:", f"postgresql+{driver}:")
    return sqlalchemy.ext.asyncio.create_async_engine(url, poolclass=NullPool)


@asynccontextmanager
async def sqlalchemy_async_connection(dsn: str) -> AsyncIterator[Any]:
    async with async_engine(dsn, "asyncpg").begin() as conn:
        yield conn


@asynccontextmanager
async def sqlalchemy_async_session(dsn: str) -> AsyncIterator[Any]:
    async with sqlalchemy.ext.asyncio.AsyncSession(async_engine(dsn, "psycopg")) as session, session.begin():
        yield session


SYNC = [
    psycopg_connection,
    psycopg2_connection,
    sqlalchemy_connection,
    sqlalchemy_session,
    sqlalchemy_scoped_session,
    django_connection,
    django_proxy,
]
ASYNC = [
    psycopg_async_connection,
    asyncpg_connection,
    asyncpg_pool,
    sqlalchemy_async_connection,
    sqlalchemy_async_session,
]
sync_kinds = pytest.mark.parametrize("kind", SYNC, ids=lambda kind: kind.__name__)
async_kinds = pytest.mark.parametrize("kind", ASYNC, ids=lambda kind: kind.__name__)
WHEN = datetime(2099, 1, 2, 3, 4, 5, tzinfo=UTC)
OPTIONS: dict[str, Any] = {
    "priority": -7,
    "run_at": WHEN,
    "timeout": 2.5,
    "tags": ['"', "a,b", "\\"],
    "name": "a 'name'",
}
NOTE = "quotes ' \" \\ %s %(x)s :name $1 {} ü ☃"


def stored(dsn: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn) as conn:
        query = (
            "SELECT payload, queue, max_attempts, priority, run_at, timeout, tags, name, status::text, thread_demand"
            " FROM pgqueue.jobs ORDER BY id"
        )
        return conn.execute(query).fetchall()


def expected(order: int) -> tuple[Any, ...]:
    timeout = timedelta(seconds=2.5)
    payload = {"order": order, "note": NOTE}
    return payload, "ships", 3, -7, WHEN, timeout, OPTIONS["tags"], "a 'name'", "scheduled", 1


@sync_kinds
def test_sync_connections(dsn: str, runner: asyncio.Runner, kind: Callable[[str], AbstractContextManager[Any]]) -> None:
    with suppress(Undo), kind(dsn) as conn:
        assert ship.using(conn=conn).enqueue_sync(1).inserted
        assert len(ship.enqueue_many_sync([{"order": 2}], conn=conn)) == 1
        with pytest.raises(TypeError, match="is synchronous: use enqueue_sync"):
            runner.run(ship.using(conn=conn).enqueue(1))
        raise Undo
    assert stored(dsn) == []

    with kind(dsn) as conn:
        ref = ship.using(conn=conn, **OPTIONS).enqueue_sync(7, note=NOTE)
        again = ship.using(conn=conn, idempotency_key="k").enqueue_sync(8)
        known = ship.using(conn=conn, idempotency_key="k").enqueue_sync(8)
        refs = ship.using(conn=conn, **OPTIONS).enqueue_many_sync({"order": n, "note": NOTE} for n in range(20))
        assert stored(dsn) == []
    assert (ref.inserted, again.inserted, known.inserted) == (True, True, False)
    assert known.id == again.id
    assert sorted(each.id for each in refs) == [each.id for each in refs]
    rows = stored(dsn)
    assert rows[0] == expected(7)
    assert rows[2:] == [expected(n) for n in range(20)]


@async_kinds
async def test_async_connections(dsn: str, kind: Callable[[str], AbstractAsyncContextManager[Any]]) -> None:
    with suppress(Undo):
        async with kind(dsn) as conn:
            assert (await ship.using(conn=conn).enqueue(1)).inserted
            assert len(await ship.enqueue_many([{"order": 2}], conn=conn)) == 1
            with pytest.raises(TypeError, match=r"is asynchronous: use await enqueue\(…\)"):
                ship.using(conn=conn).enqueue_sync(1)
            raise Undo
    assert stored(dsn) == []

    async with kind(dsn) as conn:
        ref = await ship.using(conn=conn, **OPTIONS).enqueue(7, note=NOTE)
        again = await ship.using(conn=conn, idempotency_key="k").enqueue(8)
        known = await ship.using(conn=conn, idempotency_key="k").enqueue(8)
        refs = await ship.using(conn=conn, **OPTIONS).enqueue_many({"order": n, "note": NOTE} for n in range(20))
        assert stored(dsn) == []
    assert (ref.inserted, again.inserted, known.inserted) == (True, True, False)
    assert known.id == again.id
    assert sorted(each.id for each in refs) == [each.id for each in refs]
    rows = stored(dsn)
    assert rows[0] == expected(7)
    assert rows[2:] == [expected(n) for n in range(20)]


@pytest.mark.parametrize("wrong", [object(), "postgresql://localhost/x", sqlalchemy.create_mock_engine])
def test_an_unknown_connection(wrong: object) -> None:
    with pytest.raises(TypeError, match=r"conn is a .*; it must be a psycopg Connection .*SQLAlchemy.*Django"):
        ship.using(conn=wrong).enqueue_sync(1)


def test_an_engine_is_no_connection(dsn: str) -> None:
    with pytest.raises(TypeError, match="conn is a sqlalchemy Engine; it must be"):
        ship.using(conn=engine(dsn, "psycopg")).enqueue_sync(1)


def test_a_django_connection_to_another_database() -> None:
    from django.db.utils import ConnectionHandler

    handler = ConnectionHandler({"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}})
    with pytest.raises(TypeError, match="Django's connection 'default' goes to sqlite"):
        ship.using(conn=handler["default"]).enqueue_sync(1)


def test_the_drivers_errors_stay(dsn: str) -> None:
    with pytest.raises(psycopg2.errors.CheckViolation, match="priority"), psycopg2_connection(dsn) as conn:
        ship.using(conn=conn, priority=5000).enqueue_sync(1)


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_many_or_none_on_a_connection_that_commits_by_itself(dsn: str, driver: str) -> None:
    # Only the database finds the last one, and there are more than go into one statement elsewhere.
    calls = [*({"order": n} for n in range(5_000)), {"order": 5_000, "note": "x" * 2_000_000}]
    conn: Any
    if driver == "asyncpg":
        conn = await asyncpg.connect(dsn)
    else:
        conn = await psycopg.AsyncConnection.connect(dsn, autocommit=True)
    try:
        with pytest.raises((psycopg.Error, asyncpg.PostgresError), match="payload must be at most 1 MiB"):
            await ship.enqueue_many(calls, conn=conn)
        assert stored(dsn) == []
        assert len(await ship.enqueue_many(calls[:-1], conn=conn)) == 5_000
    finally:
        await conn.close()


async def test_types_that_live_elsewhere(dsn: str, conn: Connection) -> None:
    async with conn.transaction():
        await app.enqueue("elsewhere", {"x": [1]}, conn=conn, queue="q")
    with psycopg_connection(dsn) as other:
        app.enqueue_sync("elsewhere", "text", conn=other)
    assert [(payload, queue) for payload, queue, *_ in stored(dsn)] == [({"x": [1]}, "q"), ("text", "default")]
