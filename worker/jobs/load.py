"""Work to keep a worker busy: cpu_intensive, io_intensive, mixed_workload, `default`. They take any payload."""

import asyncio
import hashlib
import os
import random
import tempfile
from typing import Any

from pgqueue import Context, GiveUp
from pgqueue.worker.jobs.base import app, member, number, refuse_invalid

SPEEDS = {"fast": (0.1, 1.0), "medium": (1.0, 10.0), "slow": (10.0, 50.0)}
LONGEST_SLEEP = 24 * 60 * 60


@app.job(executor="process")
def cpu_intensive(ctx: Context, payload: Any = None) -> dict[str, Any]:
    """{"rounds": 5000} sets the number of hashes."""
    refuse_invalid(payload)
    return {"message": _hash(ctx, payload)}


@app.job(executor="thread")
def io_intensive(ctx: Context, payload: Any = None) -> dict[str, Any]:
    """{"lines": 1000} sets the size of the file."""
    refuse_invalid(payload)
    return {"message": _write_and_read(ctx, payload)}


@app.job(executor="process")
def mixed_workload(ctx: Context, payload: Any = None) -> dict[str, Any]:
    """cpu_intensive, then io_intensive."""
    refuse_invalid(payload)
    hashed, processed = _hash(ctx, payload), _write_and_read(ctx, payload)
    return {"message": f"Mixed work: CPU work: {hashed} | IO work: {processed}"}


@app.job(name="default")
async def sleep(ctx: Context, payload: Any = None) -> dict[str, Any]:
    """{"seconds": 2.5} sets how long, {"speed": "fast"}, "medium" or "slow" about how long."""
    return await _sleep(payload)


@app.job(name="test_job")
async def sleep_too(ctx: Context, payload: Any = None) -> dict[str, Any]:
    """`default` under another name."""
    return await _sleep(payload)


def _hash(ctx: Context, payload: Any) -> str:
    rounds = number(payload, "rounds", (5_000, 15_000), 10_000_000)
    data, digest = b"pgqueue cpu work " * 10_000, b""
    for done in range(rounds):
        digest = hashlib.sha256(data + digest).digest()
        if done % 100 == 0:
            ctx.check()
            ctx.progress(done, rounds)
    return f"Computed {rounds} hashes"


def _write_and_read(ctx: Context, payload: Any) -> str:
    lines = number(payload, "lines", (1_000, 9_999), 1_000_000)
    with tempfile.NamedTemporaryFile(
        "w+", prefix="pgqueue_job_", suffix=".txt", encoding="utf-8", delete=False
    ) as file:
        # The name goes at once and the data with the handle: nothing stays, even if this process is killed.
        os.unlink(file.name)
        for line in range(lines):
            file.write(f"Line {line}: data for the I/O work of job {ctx.id}\n")
            if line % 1_000 == 0:
                ctx.check()
        file.flush()
        os.fsync(file.fileno())
        file.seek(0)
        found = sum(1 for _ in file)
    if found != lines:
        raise OSError(f"wrote {lines} lines to {file.name} and read {found}")
    return f"Processed {found} lines from file: {file.name}"


async def _sleep(payload: Any) -> dict[str, Any]:
    refuse_invalid(payload)
    seconds, speed = member(payload, "seconds"), member(payload, "speed")
    if seconds is None:
        speed = "fast" if speed is None else speed
        if not isinstance(speed, str) or speed not in SPEEDS:
            raise GiveUp(f"speed must be one of {', '.join(SPEEDS)}")
        seconds = random.uniform(*SPEEDS[speed])
    elif isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= LONGEST_SLEEP:
        raise GiveUp(f"seconds must be a number from 0 to {LONGEST_SLEEP}")
    await asyncio.sleep(seconds)
    return {"message": f"{speed or 'timed'} task completed in {seconds:.2f} s"}
