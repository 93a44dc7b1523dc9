"""The transaction that a handler shares with the completion of its job."""

from __future__ import annotations

import time
from typing import Any, LiteralString

import psycopg

from pgqueue import finish, idempotency
from pgqueue.context import Context
from pgqueue.db import Connection
from pgqueue.errors import LeaseLost
from pgqueue.finish import Completed
from pgqueue.outcome import result_text
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
