"""Handlers whose effects can be counted from outside; `tests.once.handlers` says how."""

import asyncio
import os
import time
from pathlib import Path

from pgqueue import Context, PgQueue
from pgqueue.outcome import Retry
from tests.once.handlers import Sink

app = PgQueue()
SOON = Retry(max_attempts=20, base=0.05, cap=1.0, jitter=0.2)


@app.job(retry=SOON)
async def write(ctx: Context, key: str, seconds: float = 0.0) -> None:
    """One row in the same database, with the job's end."""
    await asyncio.sleep(seconds)
    async with ctx.transaction() as tx:
        await tx.execute(
            "INSERT INTO public.effects (job_id, attempt, note) VALUES (%s, %s, %s)", [ctx.id, ctx.attempt, key]
        )


@app.job(once_per=("key",), retry=SOON)
async def write_once(ctx: Context, key: str, seconds: float = 0.0) -> None:
    """The same, once for each key; Redis is told."""
    await asyncio.sleep(seconds)
    async with ctx.transaction() as tx:
        await tx.execute(
            "INSERT INTO public.effects (job_id, attempt, note) VALUES (%s, %s, %s)", [ctx.id, ctx.attempt, key]
        )


@app.job(retry=SOON)
async def call(ctx: Context, key: str, before: float = 0.0, after: float = 0.0) -> None:
    """A call to a provider that honours keys."""
    await asyncio.sleep(before)
    Sink().call(f"{key} {ctx.idempotency_key} {ctx.attempt}", ctx.idempotency_key)
    await asyncio.sleep(after)


@app.job(retry=SOON)
async def sleep(ctx: Context, seconds: float) -> None:
    await asyncio.sleep(seconds)


@app.job(retry=SOON)
async def nothing(ctx: Context) -> None:
    pass


@app.job(retry=SOON)
async def twice(ctx: Context) -> None:
    """Fails the first time."""
    if ctx.attempt == 1:
        raise ValueError("as ordered")


@app.job(retry=Retry(max_attempts=1000))
async def depend(ctx: Context) -> None:
    """Fails while what it depends on is down."""
    Sink()._note("tries", f"{time.time():.3f}")
    if (Path(os.environ["SINK"]) / "down").exists():
        raise ConnectionError("the dependency is down")
