"""A worker inside the test's own process, whose parts the test can reach."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from pgqueue.app import PgQueue
from pgqueue.settings import Settings
from pgqueue.worker.runtime import Runtime

QUICK: dict[str, Any] = {
    "lease_timeout": 30.0,
    "heartbeat_interval": 1.0,
    "poll_interval": 0.1,
    "rescue_interval": 0.1,
    "shutdown_grace": 0.0,
}


@asynccontextmanager
async def worker_inside(
    app: PgQueue, dsn: str, *, handlers_dsn: str | None = None, threads: int = 4, **settings: Any
) -> AsyncIterator[Runtime]:
    """`handlers_dsn` is for the connections of its handlers alone: through a proxy, or with other settings."""
    runtime = Runtime(app, dsn, Settings(database_url=dsn, **QUICK | settings), threads=threads)
    if handlers_dsn is not None:
        runtime.host.dsn = handlers_dsn
    task = asyncio.create_task(runtime.run())
    await asyncio.sleep(0)  # now it has its parts
    try:
        yield runtime
    finally:
        runtime.stop()
        await task
        # What it had no more time for when the machine was busy. Otherwise it ends with its process.
        for part in (runtime.claimer, runtime.scout, runtime.finisher, runtime.janitor):
            await part.link.close()
        for pool in runtime.host._pools.values():
            await pool.close()
        await runtime.once.close()
