"""What a worker gives back, because it waits here in vain."""

import asyncio
import time

from pgqueue import PgQueue
from pgqueue.claim import Claimed
from pgqueue.settings import Settings
from pgqueue.worker.runtime import STALE_AFTER, Runtime


async def test_a_job_that_has_just_come_is_not_given_back() -> None:
    """However long the worker has been idle: its runners have had no time to take it."""
    runtime = Runtime(PgQueue("postgresql://nowhere"), "postgresql://nowhere", Settings(), threads=1)
    runtime._assemble()
    runtime.slots.moved = time.monotonic() - 60
    house = asyncio.create_task(runtime._keep_house())
    await asyncio.sleep(STALE_AFTER / 4)
    runtime.slots.offer([Claimed(1, "default", "t", "{}", 0, 1, 1, None, 5, 0, 0, None, 0.0, False)], "token")
    await asyncio.sleep(STALE_AFTER / 2)
    assert len(runtime.slots) == 1
    await asyncio.sleep(STALE_AFTER * 2)
    assert not len(runtime.slots), "now somebody else may have it"
    assert [outcome.id for outcome, _, _ in runtime.finisher.outcomes] == [1]
    house.cancel()
    await asyncio.wait([house])
