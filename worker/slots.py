"""The slots of a worker and the claimed jobs that wait for one.

A job takes as many slots as it demands, all at once. Smaller jobs may pass a big one that waits for slots, until it has
waited for PASS_FOR seconds: then freed slots are kept for it. A suspect, which was lost with two workers before, does
not run beside another suspect: should it kill this worker too, only it is to blame.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from pgqueue.claim import Claimed

PASS_FOR = 5.0


class Slots:
    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.free = threads
        self.small: deque[tuple[Claimed, str]] = deque()
        self.big: deque[tuple[Claimed, str, float]] = deque()
        self.suspects: deque[tuple[Claimed, str, float]] = deque()
        self.suspect_runs = False
        self._suspect_since = 0.0
        self.moved = time.monotonic()
        """When a job last came here or was started."""
        self._sleepers: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        """The jobs that wait here."""
        return len(self.small) + len(self.big) + len(self.suspects)

    @property
    def used(self) -> int:
        return self.threads - self.free

    @property
    def room(self) -> int:
        """How many more jobs could start at once. The first big one that waits does not count: it may be passed, until
        slots are kept for it."""
        free = 0 if self._kept() or self._kept_for_suspect() else self.free
        return free - len(self.small) - len(self.suspects) - max(0, len(self.big) - 1)

    def demand(self, job: Claimed) -> int:
        """What it gets: a demand that no worker can meet runs with one slot."""
        return job.thread_demand if job.thread_demand <= self.threads else 1

    def offer(self, jobs: Iterable[Claimed], lease_token: str) -> None:
        self.moved = time.monotonic()
        for job in jobs:
            if job.suspect:
                self.suspects.append((job, lease_token, time.monotonic()))
            elif job.thread_demand > 1 and self.demand(job) > 1:
                self.big.append((job, lease_token, time.monotonic()))
            else:
                self.small.append((job, lease_token))
        self._wake(min(len(self), self.free))

    def take(self) -> tuple[Claimed, str, int] | None:
        """The next job that fits into the free slots, which are then its own."""
        if not self.free:
            return None
        if self.suspects and not self.suspect_runs and self.demand(self.suspects[0][0]) <= self.free:
            job, token, _ = self.suspects.popleft()
            self.suspect_runs = True
            self._suspect_since = time.monotonic()
            return self._use(job, token)
        if self._kept_for_suspect():
            return None
        if self.big:
            job, token, _ = self.big[0]
            if self.demand(job) <= self.free and not (self.small and self.small[0][0].priority > job.priority):
                self.big.popleft()
                return self._use(job, token)
            if self._kept():
                return None
        if self.small:
            job, token = self.small.popleft()
            self.free -= 1
            return job, token, 1
        return None

    def give_back(self, job: Claimed, slots: int) -> None:
        self.free += slots
        if job.suspect:
            self.suspect_runs = False
        if slots > 1 or self.big or self.suspects:
            self._wake(self.free)

    def clear(self, *, big: bool = True) -> list[tuple[Claimed, str]]:
        """Takes out the waiting jobs, all of them or all but the big ones, which would lose the time that they have
        waited; answers with the jobs and their tokens."""
        waiting = [*((job, token) for job, token, _ in self.suspects), *self.small]
        self.small.clear()
        self.suspects.clear()
        if big:
            waiting += [(job, token) for job, token, _ in self.big]
            self.big.clear()
        return waiting

    def remove(self, ids: set[int]) -> list[tuple[Claimed, str]]:
        """Takes out those of them that wait."""
        gone = [(entry[0], entry[1]) for queue in self._queues() for entry in queue if entry[0].id in ids]
        for queue in self._queues() if gone else ():
            kept = [entry for entry in queue if entry[0].id not in ids]
            queue.clear()
            queue.extend(kept)
        return gone

    def waiting_ids(self) -> set[int]:
        return {entry[0].id for queue in self._queues() for entry in queue}

    def _queues(self) -> tuple[deque[Any], ...]:
        return self.small, self.big, self.suspects

    async def something_to_do(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._sleepers.append(future)
        await future

    def _kept(self) -> bool:
        """Whether the first big one has waited for so long that what gets free is its own."""
        return bool(self.big) and time.monotonic() - self.big[0][2] > PASS_FOR

    def _kept_for_suspect(self) -> bool:
        """Whether the first suspect, which may be big, has waited for so long."""
        return bool(self.suspects) and not self.suspect_runs and time.monotonic() - self.suspects[0][2] > PASS_FOR

    def suspects_wait(self) -> float:
        """For how long a suspect has waited for the one that runs."""
        if not self.suspects or not self.suspect_runs:
            return 0.0
        return time.monotonic() - max(self.suspects[0][2], self._suspect_since)

    def _use(self, job: Claimed, token: str) -> tuple[Claimed, str, int]:
        slots = self.demand(job)
        self.free -= slots
        return job, token, slots

    def _wake(self, count: int) -> None:
        while count > 0 and self._sleepers:
            future = self._sleepers.popleft()
            if not future.done():
                future.set_result(None)
                count -= 1
