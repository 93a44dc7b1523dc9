"""Who keeps vacuum from its work is told of: what it is, for how long, and what to do."""

import asyncio
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import psycopg
import pytest

from pgqueue import migrate
from pgqueue.db import connect
from pgqueue.embedded import start_postgres
from pgqueue.snapshots import Watch
from pgqueue.worker import janitor
from pgqueue.worker.janitor import Janitor
from pgqueue.worker.link import Link
from tests.db.logins import PASSWORD, dsn_of
from tests.db.queue import MiniWorker


@pytest.fixture(scope="module")
def dsn() -> Iterator[str]:
    """On a server that has prepared transactions and slots."""
    with tempfile.TemporaryDirectory(prefix="pgqueue-") as folder:
        Path(folder).chmod(0o711)
        settings = {"max_prepared_transactions": "2", "wal_level": "logical"}
        server = start_postgres(Path(folder), fast=True, settings=settings)
        try:
            migrate.up(server.dsn)
            run(server.dsn, f"CREATE ROLE plain_worker LOGIN PASSWORD '{PASSWORD}' IN ROLE pgqueue_worker")
            yield server.dsn
        finally:
            server.stop("immediate")


def run(dsn: str, *statements: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        for statement in statements:
            conn.execute(statement.encode())


@contextmanager
def report(dsn: str) -> Iterator[None]:
    with psycopg.connect(dsn, application_name="report") as conn:
        conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        conn.execute("SELECT 1")
        yield


@contextmanager
def writer(dsn: str) -> Iterator[None]:
    """It holds no snapshot between its statements, and the rows that it may have written back all the same."""
    with psycopg.connect(dsn, application_name="writer") as conn:
        conn.execute("CREATE TABLE public.written (n int)")
        yield
        conn.rollback()


@contextmanager
def prepared(dsn: str) -> Iterator[None]:
    run(dsn, "BEGIN", "CREATE TABLE public.forgotten (n int)", "PREPARE TRANSACTION 'it''s mine'")
    try:
        yield
    finally:
        run(dsn, "ROLLBACK PREPARED 'it''s mine'")


@contextmanager
def slot(dsn: str) -> Iterator[None]:
    run(dsn, "SELECT pg_create_logical_replication_slot('abandoned', 'pgoutput')")
    try:
        yield
    finally:
        run(dsn, "SELECT pg_drop_replication_slot('abandoned')")


HOLDERS: list[tuple[Callable[[str], AbstractContextManager[None]], str, str, str]] = [
    (report, "session", "report, idle in transaction, in a transaction since", "pg_terminate_backend("),
    (writer, "session", "writer, idle in transaction, in a transaction since", "pg_terminate_backend("),
    (prepared, "prepared", "prepared transaction it's mine", "ROLLBACK PREPARED 'it''s mine'"),
    (slot, "slot", "replication slot abandoned, which nobody reads", "pg_drop_replication_slot('abandoned')"),
]


def made(dsn: str, worker: MiniWorker) -> Janitor:
    times = {"poll_interval": 1.0, "rescue_interval": 1.0, "retention_days": 1.0}
    link = Link(dsn, "janitor")
    return Janitor(link, worker.who.worker_id, **times, known=set, cancel=lambda ids: None, ready=lambda: None)


def said(caplog: pytest.LogCaptureFixture, event: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if getattr(record, "event", None) == event]


@pytest.mark.parametrize("holder", HOLDERS, ids=lambda holder: holder[0].__name__)
@pytest.mark.parametrize("role", ["owner", "plain_worker"])
async def test_it_is_told_of_once_and_when_it_is_gone(
    dsn: str,
    holder: tuple[Callable[[str], AbstractContextManager[None]], str, str, str],
    role: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hold, kind, what, remedy = holder
    monkeypatch.setattr(janitor, "HELD_FOR", 0.2)
    caplog.set_level(logging.INFO)
    run(dsn, "DELETE FROM pgqueue.workers")
    async with await connect(dsn if role == "owner" else dsn_of(role, dsn)) as conn:
        first = made(dsn, await MiniWorker(conn).register())
        second = made(dsn, await MiniWorker(conn).register())

        async def look(event: str = "") -> None:
            """Four times; on until this is told of, for a while."""
            looks, deadline = 0, time.monotonic() + 10
            while looks < 4 or (event and not said(caplog, event) and time.monotonic() < deadline):
                run(dsn, "SELECT pg_current_xact_id()")
                await asyncio.sleep(0.1)
                await first.look_for_holders(conn)
                await second.look_for_holders(conn)
                looks += 1

        await look()
        assert not said(caplog, "snapshot.held"), "nothing is held"
        with hold(dsn):
            await look("snapshot.held")
            (record,) = said(caplog, "snapshot.held")
            assert record.levelno == logging.WARNING
            assert record.fields["kind"] == kind  # type: ignore[attr-defined]
            assert what in record.getMessage()
            assert remedy in record.getMessage()
            assert not said(caplog, "snapshot.released")
        await look("snapshot.released")
        assert len(said(caplog, "snapshot.held")) == len(said(caplog, "snapshot.released")) == 1


async def test_of_a_snapshot_beside_an_older_transaction_it_tells_later(dsn: str) -> None:
    """It is as old as that, and not to blame for it."""

    async def holders() -> list[bool]:
        return ["report" in each.what for each in await Watch().look(conn)]

    async with await connect(dsn) as conn:
        first = writer(dsn)
        first.__enter__()
        with report(dsn):
            assert await holders() == [False]
            first.__exit__(None, None, None)
            assert await holders() == [True]


async def test_it_is_as_old_as_what_it_does_not_see(dsn: str) -> None:
    async with await connect(dsn) as conn:
        watch = Watch()

        async def age() -> float:
            return max((each.seconds for each in await watch.look(conn)), default=0.0)

        with report(dsn):
            await watch.look(conn)
            await asyncio.sleep(0.3)
            assert await age() == 0, "nobody has written since"
            run(dsn, "SELECT pg_current_xact_id()")
            await watch.look(conn)
            await asyncio.sleep(0.3)
            assert await age() >= 0.3
            for _ in range(500):
                await watch.look(conn)
            assert await age() >= 0.3, "what is remembered gets no thinner while nobody writes"
            for _ in range(500):
                await conn.execute("SELECT pg_current_xact_id()")
                await watch.look(conn)
            assert len(watch._samples) <= 200
        async with asyncio.timeout(10):
            while await age():  # noqa: ASYNC110 - its backend ends a moment after its connection
                await asyncio.sleep(0.05)


async def test_who_began_this_moment_is_not_old(dsn: str) -> None:
    """However many transactions are open, with numbers that were next long ago."""
    async with await connect(dsn) as conn:
        watch = Watch()
        for _ in range(4):
            await watch.look(conn)
            run(dsn, "SELECT pg_current_xact_id()")
            await asyncio.sleep(0.2)
        with ExitStack() as stack:
            for _ in range(4):
                writer = stack.enter_context(psycopg.connect(dsn))
                writer.execute("SELECT pg_current_xact_id()")
            assert max(each.seconds for each in await watch.look(conn)) < 0.2


async def test_another_database_with_an_older_transaction_hides_nobody(dsn: str) -> None:
    name = f"other_{uuid4().hex[:8]}"
    run(dsn, f"CREATE DATABASE {name}")
    try:
        with psycopg.connect(urlsplit(dsn)._replace(path=f"/{name}").geturl()) as other:
            other.execute("SELECT pg_current_xact_id()")
            async with await connect(dsn) as conn:
                with report(dsn):
                    run(dsn, "SELECT pg_current_xact_id()")
                    assert [each.kind for each in await Watch().look(conn)] == ["session"]
    finally:
        run(dsn, f"DROP DATABASE {name}")
