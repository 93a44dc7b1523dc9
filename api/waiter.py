"""Waiting for jobs to end: one question at a time for all who wait in this process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress

from pgqueue import read
from pgqueue.db import Connection, is_outage
from pgqueue.errors import DatabaseUnavailable
from pgqueue.log import say

logger = logging.getLogger("pgqueue.api")

PAUSE = 0.1
"""Seconds between two questions."""
AT_ONCE = 1000


class Waiter:
    def __init__(
        self, connection: Callable[[], AbstractAsyncContextManager[Connection]], stopping: asyncio.Event
    ) -> None:
        self._connection = connection
        self._stopping = stopping
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}
        self._task: asyncio.Task[None] | None = None

    async def ended(self, id: int, seconds: float) -> None:
        """Returns when the job has ended, after so many seconds, or when the process is to end."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(id, []).append(future)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="waiter")
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await future
        finally:
            futures = self._waiting.get(id, [])
            if future in futures:
                futures.remove(future)
            if not futures:
                self._waiting.pop(id, None)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while self._waiting and not self._stopping.is_set():
            try:
                await self.run_once()
            except Exception as error:
                if not isinstance(error, DatabaseUnavailable) and not is_outage(error):
                    say(logger, logging.ERROR, "api.waiter", f"{type(error).__name__} while jobs are waited for")
                await asyncio.sleep(1)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), PAUSE)
        for id in list(self._waiting):
            self._wake(id)

    async def run_once(self) -> None:
        ids = list(self._waiting)
        for start in range(0, len(ids), AT_ONCE):
            some = ids[start : start + AT_ONCE]
            async with self._connection() as conn:
                live = await read.still_live(conn, some)
            for id in some:
                if id not in live:
                    self._wake(id)

    def _wake(self, id: int) -> None:
        for future in self._waiting.pop(id, []):
            if not future.done():
                future.set_result(None)
