"""Before a handler with an effect runs: whose effect is it, and has it happened?"""

from __future__ import annotations

import asyncio
import logging
import random
import time

import psycopg
from psycopg import errors as pg

from pgqueue import idempotency
from pgqueue.claim import Claimed
from pgqueue.db import is_outage
from pgqueue.errors import LeaseLost
from pgqueue.failpoints import failpoint
from pgqueue.finish import Failed, Snoozed, Written
from pgqueue.idempotency import L1, Effect, Standing
from pgqueue.job import Lease
from pgqueue.log import say
from pgqueue.worker.host import WorkerHost

logger = logging.getLogger("pgqueue.worker")

BUSY_PAUSE = 0.5
UNSETTLED_PAUSE = 5.0

IN_DOUBT = (
    "an earlier attempt began and nobody knows whether it had its effect:"
    " SELECT pgqueue.resolve_job(id, 'completed') if it had, 'retry' if it had not"
)


class Once:
    def __init__(self, host: WorkerHost, l1: L1 | None) -> None:
        self.host = host
        self.l1 = l1
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(
        self, job: Claimed, lease_token: str, threads: int, effect: Effect
    ) -> Written | Failed | Snoozed | Lease | None:
        """None: run the handler. Else this is the outcome, without running it."""
        lease = Lease(job.id, lease_token)
        try:
            if self.l1 is not None and await self.l1.is_done(effect.key):
                failpoint("l1.looked")
                async with self.host.connection() as conn:
                    if await idempotency.complete_duplicate(conn, lease, effect.key):
                        return Written(job.id, lease_token, "duplicate")
                # It was stale or forged: the row decides.
                await self.l1.forget(effect.key)
            failpoint("intent.before")
            async with self.host.connection() as conn:
                standing = await idempotency.begin_effect(conn, lease, effect)
                failpoint("intent.after")
                if standing is Standing.DONE and await idempotency.complete_duplicate(conn, lease, effect.key):
                    self.remember(job.id, effect)
                    return Written(job.id, lease_token, "duplicate")
        except (psycopg.Error, OSError, LeaseLost) as error:
            # Nothing has run yet: somebody else, or we later, will see.
            if isinstance(error, LeaseLost) or is_outage(error):
                return lease
            pause = BUSY_PAUSE
            if not isinstance(error, pg.LockNotAvailable):
                pause = UNSETTLED_PAUSE
                text = f"put off job {job.id} {job.type}, whose effect cannot be begun: {str(error).strip()}"
                say(logger, logging.WARNING, "effect.refused", text, job=job.id, type=job.type)
            return Snoozed(job.id, lease_token, pause * random.uniform(0.5, 1.0))
        if standing is Standing.OURS or (standing is Standing.AGAIN and not effect.at_most_once):
            return None
        if standing is Standing.AGAIN:
            now = time.monotonic()
            return Failed(job.id, lease_token, now, now, threads, None, "in_doubt", "InDoubt", IN_DOUBT)
        pause = UNSETTLED_PAUSE if standing is Standing.UNSETTLED else BUSY_PAUSE
        return Snoozed(job.id, lease_token, pause * random.uniform(0.5, 1.0))

    def remember(self, job_id: int, effect: Effect) -> None:
        """After a commit that is known: the cache may say so."""
        if self.l1 is not None:
            task = asyncio.get_running_loop().create_task(self._remember(self.l1, job_id, effect))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _remember(self, l1: L1, job_id: int, effect: Effect) -> None:
        failpoint("l1.before_set")
        await l1.set_done(effect.key, job_id, effect.ttl)
        failpoint("l1.after_set")

    async def close(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1)
        if self.l1 is not None:
            await self.l1.close()
