"""Sees from a thread of its own whether the event loop turns.

A coroutine that does not give the loop back (time.sleep, a request without a timeout) keeps all other jobs of its
worker waiting, its own timeout from being applied and signals from being heard, while the heartbeat keeps their leases.
It is told of. Past its timeout, or past the grace of a worker that is to stop, it is interrupted where it stands. If it
does not heed that, the worker ends, as in a crash: its jobs run elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
import traceback
from types import FrameType

from pgqueue.log import say
from pgqueue.outcome import JobAbandoned, JobTimeout
from pgqueue.worker.attempt import Attempt, call_handler

logger = logging.getLogger("pgqueue.worker")

LOOK_EVERY = 0.5
STANDS_STILL = 2.0
"""Seconds after which a loop is not just busy."""
TELL_AFTER = 5.0
PATIENCE = 5.0
"""Seconds from the first interruption to the end of the worker."""
SIGNAL = signal.SIGUSR2

Interruption = JobTimeout | JobAbandoned


class Watchdog:
    def __init__(self, loop: asyncio.AbstractEventLoop, running: dict[int, Attempt]) -> None:
        self.loop = loop
        self.running = running
        self.stop_by: float | None = None
        """When jobs must have ended, because the worker is to stop …"""
        self.end_by = float("inf")
        """… and when the worker must have."""
        self._turned = threading.Event()
        self._turned.set()
        self._asked: tuple[Attempt, Interruption] | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """From the thread of the loop, which is the main thread: signals are handled there."""
        self._loop_thread = threading.get_ident()
        signal.signal(SIGNAL, self._interrupt)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        # Counted in looks, not read from a clock: a process that was frozen does not find its loop guilty.
        still = overdue = 0.0
        while not self._over.wait(LOOK_EVERY):
            if self._turned.is_set():
                still = overdue = 0.0
                self._turned.clear()
                self.loop.call_soon_threadsafe(self._turned.set)
                continue
            still += LOOK_EVERY
            if still < STANDS_STILL:
                continue
            one = self._culprit()
            if still == TELL_AFTER:
                self._tell(
                    logging.WARNING, "loop.blocked", one, f"has stood still for {still:g} s, and all jobs with it"
                )
            if (why := self._why(one)) is None:
                continue
            if overdue >= PATIENCE or time.monotonic() >= self.end_by:
                self._end(one)
            overdue += LOOK_EVERY
            if one is not None:
                self._asked = one, why
                signal.pthread_kill(self._loop_thread, SIGNAL)

    def _culprit(self) -> Attempt | None:
        """The job whose coroutine has the loop; None if it is a task that a handler made."""
        task = asyncio.current_task(self.loop)
        return next((one for one in list(self.running.values()) if one.task is task), None)

    def _why(self, one: Attempt | None) -> Interruption | None:
        now = time.monotonic()
        if self.stop_by is not None and now > self.stop_by:
            return JobAbandoned("the worker stops")
        # A task of nobody's may be any job's; one without a timeout may take as long as it likes.
        for each in list(self.running.values()) if one is None else [one]:
            if each.on_stop is None and each.ctx.deadline is not None and now > each.ctx.deadline:
                text = f"the attempt ran over its timeout of {each.ctx.timeout:g} s, and blocked the event loop"
                return JobTimeout(f"{text} in {self._where()}")
        return None

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """In the thread of the loop, between two steps of whatever runs there."""
        asked, self._asked = self._asked, None
        if asked is None:
            return
        one, why = asked
        # It may have moved on meanwhile; and outside of the handler nobody expects this.
        if one is self._culprit() and any(code is call_handler.__code__ for code in codes(frame)):
            one.interrupted = True
            raise why

    def _tell(self, level: int, event: str, one: Attempt | None, what: str) -> threading.Thread:
        """In a thread: the loop may stand still because nobody reads what is logged."""
        who = f"job {one.job.id} {one.job.type}" if one is not None else "a task of some handler"
        text = f"the event loop {what}: {who} does not give it back, in {self._where()}"
        text += "; what blocks belongs into `await asyncio.to_thread(…)` or a handler that is not async"
        fields = {"job": one.job.id if one is not None else None}
        words = threading.Thread(target=say, args=(logger, level, event, text), kwargs=fields, daemon=True)
        words.start()
        return words

    def _where(self) -> str:
        places = traceback.extract_stack(sys._current_frames()[self._loop_thread])[-3:]
        return ", called by ".join(f"{place.name} ({place.filename}:{place.lineno})" for place in reversed(places))

    def _end(self, one: Attempt | None) -> None:
        self._tell(logging.CRITICAL, "worker.stuck", one, "stands still, and this worker ends").join(1)
        os._exit(1)


def codes(frame: FrameType | None) -> list[object]:
    """Of all functions that are being called."""
    found: list[object] = []
    while frame is not None:
        found.append(frame.f_code)
        frame = frame.f_back
    return found
