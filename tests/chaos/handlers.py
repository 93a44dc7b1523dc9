"""Handlers whose effects can be counted: in the database as rows without a unique constraint, outside in the sink."""

import asyncio
import ctypes
import os
import random
import resource
import time
from functools import partial
from pathlib import Path

from pgqueue import Context, PgQueue
from pgqueue.outcome import Retry, Snooze
from tests.chaos import sink

EFFECTS = """
CREATE TABLE public.effects (
    key text NOT NULL, job bigint NOT NULL, token text, at timestamptz NOT NULL DEFAULT clock_timestamp()
)
"""
ROW = b"INSERT INTO public.effects VALUES (%s, %s, %s)"
# Failures that the faults cause (a cut connection inside a handler) are charged: there must be enough attempts.
RETRY = Retry(max_attempts=20, base=0.05, cap=1, jitter=0.1)

app = PgQueue()


@app.job(retry=RETRY)
async def effect(ctx: Context, key: str, seconds: float = 0.0, fail: int = 0, marker: str | None = None) -> None:
    """A row, committed together with the completion. The first `fail` attempts fail. With a marker, only the first run
    takes its time."""
    if seconds and (marker is None or is_first(marker)):
        await asyncio.sleep(seconds)
    if ctx.attempt <= fail:
        raise ValueError("as ordered")
    async with ctx.transaction() as tx:
        await tx.execute(ROW, [key, ctx.id, ctx.lease_token])


@app.job(retry=RETRY)
def threaded(ctx: Context, key: str, seconds: float = 0.0) -> None:
    """The same in a thread."""
    if seconds:
        time.sleep(seconds)
    with ctx.transaction_sync() as tx:
        tx.execute(ROW, [key, ctx.id, ctx.lease_token])


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


@app.job(retry=RETRY)
async def zombie(ctx: Context, key: str, does: str, marker: str) -> Snooze | None:
    """The first attempt, which will be frozen, tries everything that only an owner may do when it wakes up."""
    first = is_first(marker)
    while not may_go_on(marker, first):  # noqa: ASYNC110 - it waits for another process
        await asyncio.sleep(0.02)
    if first and (snoozed := await what_only_an_owner_may(ctx, key, does)):
        return snoozed
    async with ctx.transaction() as tx:
        await tx.execute(ROW, [key, ctx.id, ctx.lease_token])
    return None


async def what_only_an_owner_may(ctx: Context, key: str, does: str) -> Snooze | None:
    if does == "fail":
        raise ValueError("a zombie's failure")
    if does == "snooze":
        return Snooze(3600)
    if does == "enqueue":
        await ctx.enqueue(effect.bind(key=f"child of {key}"))
    if does == "step":
        await ctx.step("a zombie's", lambda: 1)
    ctx.progress(1, 1, "a zombie's")
    return None


@app.job(retry=RETRY)
def zombie_thread(ctx: Context, key: str, does: str, marker: str) -> None:
    """The same in a thread."""
    first = is_first(marker)
    while not may_go_on(marker, first):
        time.sleep(0.02)
    if first and does == "fail":
        raise ValueError("a zombie's failure")
    with ctx.transaction_sync() as tx:
        tx.execute(ROW, [key, ctx.id, ctx.lease_token])


def may_go_on(marker: str, first: bool) -> bool:
    return Path(marker + (".zombie" if first else ".heir")).exists()


def is_first(marker: str) -> bool:
    try:
        Path(marker).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


@app.job(retry=RETRY)
async def blocks(ctx: Context, key: str, holds: str, seconds: float, marker: str) -> None:
    """The first run keeps everybody else from the event loop, or from the interpreter."""
    if is_first(marker):
        if holds == "gil":
            ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        else:
            time.sleep(seconds)  # noqa: ASYNC251 - that is the fault
    async with ctx.transaction() as tx:
        await tx.execute(ROW, [key, ctx.id, ctx.lease_token])


@app.job(retry=RETRY)
async def poison(ctx: Context, key: str) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.abort()


@app.job(retry=RETRY)
async def glutton(ctx: Context, key: str) -> None:
    """Takes memory until the kernel has had enough of it."""
    taken = []
    for _ in range(128):
        taken.append(b"x" * (8 << 20))
    os.abort()


@app.job(executor="process", retry=RETRY)
def in_process(ctx: Context, key: str, seconds: float = 0.0) -> None:
    """A call to the outside from a child process."""
    time.sleep(seconds)
    sink.call_sync(os.environ["CHAOS_SINK"], key=key, provider_key=ctx.idempotency_key, attempt=ctx.attempt)


@app.job(retry=RETRY)
async def fickle(ctx: Context, key: str, seconds: float = 0.0) -> Snooze | None:
    """Fails once, then may put itself off, then does it."""
    if ctx.attempt == 1:
        raise ValueError("as ordered")
    if ctx.attempt == 2 and random.random() < 0.5:
        return Snooze(0.05)
    async with ctx.transaction() as tx:
        await tx.execute(ROW, [key, ctx.id, ctx.lease_token])
    return None


@app.job(retry=RETRY)
async def stepped(ctx: Context, key: str, seconds: float = 0.0) -> None:
    """Two steps and its progress before the effect."""
    for name in ("first", "second"):
        await ctx.step(name, partial(asyncio.sleep, seconds))
        ctx.progress(1, 2, name)
    async with ctx.transaction() as tx:
        await tx.execute(ROW, [key, ctx.id, ctx.lease_token])


@app.job(retry=RETRY)
async def holds(ctx: Context, key: str, seconds: float) -> None:
    """Keeps its connection."""
    async with ctx.transaction() as tx:
        await tx.execute(ROW, [key, ctx.id, ctx.lease_token])
        await asyncio.sleep(seconds)


@app.job(retry=RETRY)
async def isolated(ctx: Context, key: str, level: str, seconds: float = 0.0, raises: str | None = None) -> None:
    """PostgreSQL refuses the first attempt, if told; the second passes."""
    async with ctx.transaction(isolation=level) as tx:
        await tx.execute(ROW, [key, ctx.id, ctx.lease_token])
        if raises is not None and key not in refused:
            refused.add(key)
            await tx.execute(f"DO $$ BEGIN RAISE EXCEPTION 'as ordered' USING ERRCODE = '{raises}'; END $$".encode())
        ctx.progress(1, 2)
        await asyncio.sleep(seconds)


refused: set[str] = set()


@app.job(once_per=("group",), retry=RETRY)
async def twin(ctx: Context, key: str, group: str, seconds: float = 0.0) -> None:
    """One effect for each group, however many jobs ask for it."""
    if seconds:
        await asyncio.sleep(seconds)
    async with ctx.transaction() as tx:
        await tx.execute(ROW, [group, ctx.id, ctx.lease_token])
