"""Connections, the retry of serialization failures, and the driver's errors as ours."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar

import psycopg
from psycopg import errors as pg
from psycopg.rows import TupleRow

from pgqueue.errors import (
    DatabaseUnavailable,
    InvalidJob,
    JobNotFound,
    KeyReused,
    LeaseLost,
    PgQueueError,
    WrongStatus,
)

T = TypeVar("T")
Connection = psycopg.AsyncConnection[TupleRow]

# A dead peer is noticed in about 15 s even when nothing is sent.
CONNECT: dict[str, Any] = {
    "client_encoding": "utf8",
    "connect_timeout": 10,
    "keepalives_idle": 5,
    "keepalives_interval": 3,
    "keepalives_count": 3,
    "tcp_user_timeout": 15000,
}

OURS: dict[str, type[PgQueueError]] = {
    "PQ001": LeaseLost,
    "PQ002": KeyReused,
    "PQ003": WrongStatus,
    "PQ004": JobNotFound,
}


async def connect(dsn: str, *, application_name: str = "pgqueue") -> Connection:
    """A connection in autocommit. Statements are never prepared: their plans must fit the arguments of the moment,
    and a transaction pooler between us and PostgreSQL must not matter."""
    with translated():
        return await psycopg.AsyncConnection.connect(
            dsn, autocommit=True, prepare_threshold=None, application_name=application_name, **CONNECT
        )


@contextmanager
def cut_after(conn: Connection, seconds: float) -> Iterator[None]:
    """What has not been answered by then fails. A timeout of asyncio would not do: the driver then asks the server to
    cancel the statement and waits for it, and where the network is silent that takes another ten seconds."""
    cutting = asyncio.get_running_loop().call_later(seconds, _cut, conn)
    try:
        yield
    finally:
        cutting.cancel()


def _cut(conn: Connection) -> None:
    with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(conn.fileno())) as line:
        line.shutdown(socket.SHUT_RDWR)


@contextmanager
def translated() -> Iterator[None]:
    """Raises the driver's errors as ours; what is not ours to name stays as it is."""
    try:
        yield
    except (pg.CheckViolation, pg.NotNullViolation, pg.UniqueViolation, pg.DataError, pg.StatementTooComplex) as error:
        # StatementTooComplex: JSON that is nested deeper than PostgreSQL can read.
        raise InvalidJob(error.diag.message_primary or str(error)) from error
    except UnicodeEncodeError as error:
        raise InvalidJob(f"text with half a surrogate pair cannot be stored: {error}") from error
    except psycopg.Error as error:
        if error.sqlstate in OURS:
            raise OURS[error.sqlstate](error.diag.message_primary or str(error)) from error
        if is_outage(error):
            raise DatabaseUnavailable(str(error).strip() or type(error).__name__) from error
        raise


def is_outage(error: BaseException) -> bool:
    """Whether the connection or the server is gone, rather than this statement wrong."""
    if not isinstance(error, psycopg.Error):
        return isinstance(error, DatabaseUnavailable | OSError)
    state = error.sqlstate
    if state is None:
        # Raised by the driver itself: the connection broke, or it never came to be, or there was no answer at all.
        return isinstance(error, psycopg.OperationalError | psycopg.InternalError)
    # 08 connection, 53 no resources, 57P shutdown, 25006 a standby: all of them pass.
    return state[:2] in ("08", "53") or state[:3] == "57P" or state == "25006"


def is_overtaken(error: BaseException) -> bool:
    """Whether others were in the way of this transaction, which may succeed if it is sent again: PostgreSQL could not
    serialize it (40001), or broke a deadlock (40P01), or the partition of its day was made while a row of it was on its
    way to the default one (23514, of which no rule of ours is broken)."""
    if isinstance(error, pg.CheckViolation):
        return error.diag.schema_name == "pgqueue" and (error.diag.table_name or "").endswith("_default")
    return isinstance(error, pg.SerializationFailure | pg.DeadlockDetected)


async def retrying(operation: Callable[[], Awaitable[T]], *, attempts: int = 5) -> T:
    """Runs it again, with jitter, when others were in its way."""
    for attempt in range(1, attempts + 1):
        try:
            return await operation()
        except psycopg.Error as error:
            if attempt == attempts or not is_overtaken(error):
                raise
            await asyncio.sleep(random.uniform(0, 0.01 * 2**attempt))
    raise AssertionError("unreachable")


@asynccontextmanager
async def acting_as(conn: Connection, actor: str | None) -> AsyncIterator[None]:
    """A transaction in which operator actions are written down under this name."""
    async with conn.transaction():
        if actor is not None:
            await conn.execute("SELECT set_config('pgqueue.actor', %s, true)", [actor])
        yield


def array(values: Iterable[Any]) -> str:
    """An array of numbers or UUIDs as PostgreSQL reads it, several times faster than the driver writes a list."""
    return "{" + ",".join(map(str, values)) + "}"


def array_of_texts(texts: Iterable[str | None]) -> str:
    """The same for texts. With JSON, which is full of quotes, the driver needs twenty times as long."""
    return "{" + ",".join([_quoted(text) if text is not None else "NULL" for text in texts]) + "}"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
