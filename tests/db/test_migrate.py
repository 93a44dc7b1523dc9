"""Migrations against a real PostgreSQL: together, back and forth, behind a lock, and as a script."""

import importlib
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest

from pgqueue import migrate
from pgqueue.embedded import PostgresServer
from pgqueue.errors import DatabaseUnavailable, PgQueueError, SchemaMismatch
from pgqueue.migrations import dump

ROOT = Path(__file__).parents[2]
VERSIONS = sorted((ROOT / "migrations" / "versions").glob("r*.py"))


def test_status_before_and_after(empty_dsn: str) -> None:
    before = migrate.status(empty_dsn)
    assert (before.current, before.up_to_date) == (None, False)
    migrate.up(empty_dsn)
    after = migrate.status(empty_dsn)
    assert (after.current, after.up_to_date) == (migrate.head(), True)
    assert after.problem() is None


def test_two_processes_at_once(empty_dsn: str) -> None:
    code = "import sys; from pgqueue import migrate; migrate.up(sys.argv[1])"
    processes = [subprocess.Popen([sys.executable, "-c", code, empty_dsn], stderr=subprocess.PIPE) for _ in range(2)]
    results = [(process.communicate()[1], process.returncode) for process in processes]
    assert results == [(b"", 0)] * 2
    assert migrate.status(empty_dsn).up_to_date


def test_up_again_changes_nothing(server: PostgresServer, dsn: str) -> None:
    before = dump.dump(server, dsn)
    migrate.up(dsn)
    assert dump.dump(server, dsn) == before


def test_down_and_up_again(server: PostgresServer, dsn: str) -> None:
    before = dump.dump(server, dsn)
    migrate.down(dsn, "base")
    with psycopg.connect(dsn) as conn:
        left = conn.execute(
            """
            SELECT relname FROM pg_class WHERE relnamespace = 'pgqueue'::regnamespace
            UNION ALL SELECT proname FROM pg_proc WHERE pronamespace = 'pgqueue'::regnamespace
            UNION ALL SELECT typname FROM pg_type WHERE typnamespace = 'pgqueue'::regnamespace
            ORDER BY 1
            """
        ).fetchall()
    assert {name for (name,) in left} == {"alembic_version", "_alembic_version", "alembic_version_pkc"}
    assert migrate.status(dsn).current is None
    migrate.up(dsn)
    assert dump.dump(server, dsn) == before


def test_an_unknown_revision_is_an_error_of_ours(dsn: str) -> None:
    with pytest.raises(PgQueueError, match="r9999"):
        migrate.down(dsn, "r9999")


def test_a_migration_that_fails_leaves_nothing(empty_dsn: str) -> None:
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute("CREATE SCHEMA pgqueue CREATE TABLE jobs (mine int)")
        with pytest.raises(PgQueueError, match=r"jobs.* already exists"):
            migrate.up(empty_dsn)
        tables = conn.execute("SELECT relname FROM pg_class WHERE relnamespace = 'pgqueue'::regnamespace").fetchall()
        assert tables == [("jobs",)]


def test_a_lock_that_stays_is_named(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LOCK_TIMEOUT": "20ms", "TRIES": 2, "PAUSE": 0}.items():
        monkeypatch.setattr(migrate, name, value)
    with psycopg.connect(dsn, application_name="the holder") as conn:
        conn.execute("LOCK TABLE pgqueue.jobs")
        with pytest.raises(PgQueueError) as caught:
            migrate.down(dsn, "base")
        assert f"pid {conn.info.backend_pid}, " in str(caught.value)
    assert "the holder, idle in transaction" in str(caught.value)
    assert migrate.status(dsn).up_to_date


def test_who_enqueues_does_not_wait_behind_a_migration_that_waits(dsn: str) -> None:
    """For a moment only, again and again: whoever asks for a lock after it stands in line behind it."""
    with ThreadPoolExecutor() as threads, psycopg.connect(dsn) as reader:
        reader.execute("SELECT count(*) FROM pgqueue.jobs")
        migrating = threads.submit(migrate.down, dsn, "base")
        with psycopg.connect(dsn, autocommit=True) as conn:
            waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND mode = 'AccessExclusiveLock'"
            while conn.execute(waits).fetchone() == (0,):
                assert not migrating.done(), migrating.exception()
            began = time.monotonic()
            conn.execute("INSERT INTO pgqueue.jobs (type) VALUES ('t')")
            assert time.monotonic() - began < 6
        reader.rollback()
        migrating.result(60)


def test_whoever_holds_up_a_migration_is_named(
    dsn: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(migrate, "PATIENCE", 0.0)
    with psycopg.connect(dsn) as holder, ThreadPoolExecutor() as threads:
        holder.execute("SELECT pg_advisory_lock(hashtextextended('pgqueue.migrate', 0))")
        waiting = threads.submit(migrate.up, dsn)
        try:
            deadline = time.monotonic() + 30
            while not caplog.messages and time.monotonic() < deadline:
                time.sleep(0.01)
        finally:
            holder.execute("SELECT pg_advisory_unlock_all()")
        waiting.result(60)
        assert f"waits for another one (pid {holder.info.backend_pid}, " in caplog.text


def test_the_script_makes_the_same_schema(server: PostgresServer, dsn: str, empty_dsn: str) -> None:
    psql = [server.bin_dir / "psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", empty_dsn]
    subprocess.run(psql, input=migrate.sql(), text=True, check=True, stdout=subprocess.DEVNULL)
    assert migrate.status(empty_dsn).up_to_date
    assert dump.dump(server, empty_dsn) == dump.dump(server, dsn)


def test_alembic_itself(empty_dsn: str) -> None:
    """A password with a % and a : goes through as well; the servers of the tests ask for it."""
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute("CREATE ROLE percent LOGIN SUPERUSER PASSWORD 'a%b:c@d'")
        try:
            url = empty_dsn.replace(empty_dsn[len("postgresql://") : empty_dsn.rindex("@")], "percent:a%25b%3Ac%40d")
            command = [sys.executable, "-m", "alembic", "upgrade", "head"]
            subprocess.run(command, cwd=ROOT, env=os.environ | {"DATABASE_URL": url}, check=True)
            assert migrate.status(url).up_to_date
        finally:
            conn.execute("REASSIGN OWNED BY percent TO CURRENT_USER")
            conn.execute("DROP OWNED BY percent")
            conn.execute("DROP ROLE percent")


def test_unreachable() -> None:
    for run in (migrate.up, migrate.status):
        with pytest.raises(DatabaseUnavailable, match="does not answer"):
            run("postgresql://postgres:s3cret@127.0.0.1:1/nowhere")


async def test_check_schema(conn: psycopg.AsyncConnection) -> None:
    await migrate.check_schema(conn)
    await conn.execute("UPDATE pgqueue.alembic_version SET version_num = 'r0000'")
    with pytest.raises(SchemaMismatch, match=r"at r0000, this code needs r\d{4}; run: pgqueue migrate up"):
        await migrate.check_schema(conn)
    await conn.execute("UPDATE pgqueue.alembic_version SET version_num = 'r9999'")
    with pytest.raises(SchemaMismatch, match=r"newer than this code.*upgrade pgqueue"):
        await migrate.check_schema(conn)
    await conn.execute("DROP TABLE pgqueue.alembic_version")
    with pytest.raises(SchemaMismatch, match=r"no pgqueue schema.*pgqueue migrate up"):
        await migrate.check_schema(conn)


@pytest.mark.parametrize("server", ["pg18"], indirect=True)
def test_schema_sql_is_up_to_date(server: PostgresServer, dsn: str) -> None:
    assert dump.TARGET.read_text() == dump.dump(server, dsn), "run: make schema"


def test_revisions_are_one_chain_named_like_their_files() -> None:
    previous = None
    for number, file in enumerate(VERSIONS, 1):
        version = importlib.import_module(f"pgqueue.migrations.versions.{file.stem}")
        assert version.revision == f"r{number:04}" == file.stem[:5]
        assert version.down_revision == previous
        previous = version.revision
    assert previous == migrate.head()


def test_two_threads_migrate_two_databases(server: PostgresServer) -> None:
    """Alembic's own state is that of the process."""
    names = [f"threaded_{number}" for number in range(3)]
    with psycopg.connect(server.dsn, autocommit=True) as conn:
        for name in names:
            conn.execute(f"CREATE DATABASE {name}")
        dsns = [urlsplit(server.dsn)._replace(path=f"/{name}").geturl() for name in names]
        try:
            with ThreadPoolExecutor() as threads:
                list(threads.map(migrate.up, dsns))
            assert all(migrate.status(dsn).up_to_date for dsn in dsns)
        finally:
            for name in names:
                conn.execute(f"DROP DATABASE {name} WITH (FORCE)")
