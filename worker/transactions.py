"""The transaction that a handler shares with the completion of its job."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, LiteralString

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow

from pgqueue import finish, idempotency
from pgqueue.context import Context
from pgqueue.db import Connection
from pgqueue.errors import LeaseLost
from pgqueue.finish import Completed
from pgqueue.outcome import GiveUp, result_text
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


def still_open(conn: Any) -> None:
    if conn.info.transaction_status is TransactionStatus.IDLE:
        # By SQL. No other attempt: what it wrote may be there.
        raise GiveUp(OURS_TO_END)


def committed(cursor: Any) -> None:
    """To the COMMIT of a transaction in which a statement has failed PostgreSQL answers ROLLBACK, and no error."""
    if cursor.statusmessage != "COMMIT":
        raise RuntimeError("it was rolled back: something else used the transaction's connection while it committed")


async def complete(conn: Connection, ctx: Context) -> None:
    """The job's end, in the handler's transaction and under its lease."""
    job = completed(ctx)
    if not await finish.complete_in(conn, job):
        raise LeaseLost(f"the lease on job {ctx.id} is lost")
    if ctx._effect is not None and not await idempotency.effect_done(conn, ctx.id, ctx._effect, job.result):
        raise taken_over(ctx)


def complete_sync(conn: psycopg.Connection[Any], ctx: Context) -> None:
    job = completed(ctx)
    if conn.execute(SQL.complete, finish.completion(job), prepare=False).fetchone() is not None:
        raise LeaseLost(f"the lease on job {ctx.id} is lost")
    if (effect := ctx._effect) is not None:
        parameters = {"id": ctx.id, "key": effect.key, "ttl": effect.ttl, "result": job.result}
        if conn.execute(SQL.effect_done, parameters, prepare=False).fetchone() is None:
            raise taken_over(ctx)


def taken_over(ctx: Context) -> LeaseLost:
    return LeaseLost(f"another job has taken over the effect of job {ctx.id}")


def completed(ctx: Context) -> Completed:
    now = time.monotonic()
    return Completed(ctx.id, ctx.lease_token, ctx.started, now, ctx.threads, result_text(ctx._result))
