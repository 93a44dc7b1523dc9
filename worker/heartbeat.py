"""The heartbeat, in a thread of its own on a connection of its own: a blocked event loop must not cost the leases."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

from pgqueue import workers
from pgqueue.db import Connection, cut_after
from pgqueue.failpoints import failpoint
from pgqueue.log import say
from pgqueue.worker.link import Link
from pgqueue.workers import Pulse, Worker

logger = logging.getLogger("pgqueue.worker")


class Vitals:
    """What the heartbeat tells of this worker; written by the loop, read by the thread."""

    threads_used = 0
    completed = 0
    failed = 0
    listening = False


class Heartbeat:
    def __init__(
        self, dsn: str, worker: Worker, interval: float, vitals: Callable[[], Vitals], beat: Callable[[Pulse], None]
    ) -> None:
        self.worker = worker
        self.interval = interval
        self.vitals = vitals
        self.beat = beat
        self.confirmed = time.monotonic()
        """When the last heartbeat that PostgreSQL confirmed was sent: the lease holds from then."""
        # Three heartbeats in a row may be lost on the way. A very short lease allows fewer: a server needs time.
        self._patience = max((worker.lease_timeout - interval) / 4, min(1.0, worker.lease_timeout / 2))
        self._link = Link(dsn, f"pgqueue-heartbeat {worker.name}", longest_pause=min(0.5, self._patience / 4))
        self._stop = threading.Event()
        self._now = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def now(self) -> None:
        """There is news: do not wait for the next beat."""
        self._now = True

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(0.3)

    def lease_stands(self, now: float) -> bool:
        """Whether no other worker can have taken this one's jobs yet; by our clock, with a margin."""
        return now - self.confirmed < self.worker.lease_timeout * 0.9

    async def _run(self) -> None:
        while not self._stop.is_set():
            started = time.monotonic()
            try:
                async with asyncio.timeout(self._patience):
                    conn = await self._link.get()
                with cut_after(conn, self._patience):
                    await self._beat(conn)
            except Exception as error:  # whatever it is, the leases need the next beat, and sooner than usual
                await self._link.failed(error, "the heartbeat is tried again")
                continue
            while not (self._stop.is_set() or self._now) and time.monotonic() - started < self.interval:
                self._stop.wait(min(0.1, self.interval))
        await self._link.close()

    async def _beat(self, conn: Connection) -> None:
        started = time.monotonic()
        failpoint("heartbeat.before")
        self._now = False
        vitals = self.vitals()
        pulse = await workers.heartbeat(
            conn,
            self.worker,
            threads_used=vitals.threads_used,
            completed=vitals.completed,
            failed=vitals.failed,
            listening=vitals.listening,
        )
        if pulse is None:
            text = "this worker's row is gone: it registers anew"
            say(logger, logging.WARNING, "worker.unknown", text)
            await workers.register(conn, self.worker)
            self.confirmed = started
            return
        self.confirmed = started
        self.beat(pulse)
