"""Once: keys of effects, the rows that decide, and the cache that may save a look at them.

The row in PostgreSQL (L2) decides, in the transaction that ends the job. Redis (L1) is written only after that commit
is known, holds only "done", and is only a hint: what it says is confirmed by the statement that completes the
duplicate. So Redis may be down, empty, stale or lying, and nothing is lost or done twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from enum import Enum
from typing import Any, NamedTuple

from pgqueue.db import Connection
from pgqueue.errors import LeaseLost
from pgqueue.job import Lease
from pgqueue.log import say
from pgqueue.sql import SQL

logger = logging.getLogger("pgqueue.idempotency")

BUDGET = 0.05
"""Seconds that Redis may take."""
FAILURES = 3
"""So many in a row open the circuit …"""
OPEN_FOR = 5.0
"""… for so many seconds, in which Redis is not asked."""


def effect_key(*parts: Any) -> str:
    """A key of parts. Each part's length is part of it, so that "a@x.com" and "Bob" are not "a@x.co" and "mBob"."""
    digest = hashlib.sha256()
    for part in parts:
        text = str(part).encode("utf-8", "surrogatepass")
        digest.update(f"{type(part).__name__}:{len(text)}:".encode())
        digest.update(text)
    return digest.hexdigest()


class Standing(Enum):
    """How an effect stands for a job that is about to have it."""

    OURS = "ours"
    """Run: nobody has begun it."""
    AGAIN = "again"
    """An attempt of this very job began it and never said how it ended."""
    DONE = "done"
    """Another job has done it."""
    BUSY = "busy"
    """Another job that is not finished has begun it."""
    UNSETTLED = "unsettled"
    """Another job began it and ended without saying how: only an operator can tell."""


class Effect(NamedTuple):
    """An effect that must happen once."""

    key: str
    at_most_once: bool
    ttl: float


async def begin_effect(conn: Connection, lease: Lease, effect: Effect) -> Standing:
    """Takes the effect for this job, durably, before the handler runs."""
    parameters = {
        "id": lease.id,
        "lease_token": lease.lease_token,
        "key": effect.key,
        "ttl": effect.ttl,
        "at_most_once": effect.at_most_once,
    }
    row = await (await conn.execute(SQL.begin_effect, parameters, prepare=False)).fetchone()
    assert row is not None
    leased, taken, holder, done, alive = row
    if not leased:
        raise LeaseLost(f"the lease on job {lease.id} is lost")
    if taken is not None:
        # Inherited: whoever began it was deleted, cancelled or edited, so the doubt is told of by this job.
        return Standing.OURS if taken else Standing.AGAIN
    if holder is None:
        # Another began it while this statement waited: it is not in this statement's snapshot.
        return Standing.BUSY
    if done:
        return Standing.DONE
    if holder == lease.id:
        return Standing.AGAIN
    return Standing.BUSY if alive else Standing.UNSETTLED


async def effect_done(conn: Connection, id: int, effect: Effect, result: str | None) -> bool:
    """False: another job has taken it over."""
    parameters = {"id": id, "key": effect.key, "ttl": effect.ttl, "result": result}
    return await (await conn.execute(SQL.effect_done, parameters, prepare=False)).fetchone() is not None


async def effect_undone(conn: Connection, lease: Lease, effect: Effect) -> None:
    """The attempt that had this lease did not have the effect."""
    parameters = {
        "id": lease.id,
        "lease_token": lease.lease_token,
        "key": effect.key,
        "at_most_once": effect.at_most_once,
    }
    await conn.execute(SQL.effect_undone, parameters, prepare=False)


async def complete_duplicate(conn: Connection, lease: Lease, key: str) -> bool:
    """Confirms that the effect is done and completes the job with its result, in one statement."""
    parameters = {"id": lease.id, "lease_token": lease.lease_token, "key": key}
    return await (await conn.execute(SQL.complete_duplicate, parameters, prepare=False)).fetchone() is not None


class L1:
    """The cache of done effects in Redis: quick or nothing."""

    def __init__(self, url: str) -> None:
        from redis.asyncio import Redis

        self._redis = Redis.from_url(url, socket_timeout=BUDGET, socket_connect_timeout=BUDGET, health_check_interval=0)
        self._failures = 0
        self._closed_again = 0.0

    async def is_done(self, key: str) -> bool:
        return bool(await self._ask(self._redis.exists(_name(key))))

    async def set_done(self, key: str, job_id: int, ttl: float) -> None:
        await self._ask(self._redis.set(_name(key), job_id, nx=True, ex=max(1, int(ttl))))

    async def forget(self, key: str) -> None:
        await self._ask(self._redis.delete(_name(key)))

    async def close(self) -> None:
        await self._redis.aclose()

    async def _ask(self, question: Any) -> Any:
        """An error, a wrong type or a late answer is no answer."""
        if time.monotonic() < self._closed_again:
            question.close()
            return None
        try:
            async with asyncio.timeout(BUDGET):
                answer = await question
        except Exception as error:
            self._failures += 1
            if self._failures >= FAILURES:
                self._failures = 0
                self._closed_again = time.monotonic() + OPEN_FOR
                text = f"Redis does not answer ({type(error).__name__}); working without it for {OPEN_FOR:g} s"
                say(logger, logging.WARNING, "l1.open", text)
            return None
        self._failures = 0
        return answer


def _name(key: str) -> str:
    return f"pgqueue:done:{key}"
