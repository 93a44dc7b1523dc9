"""Alembic's environment: one migration at a time, all of it in one transaction."""

import logging
import random
import time

from alembic import context
from psycopg.errors import LockNotAvailable
from sqlalchemy import Connection, NullPool, create_engine, text
from sqlalchemy.exc import OperationalError

from pgqueue import migrate
from pgqueue.errors import InvalidSettings, PgQueueError
from pgqueue.log import say
from pgqueue.settings import Settings

logger = logging.getLogger("pgqueue.migrate")

SCHEMA = "pgqueue"

# The advisory lock comes before the timeout: whoever waits for another migration waits as long as that takes.
ONE_AT_A_TIME = "SELECT pg_advisory_xact_lock(hashtextextended('pgqueue.migrate', 0))"
MY_TURN = "SELECT pg_try_advisory_xact_lock(hashtextextended('pgqueue.migrate', 0))"
WHOSE_TURN = """
SELECT format('pid %s, %s, %s', a.pid, a.usename, coalesce(nullif(a.application_name, ''), '-'))
  FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
 WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 AND a.datname = current_database()
   AND (l.classid::bigint << 32) | l.objid::bigint = hashtextextended('pgqueue.migrate', 0)
"""
LOCK_TIMEOUT = f"SET LOCAL lock_timeout = '{migrate.LOCK_TIMEOUT}'"
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


def wait_for_turn(connection: Connection) -> None:
    """Says for whom: everybody who can connect can hold this lock."""
    told, patience = False, time.monotonic() + migrate.PATIENCE
    while not connection.scalar(text(MY_TURN)):
        if not told and time.monotonic() > patience:
            told = True
            holders = "; ".join(connection.scalars(text(WHOSE_TURN))) or "nobody any more"
            say(logger, logging.WARNING, "migration.waits", f"the migration waits for another one ({holders})")
        time.sleep(0.1)


def run(connection: Connection) -> None:
    wait_for_turn(connection)
    connection.execute(text(LOCK_TIMEOUT))
    if connection.scalar(text(HAS_CITUS)):
        connection.execute(text(LOCAL_TABLES))
    # Asked first, because IF NOT EXISTS still wants the right to create schemas.
    if not connection.scalar(text(HAS_SCHEMA)):
        connection.execute(text(CREATE_SCHEMA))
    context.configure(connection=connection, version_table_schema=SCHEMA)
    with context.begin_transaction():
        context.run_migrations()


def database_url() -> str:
    dsn: str | None = context.config.attributes.get("dsn") or Settings.from_env().database_url
    if dsn is None:
        raise InvalidSettings(["DATABASE_URL is not set: say which database to migrate"])
    return dsn


def online() -> None:
    dsn = database_url()
    engine = create_engine("postgresql+psycopg://", creator=lambda: migrate.connect(dsn), poolclass=NullPool)
    for tries_left in reversed(range(migrate.TRIES)):
        try:
            with engine.begin() as connection:
                return run(connection)
        except OperationalError as error:
            if not isinstance(error.orig, LockNotAvailable):
                raise
        if tries_left:
            time.sleep(migrate.PAUSE * random.uniform(0.5, 1.5))
    with engine.connect() as connection:
        holders = connection.execute(text(HOLDERS)).all()
    lines = [
        f"  pid {pid}, {user}, {name}, {state}, since {age}: {query}" for pid, user, name, state, age, query in holders
    ]
    raise PgQueueError(
        "the migration did not get its locks, and nothing was changed. These sessions use pgqueue's tables:\n"
        + "\n".join(lines or ["  (none any more)"])
        + "\nWait for them or end them with pg_terminate_backend(pid), and try again"
    )


if context.is_offline_mode():
    offline()
else:
    online()
