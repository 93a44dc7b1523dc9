"""The handlers that the benchmarks run."""

import time

from pgqueue import PgQueue

app = PgQueue()


@app.job
async def noop() -> None: ...


@app.job
async def stamp() -> float:
    """When the handler started, on this machine's clock."""
    return time.time()
