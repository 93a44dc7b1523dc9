"""Outcomes, gathered while the last batch is being written, go to the database in one statement a kind.

While the database is away they are kept, and written, fenced, when it is back. While somebody else holds a job's row
(who forgot to commit a cancellation), its outcome is kept, and those of all others are written.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import psycopg
from psycopg import errors as pg

from pgqueue import finish, idempotency
from pgqueue.claim import Claimed
from pgqueue.db import Connection, is_overtaken
from pgqueue.failpoints import failpoint
from pgqueue.finish import Cancelled, Completed, Failed, Snoozed, Written
from pgqueue.idempotency import Effect
from pgqueue.job import Lease
from pgqueue.log import say
from pgqueue.wake import wake
from pgqueue.worker.link import Link

logger = logging.getLogger("pgqueue.worker")

BATCH = 1000
BATCH_CHARACTERS = 4 << 20
"""Of results. PostgreSQL needs up to forty times as much memory to read them as one array."""
FULL = 5000
"""With so many outcomes unwritten, no more jobs are claimed."""
LOOK_EVERY = 1.0
"""Seconds, while somebody holds the rows of jobs that ended …"""
LOOK_SOON = 0.1
"""… and when the worker stops."""

Outcome = Completed | Failed | Cancelled | Snoozed | Written | Lease
Entry = tuple[Outcome, Claimed, Effect | None]


async def end(
    conn: Connection, outcomes: Sequence[Outcome], held: finish.Held | None = None
) -> dict[int, float | None]:
    """Ends attempts that all ended in the same way. The ids of those whose lease stood, and when they are due again."""
    completed = [one for one in outcomes if isinstance(one, Completed)]
    if completed:
        return dict.fromkeys(await finish.complete(conn, completed, held))
    failed = [one for one in outcomes if isinstance(one, Failed)]
    if failed:
        return {id: fate.delay for id, fate in (await finish.fail(conn, failed, held)).items()}
    cancelled = [one for one in outcomes if isinstance(one, Cancelled)]
    if cancelled:
        return dict.fromkeys(await finish.cancel(conn, cancelled, held))
    snoozed = [one for one in outcomes if isinstance(one, Snoozed)]
    if snoozed:
        done = await finish.snooze(conn, snoozed, held)
        return {one.id: one.delay for one in snoozed if one.id in done}
    if any(isinstance(one, Written) for one in outcomes):
        return dict.fromkeys(one.id for one in outcomes)
    failpoint("release.before")
    return dict.fromkeys(await finish.release(conn, outcomes, held))


async def settle(
    conn: Connection, outcome: Outcome, effect: Effect, held: finish.Held | None = None
) -> dict[int, float | None]:
    """Ends one attempt and says how its effect stands, in one transaction."""
    try:
        async with conn.transaction():
            done = await end(conn, [outcome], held)
            if done and isinstance(outcome, Completed):
                await idempotency.effect_done(conn, outcome.id, effect, outcome.result)
            elif done and not isinstance(outcome, Written) and getattr(outcome, "reason", None) != "in_doubt":
                # The handler itself said that it did not do it.
                await idempotency.effect_undone(conn, outcome, effect)
            return done
    except pg.LockNotAvailable:
        if held is None:
            raise
        held |= await finish.holders(conn, [outcome]) or {outcome.id: "somebody: see pg_locks"}
        return {}
    except finish.UNSTORABLE as error:
        if is_overtaken(error):
            raise
        if isinstance(outcome, Failed) and outcome.error_type != type(error).__name__:
            return await settle(conn, finish.untellable(outcome, error), effect, held)
        if not isinstance(outcome, Completed):
            # Its row is beyond repair: without the effect, so that it is told of and holds up nobody.
            return await end(conn, [outcome], held)
        bad = finish.unstorable(outcome, error)
        if effect.at_most_once:
            bad.reason = "in_doubt"
        return await settle(conn, bad, effect, held)


def batch(entries: list[Entry]) -> int:
    """How many of them go into one statement."""
    size = 0
    for count, (outcome, _, _) in enumerate(entries[:BATCH]):
        size += len(outcome.result or "") if type(outcome) is Completed else 0
        if size > BATCH_CHARACTERS:
            return max(1, count)
    return BATCH


class Finisher:
    def __init__(self, link: Link, due_in: Callable[[float], None], remember: Callable[[int, Effect], None]) -> None:
        self.link = link
        self.due_in = due_in
        """Told how soon a job is due that this worker put off."""
        self.remember = remember
        """Told which effects are known to be done."""
        self.outcomes: list[Entry] = []
        self.writing: list[Entry] = []
        self.held: list[Entry] = []
        """Those whose jobs' rows somebody else holds."""
        self.completed = 0
        self.failed = 0
        self.lost = 0
        self._something = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._stop = False
        self._next_look = 0.0
        self._told: set[int] = set()
        """The jobs that were, or are, among the held."""

    def put(self, outcome: Outcome, job: Claimed, effect: Effect | None = None) -> None:
        self.outcomes.append((outcome, job, effect))
        if not self._something.is_set():
            self._something.set()

    def __len__(self) -> int:
        return len(self.outcomes) + len(self.writing) + len(self.held)

    def ids(self) -> set[int]:
        return {entry[1].id for entries in (self.outcomes, self.writing, self.held) for entry in entries}

    async def written(self, id: int) -> None:
        """Until this job's outcome is written, or set aside."""
        while any(job.id == id for _, job, _ in (*self.outcomes, *self.writing)):  # noqa: ASYNC110 - it is rare
            await asyncio.sleep(0.01)

    def stop(self) -> None:
        """End when everything is written."""
        self._stop = True
        self._next_look = 0.0
        self._something.set()

    async def room(self) -> None:
        """Back-pressure: waits until the unwritten outcomes are few enough."""
        if len(self) >= FULL:
            self._room.clear()
            await self._room.wait()

    async def run(self) -> None:
        while True:
            await self._sleep()
            self._something.clear()
            while self.outcomes or self._look_is_due():
                count = batch(self.outcomes)
                self.writing, self.outcomes = self.outcomes[:count], self.outcomes[count:]
                await self._write()
                if len(self) < FULL:
                    self._room.set()
            if self._stop and not self.held:
                return

    async def _sleep(self) -> None:
        if not self.held:
            self._told.clear()
            await self._something.wait()
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self._next_look - time.monotonic())):
                await self._something.wait()

    def _look_is_due(self) -> bool:
        return bool(self.held) and time.monotonic() >= self._next_look

    async def _write(self) -> None:
        unsure = False
        while self.writing or self._look_is_due():
            try:
                conn = await self.link.get()
                if self._look_is_due():
                    await self._look(conn)
                await self._send(conn, unsure)
            except (psycopg.Error, OSError) as error:
                # Whether the last statement took effect is unknown. The token decides: nothing can be ended twice.
                unsure = True
                await self.link.failed(error, f"keeping {len(self)} finished jobs until the database is back")

    async def _send(self, conn: Connection, unsure: bool) -> None:
        """What is written is taken out at once: a statement that fails later does not write it again."""
        for entry in [entry for entry in self.writing if entry[2] is not None]:
            held = await self._send_batch(conn, [entry], entry[2], unsure)
            self.writing.remove(entry)
            if held:
                self._set_aside([entry], held)
                return await self._set_others_aside(conn)
        kinds: dict[type[Outcome], list[Entry]] = {}
        for entry in self.writing:
            kinds.setdefault(type(entry[0]), []).append(entry)
        for kind, entries in kinds.items():
            held = await self._send_batch(conn, entries, None, unsure)
            self.writing = [entry for entry in self.writing if type(entry[0]) is not kind]
            if held:
                self._set_aside(entries, held)
                return await self._set_others_aside(conn)

    async def _set_others_aside(self, conn: Connection) -> None:
        """Whoever holds one may hold others: what is left of the batch does not wait once more to learn it."""
        held = await finish.holders(conn, [outcome for outcome, _, _ in self.writing])
        self._set_aside(self.writing, held)
        self.writing = [entry for entry in self.writing if entry[1].id not in held]

    def _set_aside(self, entries: list[Entry], held: finish.Held) -> None:
        if not self.held:
            self._next_look = time.monotonic() + (LOOK_SOON if self._stop else LOOK_EVERY)
        self.held += [entry for entry in entries if entry[1].id in held]
        new = {id: who for id, who in held.items() if id not in self._told}
        self._told |= new.keys()
        if new:
            jobs = ", ".join(map(str, list(new)[:5])) + (", …" if len(new) > 5 else "")
            text = f"keeping the outcomes of jobs {jobs} until their rows are free, which are held by "
            text += "; ".join(sorted(set(new.values()))[:5])
            say(logger, logging.WARNING, "job.held", text, jobs=sorted(new)[:5])

    async def _look(self, conn: Connection) -> None:
        """Those whose rows are free by now are written first."""
        still = await finish.holders(conn, [outcome for outcome, _, _ in self.held])
        self.outcomes[:0] = [entry for entry in self.held if entry[1].id not in still]
        self.held = [entry for entry in self.held if entry[1].id in still]
        self._next_look = time.monotonic() + (LOOK_SOON if self._stop else LOOK_EVERY)

    async def _send_batch(
        self, conn: Connection, entries: list[Entry], effect: Effect | None, unsure: bool
    ) -> finish.Held:
        """Those of them that somebody holds."""
        held: finish.Held = {}
        outcomes = [outcome for outcome, _, _ in entries]
        kind = type(outcomes[0])
        failpoint("fail.before" if kind is Failed else "finish.before")
        done = await (end(conn, outcomes, held) if effect is None else settle(conn, outcomes[0], effect, held))
        failpoint("fail.after" if kind is Failed else "finish.after")
        if held:
            entries = [entry for entry in entries if entry[1].id not in held]
            outcomes = [outcome for outcome, _, _ in entries]
            if not entries:
                return held
        # Who held a job that was set aside may have been our own statement, whose connection was cut.
        if (unsure or self._told) and len(done) < len(outcomes):
            done |= dict.fromkeys(await finish.ended(conn, [one for one in outcomes if one.id not in done]))
        for delay in done.values():
            if delay is not None:
                self.due_in(delay)
        if kind is Completed or kind is Written:
            self.completed += len(done)
            if effect is not None and done:
                self.remember(outcomes[0].id, effect)
        elif kind is Failed:
            self.failed += len(done)
        elif kind is Lease and effect is not None:
            [(_, job, _)] = entries
            await wake(conn, [job.queue], [job.type], [job.thread_demand])
        if logger.isEnabledFor(logging.INFO) or len(done) < len(outcomes):
            self._tell(entries, done)
        return held

    def _tell(self, entries: list[Entry], done: dict[int, float | None]) -> None:
        for outcome, job, _ in entries:
            fields = {"job": job.id, "type": job.type, "queue": job.queue, "attempt": job.attempt + 1}
            if job.id not in done:
                self.lost += 1
                text = f"dropped the result of job {job.id} {job.type}: its lease is lost"
                say(logger, logging.WARNING, "job.lease_lost", text, **fields)
            elif isinstance(outcome, Completed):
                seconds = round(outcome.ended - outcome.started, 6)
                text = f"completed job {job.id} {job.type} in {seconds:.3f} s"
                say(logger, logging.INFO, "job.completed", text, seconds=seconds, **fields)
            elif isinstance(outcome, Written):
                text = f"completed job {job.id} {job.type} ({outcome.how})"
                say(logger, logging.INFO, "job.completed", text, how=outcome.how, **fields)
            elif isinstance(outcome, Failed):
                dead = outcome.delay is None or job.attempt + 1 >= job.max_attempts
                fate = "dead letter queue" if dead else f"next attempt in {outcome.delay:.1f} s"
                text = (
                    f"failed job {job.id} {job.type}, attempt {job.attempt + 1} of {job.max_attempts}:"
                    f" {outcome.error_type}: {outcome.error[:200]} ({fate})"
                )
                say(logger, logging.WARNING, "job.failed", text, reason=outcome.reason, error=outcome.error, **fields)
            elif isinstance(outcome, Cancelled):
                say(logger, logging.INFO, "job.cancelled", f"cancelled job {job.id} {job.type}", **fields)
            elif isinstance(outcome, Snoozed):
                text = f"snoozed job {job.id} {job.type} for {outcome.delay:.1f} s"
                say(logger, logging.INFO, "job.snoozed", text, **fields)
            else:
                say(logger, logging.INFO, "job.released", f"gave back job {job.id} {job.type}", **fields)
