"""The transaction that a handler shares with the completion of its job."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, LiteralString

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow, tuple_row

from pgqueue import finish, idempotency
from pgqueue.context import Context
from pgqueue.db import Connection
from pgqueue.errors import LeaseLost
from pgqueue.finish import Completed
from pgqueue.outcome import GiveUp, InDoubt, result_text
from pgqueue.sql import SQL

BEGIN: dict[str, LiteralString] = {
    "read committed": "BEGIN ISOLATION LEVEL READ COMMITTED",
    "repeatable read": "BEGIN ISOLATION LEVEL REPEATABLE READ",
    "serializable": "BEGIN ISOLATION LEVEL SERIALIZABLE",
}


def begin(isolation: str | None) -> LiteralString:
    try:
        return BEGIN[(isolation or "read committed").lower()]
    except KeyError:
        raise ValueError(f"ctx.transaction: isolation must be one of {', '.join(BEGIN)}") from None


@contextmanager
def only_one(ctx: Context) -> Iterator[None]:
    """The first one completes the job; what another one wrote would be rolled back, as the lease is gone."""
    if ctx._written or ctx._in_transaction:
        raise RuntimeError("ctx.transaction completes the job, so there can be only one: write everything in it")
    ctx._in_transaction = True
    try:
        yield
    finally:
        ctx._in_transaction = False


OURS_TO_END = (
    "ctx.transaction ends the transaction: leave COMMIT and ROLLBACK to it (tx.transaction() makes a savepoint)"
)


class HandlersConnection(psycopg.AsyncConnection[TupleRow]):
    async def commit(self) -> None:
        raise psycopg.ProgrammingError(OURS_TO_END)

    async def rollback(self) -> None:
        raise psycopg.ProgrammingError(OURS_TO_END)


class HandlersSyncConnection(psycopg.Connection[TupleRow]):
    def commit(self) -> None:
        raise psycopg.ProgrammingError(OURS_TO_END)

    def rollback(self) -> None:
        raise psycopg.ProgrammingError(OURS_TO_END)


def marked(begin: LiteralString, ctx: Context) -> str:
    """BEGIN with a mark that is gone when the handler has ended the transaction by SQL, even if it began another. It
    takes no snapshot, and leaves nothing on the connection."""
    return f"{begin}; SET LOCAL pgqueue.lease_token = '{ctx.lease_token}'"


MARK = "SELECT current_setting('pgqueue.lease_token', true)"


def ended_by_sql(ctx: Context) -> GiveUp | InDoubt:
    """No other attempt: what it wrote may be there. Nor another job's with the same effect."""
    return GiveUp(OURS_TO_END) if ctx._effect is None else InDoubt(OURS_TO_END)


def still_open(conn: Any, ctx: Context) -> None:
    if conn.info.transaction_status is TransactionStatus.IDLE:
        raise ended_by_sql(ctx)


async def rolled_back(conn: Connection, ctx: Context) -> bool:
    """Rolls back; whether it was still the transaction that we began. Where a statement failed, nobody can ask."""
    ours = conn.info.transaction_status is not TransactionStatus.IDLE
    with suppress(psycopg.Error):  # a broken connection has rolled back already
        if conn.info.transaction_status is TransactionStatus.INTRANS:
            cursor = await conn.cursor(row_factory=tuple_row).execute(MARK)
            ours = await cursor.fetchone() == (ctx.lease_token,)
        await conn.execute("ROLLBACK")
    return ours


def rolled_back_sync(conn: psycopg.Connection[Any], ctx: Context) -> bool:
    ours = conn.info.transaction_status is not TransactionStatus.IDLE
    with suppress(psycopg.Error):
        if conn.info.transaction_status is TransactionStatus.INTRANS:
            ours = conn.cursor(row_factory=tuple_row).execute(MARK).fetchone() == (ctx.lease_token,)
        conn.execute("ROLLBACK")
    return ours


def committed(cursor: Any) -> None:
    """To the COMMIT of a transaction in which a statement has failed PostgreSQL answers ROLLBACK, and no error."""
    if cursor.statusmessage != "COMMIT":
        raise RuntimeError("it was rolled back: something else used the transaction's connection while it committed")


def completion() -> Any:
    return f"{MARK}, ARRAY({SQL.complete})"


def judge(row: tuple[str | None, list[int]] | None, ctx: Context) -> None:
    assert row is not None
    mark, lost = row
    if mark != ctx.lease_token:
        raise ended_by_sql(ctx)
    if lost:
        raise LeaseLost(f"the lease on job {ctx.id} is lost")


async def complete(conn: Connection, ctx: Context) -> None:
    """The job's end, in the handler's transaction and under its lease."""
    job = completed(ctx)
    still_open(conn, ctx)
    cursor = conn.cursor(row_factory=tuple_row)
    judge((await (await cursor.execute(completion(), finish.completion(job), prepare=False)).fetchone()), ctx)
    if ctx._effect is not None and not await idempotency.effect_done(conn, ctx.id, ctx._effect, job.result):
        raise taken_over(ctx)


def complete_sync(conn: psycopg.Connection[Any], ctx: Context) -> None:
    job = completed(ctx)
    still_open(conn, ctx)
    cursor = conn.cursor(row_factory=tuple_row)
    judge(cursor.execute(completion(), finish.completion(job), prepare=False).fetchone(), ctx)
    if (effect := ctx._effect) is not None:
        parameters = {"id": ctx.id, "key": effect.key, "ttl": effect.ttl, "result": job.result}
        if conn.execute(SQL.effect_done, parameters, prepare=False).fetchone() is None:
            raise taken_over(ctx)


def taken_over(ctx: Context) -> LeaseLost:
    return LeaseLost(f"another job has taken over the effect of job {ctx.id}")


def completed(ctx: Context) -> Completed:
    now = time.monotonic()
    return Completed(ctx.id, ctx.lease_token, ctx.started, now, ctx.threads, result_text(ctx._result))
