"""How long the machine itself stood still: what a job waits for then is not the queue's doing."""

import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from operator import itemgetter

import psycopg

EVERY = 0.02
USUAL = 0.01
"""Seconds that a round may take longer than that, anywhere."""
LOOK = "SELECT 1"
"""Of no table: whoever waits for a lock of ours must not count as a stall."""


class Stalls:
    """Sends a small statement every 20 ms, as somebody would who polls without a break, and notes whenever it took
    longer: its process was not scheduled, or PostgreSQL was not."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.seen: list[tuple[float, float]] = []
        """From when to when, in seconds since 1970."""
        self._stop = threading.Event()

    @contextmanager
    def noted(self) -> Iterator["Stalls"]:
        thread = threading.Thread(target=self._run, name="stalls", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            thread.join(10)

    def within(self, begin: float, end: float) -> float:
        """Seconds of this stretch of time for which it stood still."""
        seconds = 0.0
        for since, to in islice(self.seen, bisect_left(self.seen, begin, key=itemgetter(1)), None):
            if since >= end:
                break
            seconds += min(end, to) - max(begin, since)
        return seconds

    @property
    def longest(self) -> float:
        return max((to - since for since, to in self.seen), default=0.0)

    @property
    def total(self) -> float:
        return sum(to - since for since, to in self.seen)

    def _run(self) -> None:
        while not self._stop.is_set():
            # A server that is restarted on purpose does not stand still.
            with suppress(psycopg.OperationalError), psycopg.connect(self.dsn, autocommit=True) as conn:
                while not self._stop.is_set():
                    self._round(conn)
            self._stop.wait(0.1)

    def _round(self, conn: psycopg.Connection) -> None:
        started = time.monotonic()
        time.sleep(EVERY)
        conn.execute(LOOK)
        late = time.monotonic() - started - EVERY
        if late > USUAL:
            now = time.time()
            self.seen.append((now - late, now))
