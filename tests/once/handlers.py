"""Handlers with the three kinds of effects, each of which can be counted from outside.

In the database an effect is a row of public.seen, which has no unique constraint: that would hide the second one.
Outside it is a line in a file of the folder SINK: what is called with a key takes each key once, like a provider that
honours them; what is called without takes everything.
"""

import asyncio
import hashlib
import os
from pathlib import Path

from pgqueue import Context, PgQueue
from pgqueue.outcome import Retry

SEEN = "CREATE TABLE public.seen (key text NOT NULL, job bigint NOT NULL, token text)"
RETRY = Retry(max_attempts=5, base=0.02, jitter=0)
MODES = ("in_transaction", "keyed", "at_most_once")

app = PgQueue()


@app.job(once_per=("key",), retry=RETRY)
async def in_transaction(ctx: Context, key: str, pauses: int = 0, failures: int = 0) -> None:
    await begin(ctx, key, pauses, failures)
    async with ctx.transaction() as tx:
        await tx.execute("INSERT INTO public.seen VALUES (%s, %s, %s)", [key, ctx.id, ctx.lease_token])
        ctx.set_result({"by": ctx.id})


@app.job(once_per=("key",), retry=RETRY)
async def keyed(ctx: Context, key: str, pauses: int = 0, failures: int = 0) -> dict[str, int]:
    await begin(ctx, key, pauses, failures)
    Sink().call(key, ctx.idempotency_key)
    return {"by": ctx.id}


@app.job(once_per=("key",), at_most_once=True, retry=RETRY)
async def at_most_once(ctx: Context, key: str, pauses: int = 0, failures: int = 0) -> dict[str, int]:
    await begin(ctx, key, pauses, failures)
    Sink().call(key)
    return {"by": ctx.id}


@app.job(once_per=("key",), retry=RETRY)
async def unkeyed(ctx: Context, key: str, seconds: float = 0.0) -> dict[str, int]:
    """An effect that nobody but pgqueue keeps from happening twice."""
    await asyncio.sleep(seconds)
    Sink().call(key)
    return {"by": ctx.id}


async def begin(ctx: Context, key: str, pauses: int, failures: int) -> None:
    """The first `pauses` starts take a while, the first `failures` attempts fail."""
    if Sink().began(key) <= pauses:
        await asyncio.sleep(60)
    if ctx.attempt <= failures:
        raise ValueError("as ordered")


class Sink:
    """The outside world, in a folder. A line of less than 4 KiB is written whole."""

    def __init__(self, folder: str | None = None) -> None:
        self.folder = Path(folder or os.environ["SINK"])

    def call(self, key: str, provider_key: str | None = None) -> None:
        self._note("calls", key)
        if provider_key is not None:
            try:
                (self.folder / f"taken-{digest(provider_key)}").touch(exist_ok=False)
            except FileExistsError:
                return
        self._note("effects", key)

    def began(self, key: str) -> int:
        self._note("starts", key)
        return self.count("starts", key)

    def count(self, what: str, key: str) -> int:
        return self.all(what).count(key)

    def all(self, what: str) -> list[str]:
        try:
            return (self.folder / what).read_text("utf-8").splitlines()
        except FileNotFoundError:
            return []

    def _note(self, what: str, key: str) -> None:
        with open(self.folder / what, "ab", buffering=0) as file:
            file.write(f"{key}\n".encode())


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
