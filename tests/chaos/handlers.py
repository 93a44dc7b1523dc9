"""Handlers whose effects can be counted: in the database as rows without a unique constraint, outside in the sink."""

import asyncio
import os
import time

from pgqueue import Context, PgQueue
from pgqueue.outcome import Retry
from tests.chaos import sink

EFFECTS = """
CREATE TABLE public.effects (
    key text NOT NULL, job bigint NOT NULL, token text, at timestamptz NOT NULL DEFAULT clock_timestamp()
)
"""
# Failures that the faults cause (a cut connection inside a handler) are charged: there must be enough attempts.
RETRY = Retry(max_attempts=20, base=0.05, cap=1, jitter=0.1)

app = PgQueue()


@app.job(retry=RETRY)
async def effect(ctx: Context, key: str, seconds: float = 0.0, fail: int = 0) -> None:
    """A row, committed together with the completion. The first `fail` attempts fail."""
    if seconds:
        await asyncio.sleep(seconds)
    if ctx.attempt <= fail:
        raise ValueError("as ordered")
    async with ctx.transaction() as tx:
        await tx.execute(b"INSERT INTO public.effects VALUES (%s, %s, %s)", [key, ctx.id, ctx.lease_token])


@app.job(retry=RETRY)
def threaded(ctx: Context, key: str, seconds: float = 0.0) -> None:
    """The same in a thread."""
    if seconds:
        time.sleep(seconds)
    with ctx.transaction_sync() as tx:
        tx.execute(b"INSERT INTO public.effects VALUES (%s, %s, %s)", [key, ctx.id, ctx.lease_token])


@app.job(retry=RETRY)
async def keyed(ctx: Context, key: str, seconds: float = 0.0) -> None:
    """A call to the outside, with the job's key."""
    if seconds:
        await asyncio.sleep(seconds)
    await sink.call(os.environ["CHAOS_SINK"], key=key, provider_key=ctx.idempotency_key, attempt=ctx.attempt)


@app.job(once_per=("key",), at_most_once=True, retry=RETRY)
async def mail(ctx: Context, key: str, seconds: float = 0.0) -> None:
    """A call that nobody but pgqueue keeps from happening twice."""
    if seconds:
        await asyncio.sleep(seconds)
    await sink.call(os.environ["CHAOS_SINK"], key=key, attempt=ctx.attempt)
