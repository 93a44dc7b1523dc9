"""What every worker does for all, without a leader: promote, rescue, prune, make partitions, look for cancellations and
for whoever keeps vacuum from its work."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from math import inf
from uuid import UUID

import psycopg
from psycopg import errors as pg

from pgqueue import finish, migrate, promote, prune, rescue, snapshots, tally, workers
from pgqueue.db import Connection, is_outage
from pgqueue.errors import PgQueueError, SchemaMismatch
from pgqueue.failpoints import failpoint
from pgqueue.job import Lease
from pgqueue.log import say
from pgqueue.worker.link import Link

logger = logging.getLogger("pgqueue.worker")

RECONCILE_AFTER = 10.0
TICK_EVERY = 1.0
"""However rarely the worker polls: nobody is told of jobs that are due in a while, nor, without NOTIFY, of cancelled
ones."""
TICK_PAUSE = 0.05
"""However often it is woken, it asks no more often than this."""
LONGEST_TICK_PAUSE = 1.0
"""While somebody else has the rows of all jobs that are due."""
REPRIEVE = 4.0
"""After an outage nobody is dead yet: so long has everybody to come back and send a heartbeat."""
PRUNE_EVERY = 600.0
FOLD_EVERY = 5.0
CHORES_PAUSE = 5.0
"""While the database has another schema."""
LOOK_EVERY = 5.0
HELD_FOR = 45.0
"""A snapshot that is older than this is told of: within a minute, with the time that it takes to notice."""
AT_ONCE = 5
"""More holders than this are not told of."""


class Janitor:
    def __init__(
        self,
        link: Link,
        worker_id: UUID,
        *,
        poll_interval: float,
        rescue_interval: float,
        retention_days: float,
        known: Callable[[], set[int]],
        cancel: Callable[[Iterable[int]], None],
        ready: Callable[[], None],
        running: Callable[[], list[Lease]] = list,
        lost: Callable[[list[Lease]], None] = lambda leases: None,
    ) -> None:
        self.link = link
        self.worker_id = worker_id
        self.poll_interval = poll_interval
        self.rescue_interval = rescue_interval
        self.retention_days = retention_days
        self.known = known
        """The jobs that this worker knows to be its own."""
        self.cancel = cancel
        self.running = running
        self.lost = lost
        """Told which leases of those that run are lost."""
        self.ready = ready
        """Told when there may be something to claim."""
        self.due = promote.DueFloor()
        self.clock = rescue.Clock()
        self.wake = asyncio.Event()
        self._away = False
        self._next_due: float | None = None
        self._tick_pause = TICK_PAUSE
        self._next_rescue = 0.0
        self._next_sweep = 0.0
        self._next_reconcile = time.monotonic() + RECONCILE_AFTER
        self._next_prune = 0.0
        self._next_forget = inf
        self._next_fold = 0.0
        self._next_look = 0.0
        self._next_chores = 0.0
        self._schema_differs = False
        self._failing: set[str] = set()
        """The chores that failed the last time."""
        self.watch = snapshots.Watch()
        self._holders: dict[tuple[str, str], snapshots.Holder] = {}
        """Those that were told of."""

    def due_in(self, seconds: float) -> None:
        """A job of ours is due then: get up in time."""
        when = time.monotonic() + seconds
        if self._next_due is None or when < self._next_due:
            self._next_due = when
            self.wake.set()

    async def run(self) -> None:
        while True:
            try:
                await self.run_once(await self.link.get())
            except (psycopg.Error, OSError, PgQueueError) as error:
                self._away = self._away or is_outage(error)
                await self.link.failed(error, "rescue and promotion wait until the database is back")
            await self._sleep()

    async def _sleep(self) -> None:
        now = time.monotonic()
        seconds = min(self.poll_interval, TICK_EVERY, max(0.0, self._next_rescue - now))
        if self._next_due is not None:
            seconds = min(seconds, max(0.0, self._next_due - now))
        await asyncio.sleep(min(TICK_PAUSE, seconds))
        seconds = max(0.0, seconds - TICK_PAUSE)
        try:
            async with asyncio.timeout(seconds):
                await self.wake.wait()
        except TimeoutError:
            pass
        self.wake.clear()

    async def run_once(self, conn: Connection) -> None:
        now = time.monotonic()
        if self._next_due is not None and now >= self._next_due:
            await self._promote(conn)
        if now >= self._next_sweep:
            # Below the floor a job can only be if its transaction committed late.
            self._next_sweep = now + TICK_EVERY
            self.due.run_at = promote.BEGINNING
        tick = await workers.tick(conn, self.worker_id, self.due.run_at)
        # A look from the beginning that was not cheap is not repeated soon.
        self._next_sweep = max(self._next_sweep, now + 20 * (time.monotonic() - now))
        self._next_due = None if tick.due_in is None else time.monotonic() + max(0.0, tick.due_in)
        if tick.due_in is None or tick.due_in > 0 or await self._promote(conn):
            self._tick_pause = TICK_PAUSE
        else:
            # Somebody else has their rows, for a moment or for long.
            self._next_due = time.monotonic() + self._tick_pause
            self._tick_pause = min(2 * self._tick_pause, LONGEST_TICK_PAUSE)
        if tick.cancelled:
            self.cancel(tick.cancelled)
        if tick.parked:
            self.ready()
        if self._away:
            self._away = False
            self._next_rescue = now + REPRIEVE
        if now >= self._next_rescue:
            self._next_rescue = now + self.rescue_interval * random.uniform(0.8, 1.0)
            await self._rescue(conn)
        if now >= self._next_reconcile:
            self._next_reconcile = now + RECONCILE_AFTER
            await self.reconcile(conn, RECONCILE_AFTER)
            if running := self.running():
                stand = await finish.still_leased(conn, running)
                self.lost([lease for lease in running if lease.id not in stand])
        if now >= self._next_chores:
            try:
                await self._chores(conn, now)
            except SchemaMismatch as mismatch:
                self._other_schema(mismatch)
            else:
                if self._schema_differs:
                    self._schema_differs = False
                    say(logger, logging.INFO, "schema.back", "the database's schema is what this code needs again")

    async def _chores(self, conn: Connection, now: float) -> None:
        """What can wait. Each has its own pace, whether it succeeds or not."""
        if now >= self._next_fold:
            self._next_fold = now + FOLD_EVERY * random.uniform(0.8, 1.2)
            await self._chore(conn, self._fold, "figures stand still")
        if now >= self._next_look:
            self._next_look = now + LOOK_EVERY
            await self._chore(conn, self.look_for_holders, "nobody is told who holds old snapshots")
        if now >= self._next_prune:
            self._next_prune = now + PRUNE_EVERY * random.uniform(0.8, 1.2)
            await self._chore(conn, prune.make_partitions, "there are no partitions for the days to come")
            await self._chore(conn, self._prune, "history is not pruned")
        if now >= self._next_forget:
            await self._chore(conn, self._forget, "keys are not pruned")

    async def _chore(self, conn: Connection, chore: Callable[[Connection], Awaitable[object]], meanwhile: str) -> None:
        """One that fails, for a missing right or a fault of ours, keeps no other from its turn."""
        try:
            await chore(conn)
        except (psycopg.Error, PgQueueError) as error:
            if is_outage(error):
                raise
            if isinstance(error, pg.UndefinedFunction | pg.UndefinedTable | pg.UndefinedColumn):
                await migrate.check_schema(conn)
            if meanwhile not in self._failing:
                self._failing.add(meanwhile)
                text = f"{str(error).strip() or type(error).__name__}; until that is put right, {meanwhile}"
                say(logger, logging.WARNING, "chore.failed", text)
        else:
            self._failing.discard(meanwhile)

    def _other_schema(self, mismatch: SchemaMismatch) -> None:
        """Somebody migrated while this worker runs. Jobs go on as long as they can; the rest is tried again."""
        self._next_chores = time.monotonic() + CHORES_PAUSE
        # What failed has to succeed before all is well again.
        self._next_fold = self._next_look = self._next_prune = self._next_chores
        if not self._schema_differs:
            self._schema_differs = True
            text = f"{mismatch}; meanwhile this worker does what it can: history is not pruned, figures stand still"
            say(logger, logging.WARNING, "schema.differs", text)

    async def _fold(self, conn: Connection) -> None:
        begun = time.monotonic()
        await tally.fold(conn, wait=False)
        # Where a held snapshot keeps what was folded, it takes longer, and comes less often.
        self._next_fold = max(self._next_fold, begun + 20 * (time.monotonic() - begun))

    async def _forget(self, conn: Connection) -> None:
        """Some at each tick, for as long as there are more."""
        self._next_forget = inf
        if await prune.forget(conn):
            self._next_forget = 0.0

    async def _prune(self, conn: Connection) -> None:
        self._next_forget = 0.0
        if dropped := await prune.prune(conn, self.retention_days):
            say(logger, logging.INFO, "history.pruned", f"dropped {dropped} days of history", partitions=dropped)

    async def look_for_holders(self, conn: Connection) -> None:
        old = [each for each in await self.watch.look(conn, self.worker_id) if each.seconds > HELD_FOR]
        holders = {(each.kind, each.name): each for each in old[:AT_ONCE]}
        for key in holders.keys() - self._holders.keys():
            each = holders[key]
            text = f"{each.what} has held a snapshot for {each.seconds:.0f} s: rows that were changed or deleted since"
            text += f" then cannot be removed, tables grow, and in time jobs wait longer; {each.remedy}"
            fields = {"kind": each.kind, "name": each.name, "transactions": each.transactions, "remedy": each.remedy}
            say(logger, logging.WARNING, "snapshot.held", text, seconds=round(each.seconds), **fields)
        for kind, name in self._holders.keys() - holders.keys():
            text = f"{self._holders[kind, name].what} holds no old snapshot any more"
            say(logger, logging.INFO, "snapshot.released", text, kind=kind, name=name)
        self._holders = holders

    async def _promote(self, conn: Connection) -> int:
        self._next_due = None
        if promoted := await promote.promote(conn, self.due):
            self._next_due = time.monotonic()  # there may be more
            failpoint("promote.after")
            self.ready()
        return promoted

    async def _rescue(self, conn: Connection) -> None:
        failpoint("rescue.before")
        rescued = await rescue.rescue(conn, clock=self.clock)
        if rescued.jobs:
            failpoint("rescue.after")
            text = f"rescued {rescued.jobs} jobs of dead workers"
            if rescued.poisoned:
                text += f"; {rescued.poisoned} of them killed too many workers and are in the dead letter queue"
            say(logger, logging.WARNING, "jobs.rescued", text, jobs=rescued.jobs, poisoned=rescued.poisoned)
            self.ready()

    async def reconcile(self, conn: Connection, age: float) -> None:
        """A claim whose answer was lost left jobs that nobody runs; as this worker lives, nobody would rescue them.
        Whoever claims may ask about leases of any age; for others the last answer may still be under way."""
        leases = await workers.claimed_by(conn, self.worker_id, age)
        known = self.known()
        strangers = [Lease(lease.id, lease.lease_token) for lease in leases if lease.id not in known]
        # Those whose rows somebody holds are given back the next time.
        if strangers and (released := await finish.release(conn, strangers, {})):
            text = f"gave back {len(released)} jobs of a claim whose answer was lost"
            say(logger, logging.WARNING, "jobs.reconciled", text, jobs=len(released))
            self.ready()
