"""Alembic's environment: one migration at a time, all of it in one transaction."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from alembic import context
from psycopg import errors
from sqlalchemy import Connection, NullPool, create_engine, text
from sqlalchemy.exc import OperationalError

from pgqueue.errors import InvalidSettings, PgQueueError
from pgqueue.migrate import connect
from pgqueue.settings import Settings

SCHEMA = "pgqueue"
TRIES = 5
PAUSE = 2.0

# The advisory lock comes before the timeout: whoever waits for another migration waits as long as that takes.
ONE_AT_A_TIME = "SELECT pg_advisory_xact_lock(hashtextextended('pgqueue.migrate', 0))"
LOCK_TIMEOUT = "SET LOCAL lock_timeout = '5s'"
CREATE_SCHEMA = f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}"
HAS_SCHEMA = f"SELECT to_regnamespace('{SCHEMA}') IS NOT NULL"
HAS_CITUS = "SELECT EXISTS (SELECT FROM pg_extension WHERE extname = 'citus')"
LOCAL_TABLES = "SET LOCAL citus.enable_ddl_propagation = off"
HOLDERS = """
SELECT DISTINCT a.pid, a.usename, coalesce(nullif(a.application_name, ''), '-'), a.state,
       date_trunc('second', clock_timestamp() - a.xact_start), left(regexp_replace(a.query, '\\s+', ' ', 'g'), 80)
  FROM pg_locks l
  JOIN pg_class c ON c.oid = l.relation AND c.relnamespace = to_regnamespace('pgqueue')
  JOIN pg_stat_activity a ON a.pid = l.pid
 WHERE l.granted AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND a.pid <> pg_backend_pid()
"""


def offline() -> None:
    context.configure(
        dialect_name="postgresql",
        dialect_opts={"paramstyle": "named"},  # else every % of the SQL would be written twice
        literal_binds=True,
        version_table_schema=SCHEMA,
    )
    with context.begin_transaction():
        for statement in (ONE_AT_A_TIME, LOCK_TIMEOUT, CREATE_SCHEMA):
            context.execute(statement)
        context.run_migrations()


def migrate(connection: Connection) -> None:
    connection.execute(text(ONE_AT_A_TIME))
    connection.execute(text(LOCK_TIMEOUT))
    if connection.scalar(text(HAS_CITUS)):
        connection.execute(text(LOCAL_TABLES))
    # Asked first, because IF NOT EXISTS still wants the right to create schemas.
    if not connection.scalar(text(HAS_SCHEMA)):
        connection.execute(text(CREATE_SCHEMA))
    context.configure(connection=connection, version_table_schema=SCHEMA)
    with context.begin_transaction():
        context.run_migrations()


@contextmanager
def lock_timeouts() -> Iterator[None]:
    """Turn SQLAlchemy's wrapping of 55P03 back into the driver's own error."""
    try:
        yield
    except OperationalError as error:
        if isinstance(error.orig, errors.LockNotAvailable):
            raise error.orig from None
        raise


def database_url() -> str:
    dsn: str | None = context.config.attributes.get("dsn") or Settings.from_env().database_url
    if dsn is None:
        raise InvalidSettings(["DATABASE_URL is not set: say which database to migrate"])
    return dsn


def online() -> None:
    dsn = database_url()
    engine = create_engine("postgresql+psycopg://", creator=lambda: connect(dsn), poolclass=NullPool)
    for tries_left in reversed(range(TRIES)):
        try:
            with lock_timeouts(), engine.begin() as connection:
                return migrate(connection)
        except errors.LockNotAvailable:
            if not tries_left:
                with engine.connect() as connection:
                    holders = connection.execute(text(HOLDERS)).all()
                raise PgQueueError(
                    "the migration did not get its locks; nothing was changed. Sessions that use pgqueue's tables:\n"
                    + "\n".join(
                        f"  pid {pid}, {user}, {name}, {state} for {age}: {query}"
                        for pid, user, name, state, age, query in holders
                    )
                    + "\nStop them (SELECT pg_terminate_backend(pid)), then run: pgqueue migrate up"
                ) from None
            time.sleep(PAUSE)


if context.is_offline_mode():
    offline()
else:
    online()
