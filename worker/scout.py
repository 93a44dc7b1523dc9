"""Sweeps on a connection of its own while that is not cheap, so that no claim has to wait behind it."""

from __future__ import annotations

import asyncio

import psycopg

from pgqueue.claim import SWEEP_EVERY, scout
from pgqueue.worker.claimer import Claimer
from pgqueue.worker.link import Link


class Scout:
    def __init__(self, link: Link, claimer: Claimer) -> None:
        self.link = link
        """Open only as long as sweeps are not cheap."""
        self.claimer = claimer

    async def run(self) -> None:
        claimer = self.claimer
        while True:
            await asyncio.sleep(max(SWEEP_EVERY, claimer.lanes.pause_after_sweep()))
            if not claimer.lanes.needs_scout():
                await self.link.close()
                continue
            try:
                if await scout(await self.link.get(), claimer.who, claimer.lanes):
                    claimer.look_closer = True
                    claimer.wake.set()
            except (psycopg.Error, OSError) as error:
                await self.link.failed(error, "whoever claims sweeps, too")
