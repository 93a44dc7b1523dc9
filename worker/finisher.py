"""Outcomes, gathered while the last batch is being written, go to the database in one statement a kind.

While the database is away they are kept, and written, fenced, when it is back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import psycopg

from pgqueue import finish
from pgqueue.claim import Claimed
from pgqueue.db import Connection
from pgqueue.finish import Cancelled, Completed, Failed, Snoozed
from pgqueue.job import Lease
from pgqueue.log import say
from pgqueue.worker.link import Link

logger = logging.getLogger("pgqueue.worker")

BATCH = 1000
FULL = 5000
"""With so many outcomes unwritten, no more jobs are claimed."""

Outcome = Completed | Failed | Cancelled | Snoozed | Lease


class Finisher:
    def __init__(self, link: Link, due_in: Callable[[float], None]) -> None:
        self.link = link
        self.due_in = due_in
        """Told how soon a job is due that this worker put off."""
        self.outcomes: list[tuple[Outcome, Claimed]] = []
        self.writing: list[tuple[Outcome, Claimed]] = []
        self.completed = 0
        self.failed = 0
        self.lost = 0
        self._something = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._stop = False

    def put(self, outcome: Outcome, job: Claimed) -> None:
        self.outcomes.append((outcome, job))
        if not self._something.is_set():
            self._something.set()

    def __len__(self) -> int:
        return len(self.outcomes) + len(self.writing)

    def ids(self) -> set[int]:
        return {job.id for _, job in self.outcomes} | {job.id for _, job in self.writing}

    def stop(self) -> None:
        """End when everything is written."""
        self._stop = True
        self._something.set()

    async def room(self) -> None:
        """Back-pressure: waits until the unwritten outcomes are few enough."""
        if len(self) >= FULL:
            self._room.clear()
            await self._room.wait()

    async def run(self) -> None:
        while True:
            await self._something.wait()
            self._something.clear()
            while self.outcomes:
                self.writing, self.outcomes = self.outcomes[:BATCH], self.outcomes[BATCH:]
                await self._write()
                if len(self) < FULL:
                    self._room.set()
            if self._stop:
                return

    async def _write(self) -> None:
        unsure = False
        while self.writing:
            try:
                conn = await self.link.get()
                await self._send(conn, unsure)
                self.writing = []
            except (psycopg.Error, OSError) as error:
                # Whether the last statement took effect is unknown. The token decides: nothing can be ended twice.
                unsure = True
                await self.link.failed(error, f"keeping {len(self)} finished jobs until the database is back")

    async def _send(self, conn: Connection, unsure: bool) -> None:
        kinds: dict[type[Outcome], list[tuple[Outcome, Claimed]]] = {}
        for entry in self.writing:
            kinds.setdefault(type(entry[0]), []).append(entry)
        for kind, entries in kinds.items():
            done = await self._send_kind(conn, kind, [outcome for outcome, _ in entries])
            missing = [entry for entry in entries if entry[0].id not in done]
            if missing and unsure:
                done |= await finish.ended(conn, [outcome for outcome, _ in missing])
            if kind is Completed:
                self.completed += len(done)
            if logger.isEnabledFor(logging.INFO) or missing:
                self._tell(entries, done)
            # A batch of another kind may fail: what is written is not written again.
            self.writing = [entry for entry in self.writing if type(entry[0]) is not kind]

    async def _send_kind(self, conn: Connection, kind: type[Outcome], outcomes: list[Outcome]) -> set[int]:
        if kind is Completed:
            return await finish.complete(conn, [one for one in outcomes if isinstance(one, Completed)])
        if kind is Failed:
            fates = await finish.fail(conn, [one for one in outcomes if isinstance(one, Failed)])
            self.failed += len(fates)
            for fate in fates.values():
                if fate.delay is not None:
                    self.due_in(fate.delay)
            return set(fates)
        if kind is Cancelled:
            return await finish.cancel(conn, [one for one in outcomes if isinstance(one, Cancelled)])
        if kind is Snoozed:
            snoozes = [one for one in outcomes if isinstance(one, Snoozed)]
            for one in snoozes:
                self.due_in(one.delay)
            return await finish.snooze(conn, snoozes)
        return await finish.release(conn, outcomes)

    def _tell(self, entries: list[tuple[Outcome, Claimed]], done: set[int]) -> None:
        for outcome, job in entries:
            fields = {"job": job.id, "type": job.type, "queue": job.queue, "attempt": job.attempt + 1}
            if job.id not in done:
                self.lost += 1
                text = f"dropped the result of job {job.id} {job.type}: its lease is lost"
                say(logger, logging.WARNING, "job.lease_lost", text, **fields)
            elif isinstance(outcome, Completed):
                seconds = round(outcome.ended - outcome.started, 6)
                text = f"completed job {job.id} {job.type} in {seconds:.3f} s"
                say(logger, logging.INFO, "job.completed", text, seconds=seconds, **fields)
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
