"""The schema's versions: up, down, status, and the check that every process makes before it starts."""

import io
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from pgqueue.errors import DatabaseUnavailable, InvalidSettings, PgQueueError, SchemaMismatch
from pgqueue.settings import mask

# A migration that waits for a lock makes everybody else wait behind it, and it needs one lock after the other: better
# give way soon and try again, for about a minute.
LOCK_TIMEOUT = "200ms"
TRIES = 50
PAUSE = 1.0
"""Seconds, more or less: whoever it meets each time may come at regular intervals, too."""
PATIENCE = 5.0
"""Seconds after which a migration says that it waits for another one."""

_one_at_a_time = threading.Lock()
"""Alembic keeps what it is doing in a module, for the whole process."""
_VERSIONS = Path(__file__).parent / "migrations" / "versions"
_HAS_TABLE = "SELECT to_regclass('pgqueue.alembic_version') IS NOT NULL"
_CURRENT = "SELECT version_num FROM pgqueue.alembic_version"


@dataclass(frozen=True)
class Status:
    """Where a database is, and where this code wants it."""

    current: str | None
    head: str

    @property
    def up_to_date(self) -> bool:
        return self.current == self.head

    def problem(self) -> str | None:
        """What is wrong and what to run, or None."""
        if self.up_to_date:
            return None
        if self.current is None:
            return f"the database has no pgqueue schema (this code needs {self.head}); run: pgqueue migrate up"
        if self.current < self.head:
            return f"the database's schema is at {self.current}, this code needs {self.head}; run: pgqueue migrate up"
        return (
            f"the database's schema is at {self.current}, newer than this code, which knows {self.head}; "
            "upgrade pgqueue (pip install --upgrade pgqueue-server)"
        )


def head() -> str:
    """The newest revision of this code: the greatest file name, so that a worker need not load Alembic."""
    names = (re.match(r"(r\d{4})_\w+\.py$", file.name) for file in _VERSIONS.iterdir())
    return max(match[1] for match in names if match)


def connect(dsn: str) -> psycopg.Connection:
    try:
        # No prepared statements: the database may be behind PgBouncer.
        return psycopg.connect(dsn, connect_timeout=10, prepare_threshold=None, application_name="pgqueue migrate")
    except psycopg.OperationalError as error:
        raise DatabaseUnavailable(f"PostgreSQL does not answer: {' '.join(str(error).split())}") from error
    except psycopg.ProgrammingError:
        # libpq's own words would show the password.
        raise InvalidSettings([f"DATABASE_URL={mask(dsn)}: PostgreSQL cannot read this URL"]) from None


def up(dsn: str) -> None:
    """Bring the database to the newest revision; does nothing if it is there."""
    _run("upgrade", "head", dsn)


def down(dsn: str, to: str) -> None:
    """Take the database back to a revision, or with "base" to nothing; jobs are lost with their tables."""
    _run("downgrade", to, dsn)


def status(dsn: str) -> Status:
    with connect(dsn) as conn:
        has_table = conn.execute(_HAS_TABLE).fetchone() == (True,)
        row = conn.execute(_CURRENT).fetchone() if has_table else None
    return Status(row[0] if row else None, head())


def sql() -> str:
    """The whole schema as a script for psql, for those who may not run migrations themselves."""
    text = io.StringIO()
    _run("upgrade", "head", None, output_buffer=text)
    return text.getvalue()


async def check_schema(conn: psycopg.AsyncConnection[Any]) -> None:
    """Refuse to start on a schema that this code does not know."""
    has_table = await (await conn.execute(_HAS_TABLE)).fetchone()
    row = await (await conn.execute(_CURRENT)).fetchone() if has_table == (True,) else None
    if problem := Status(row[0] if row else None, head()).problem():
        raise SchemaMismatch(problem)


def _run(command: str, revision: str, dsn: str | None, output_buffer: io.StringIO | None = None) -> None:
    from alembic import command as alembic
    from alembic.config import Config
    from alembic.util.exc import CommandError
    from sqlalchemy.exc import DBAPIError

    config = Config(output_buffer=output_buffer) if output_buffer else Config()
    config.set_main_option("script_location", "pgqueue:migrations")
    config.attributes["dsn"] = dsn
    try:
        with _one_at_a_time:
            getattr(alembic, command)(config, revision, sql=dsn is None)
    except CommandError as error:
        raise PgQueueError(str(error)) from error
    except DBAPIError as error:
        kind = DatabaseUnavailable if error.connection_invalidated else PgQueueError
        raise kind(f"the migration failed, and nothing was changed: {error.orig}".strip()) from error
