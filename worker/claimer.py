"""Claims for the free slots, a little ahead of them when jobs are short, and sleeps without missing a wake-up.

Going to sleep: mark idle, commit, then ask whether every enqueuer that may have seen this worker busy has ended. If so,
one more claim, and it may sleep: whoever enqueues from now on sees it idle and wakes it. If not, it stays watchful,
claiming again after 20 ms and then less and less often, until it may.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable

import psycopg

from pgqueue import workers
from pgqueue.claim import Claim, Claimant, Claimed, Lanes, claim_next
from pgqueue.db import Connection
from pgqueue.failpoints import failpoint
from pgqueue.log import say
from pgqueue.wake import wake
from pgqueue.worker.finisher import Finisher
from pgqueue.worker.link import Link
from pgqueue.worker.slots import Slots

logger = logging.getLogger("pgqueue.worker")

LARGEST_BATCH = 500
AHEAD = 0.05
"""This many seconds of work are claimed ahead of the free slots: none when jobs are long, many when short."""
AHEAD_BYTES = 16 << 20
"""… but no more than this much of payloads."""
WATCHFUL = 0.02
LINGER = 0.1
"""A worker that is woken many times a second looks again by itself for so long before it marks itself idle."""


class Claimer:
    def __init__(
        self,
        link: Link,
        who: Claimant,
        slots: Slots,
        finisher: Finisher,
        poll_interval: float,
        reconcile: Callable[[Connection], Awaitable[None]],
        lease_stands: Callable[[], bool],
    ) -> None:
        self.link = link
        self.who = who
        self.slots = slots
        self.finisher = finisher
        self.poll_interval = poll_interval
        self.reconcile = reconcile
        """Gives back what was claimed without our knowing."""
        self.lease_stands = lease_stands
        """What is claimed by a worker that others take for dead is rescued at once."""
        self.lanes = Lanes()
        self.mean_size = 1.0
        """Characters of a payload, of late."""
        self.mean_run: float | None = None
        """Seconds that a job runs, of late."""
        self.idle = False
        """Whether the database says so."""
        self.wake = asyncio.Event()
        self.look_closer = False
        """Whether to look at parked jobs and below the floors, too, before sleeping again."""
        self.woken = False
        """Whether it was woken for something that it has not found yet."""
        self.stopping = False
        self._room = asyncio.Event()
        self._wakes: list[float] = []
        self._all_busy = (("", ""), 0.0)
        """The last queue and type for which there was nobody idle to be woken, and when."""
        self._unsure = False
        """Whether the answer to a claim may be lost."""

    def stop(self) -> None:
        self.stopping = True
        self.wake.set()
        self._room.set()

    def ran(self, seconds: float) -> None:
        """A job ended after so many seconds, and its slots are free."""
        self.mean_run = seconds if self.mean_run is None else self.mean_run + (seconds - self.mean_run) / 16
        self.look_for_room()

    def look_for_room(self) -> None:
        if not self._room.is_set() and self._wanted() > 0:
            self._room.set()

    def _wanted(self) -> int:
        """How many more jobs to hold: the free slots that nothing waits for, and some ahead when jobs are short."""
        ahead = 0
        if self.mean_run is not None:
            # Two batches: one is claimed while the other runs.
            ahead = min(2 * LARGEST_BATCH, int(self.slots.threads * AHEAD / max(self.mean_run, 1e-6)))
            ahead = min(ahead, int(AHEAD_BYTES / self.mean_size))
        wanted = self.slots.room + ahead
        # Asking for a few at a time would cost a statement each.
        return wanted if wanted * 2 >= ahead else 0

    async def run(self) -> None:
        pause = 0.0
        while not self.stopping:
            await self.finisher.room()
            if (wanted := self._wanted()) <= 0:
                self._room.clear()
                await self._room.wait()
                continue
            if not self.lease_stands():
                await asyncio.sleep(WATCHFUL)
                continue
            try:
                if self._unsure:
                    await self.reconcile(await self.link.get())
                    self._unsure = False
                if await self._claim(wanted, quick=True):
                    pause = 0.0
                    continue
                if self._lingers():
                    await self._woken(random.uniform(0.001, 0.005))
                    continue
                pause = await self._go_idle(pause)
            except (psycopg.Error, OSError) as error:
                self._unsure = True
                self.lanes = Lanes()  # after a failover, numbers below the floors may be handed out again
                self.idle = False
                await self.link.failed(error, "claiming nothing until the database is back")

    async def _go_idle(self, pause: float) -> float:
        """Sleeps until woken or until the next poll; answers with the next pause while watchful."""
        conn = await self.link.get()
        if not self.idle:
            await workers.mark_idle(conn, self.who.worker_id)
            self.idle = True
        elif pause == 0.0 and not self.look_closer:
            # Nothing has happened since it went to sleep.
            await self._sleep(self.poll_interval * random.uniform(0.8, 1.0))
            return 0.0
        self.look_closer = False
        if await workers.may_sleep(conn):
            idle_since = time.monotonic()
            if not self.wake.is_set() and not await self._claim(max(1, self._wanted()), quick=False):
                seconds = self.poll_interval * random.uniform(0.8, 1.0)
                if self.lanes.last_sweep < idle_since:
                    # It was not allowed to look everywhere yet: it gets up as soon as it is.
                    self.look_closer = True
                    allowed = self.lanes.may_sweep_at(woken=self.woken)
                    seconds = min(seconds, max(0.0, allowed - time.monotonic()))
                else:
                    self.woken = False
                await self._sleep(seconds)
            return 0.0
        pause = min(max(pause * 2, WATCHFUL), self.poll_interval)
        await self._sleep(pause)
        return pause

    async def _sleep(self, seconds: float) -> None:
        """Whom nobody woke looks everywhere: the poll must find what no lane and no floor shows, too."""
        if not await self._woken(seconds):
            self.lanes.last_sweep = 0.0

    async def _woken(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self.wake.wait()
        except TimeoutError:
            return False
        self._heed()
        self._wakes.append(time.monotonic())
        del self._wakes[:-20]
        return True

    def _heed(self) -> None:
        """What it was woken for may stand where a quick claim does not look."""
        self.wake.clear()
        self.look_closer = self.woken = True

    def _lingers(self) -> bool:
        """Woken a hundred times a second: looking again is cheaper for everybody than sleeping and being woken."""
        now = time.monotonic()
        return (
            not self.idle and len(self._wakes) == 20 and now - self._wakes[0] < 0.2 and now - self._wakes[-1] < LINGER
        )

    async def _claim(self, wanted: int, *, quick: bool) -> bool:
        """Claims and hands the jobs to the slots; the book-keeping comes after they have started."""
        if self.wake.is_set():
            self._heed()
        limit = min(wanted, LARGEST_BATCH)
        conn = await self.link.get()
        failpoint("claim.before")
        claims = await claim_next(conn, self.who, self.lanes, limit, quick=quick, woken=self.woken)
        if claims:
            failpoint("claim.after")
        got, parked = self._hand_over(claims)
        if got == 0 and not parked:
            return False
        self.woken = False
        if self.idle:
            self.idle = False
            await asyncio.sleep(0)  # the handlers first
            await workers.mark_busy(conn, self.who.worker_id)
        if parked:
            await wake(conn, *map(list, zip(*[(j.queue, j.type, j.thread_demand) for j in parked], strict=True)))
        if got >= limit or self._wanted() <= 0:
            # There may be more than this worker takes: the next idle one is woken, and so on down the line.
            await self._wake_next(conn, claims[-1].jobs[-1])
        # What was parked was in the way: there may be more behind it.
        return True

    async def _wake_next(self, conn: Connection, job: Claimed) -> None:
        """Not if nobody was idle a moment ago: who became so since then has looked for work itself."""
        now, kind = time.monotonic(), (job.queue, job.type)
        busy, since = self._all_busy
        if (kind != busy or now - since > WATCHFUL) and not await wake(conn, [job.queue], [job.type], [1]):
            self._all_busy = (kind, now)

    def _hand_over(self, claims: list[Claim]) -> tuple[int, list[Claimed]]:
        got, parked = 0, []
        for claim in claims:
            mine = [job for job in claim.jobs if not job.parked]
            parked += [job for job in claim.jobs if job.parked]
            got += len(mine)
            if mine:
                self.mean_size += (sum([len(job.payload) for job in mine]) / len(mine) + 1 - self.mean_size) / 4
            if logger.isEnabledFor(logging.DEBUG):
                for job in mine:
                    say(logger, logging.DEBUG, "job.claimed", f"claimed job {job.id} {job.type}", job=job.id)
            self.slots.offer(mine, claim.lease_token)
        return got, parked
