"""The whole worker: drain beside a bare SQL loop, latency, scheduled lateness, the cost of idling, memory.

python -m tests.bench.worker
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from pgqueue import claim, finish
from pgqueue.db import connect
from pgqueue.embedded import PostgresServer
from tests.bench.common import (
    Drain,
    alternate,
    benchmark_server,
    completed,
    database,
    print_json,
    print_table,
    spread,
)

EMPTY = "SELECT NOT EXISTS (SELECT FROM pgqueue.jobs_live)"


def run(
    server: PostgresServer,
    *,
    jobs: int = 100_000,
    rounds: int = 3,
    samples: int = 500,
    seconds: float = 10,
    memory: int = 1_000_000,
) -> dict[str, Any]:
    with database(server) as dsn:
        figures: dict[str, Any] = {"jobs_per_second": drains(dsn, jobs, rounds)}
        with worker(dsn) as process:
            times = {
                "commit to handler, idle worker": latency(dsn, samples, pause=0.02),
                "commit to handler, about 700/s": latency(dsn, samples * 4, pause=0.001),
                "scheduled jobs, late by": lateness(dsn, samples),
            }
            figures |= {name: percentiles(values) for name, values in times.items()}
            figures |= idling(dsn, process, seconds)
        figures["memory_mb"] = sizes(dsn, memory)
    head = ["milliseconds", "p50", "p95", "p99", "max"]
    print_table("latency", head, [[name, *(f"{figures[name][key]:.1f}" for key in head[1:])] for name in times])
    idle = f"{figures['idle_statements_per_second']:.1f} statements/s, {figures['idle_cpu']:.2%} of a core"
    print(
        f"\nidle worker: {idle}\nmemory over {memory:,} jobs: {' → '.join(f'{x:.0f}' for x in figures['memory_mb'])} MB"
    )
    print_json("worker", figures)
    return figures


@contextmanager
def worker(dsn: str, processes: int = 1) -> Iterator[subprocess.Popen[bytes]]:
    """A worker that has gone to sleep."""
    command = [sys.executable, "-m", "pgqueue", "worker", "--app", "tests.bench.handlers", "--log-level", "warning"]
    process = subprocess.Popen([*command, "--processes", str(processes)], env=os.environ | {"DATABASE_URL": dsn})
    try:
        with psycopg.connect(dsn, autocommit=True) as conn:
            asleep = "SELECT count(*) = %s FROM pgqueue.workers WHERE listening AND idle_since IS NOT NULL"
            wait_for(lambda: one(conn, asleep, processes))
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def drains(dsn: str, jobs: int, rounds: int) -> dict[str, list[float]]:
    rates = alternate(
        rounds,
        {
            "bare SQL loop": lambda: jobs / bare(dsn, jobs),
            "one process": lambda: jobs / drained(dsn, jobs, 1),
            "two processes": lambda: jobs / drained(dsn, jobs, 2),
        },
    )
    floor = statistics.median(rates["bare SQL loop"])
    rows = [[name, spread(all), f"{statistics.median(all) / floor:.2f}"] for name, all in rates.items()]
    print_table(f"{jobs:,} no-op jobs, analysed", ["drained by", "jobs/s", "of the bare loop"], rows)
    return rates


def fill(dsn: str, jobs: int) -> None:
    """They wait in a paused queue, so that the workers can be up before the clock starts."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("TRUNCATE pgqueue.jobs_live, pgqueue.jobs_finished")
        conn.execute("SELECT pgqueue.pause_queue('default')")
        conn.execute("INSERT INTO pgqueue.jobs (type) SELECT 'noop' FROM generate_series(1, %s)", [jobs])
        conn.execute("ANALYZE pgqueue.jobs_live")
        conn.execute("CHECKPOINT")


def drained(dsn: str, jobs: int, processes: int) -> float:
    fill(dsn, jobs)
    with worker(dsn, processes), psycopg.connect(dsn, autocommit=True) as conn:
        started = time.monotonic()
        conn.execute("SELECT pgqueue.resume_queue('default')")
        wait_for(lambda: one(conn, EMPTY), every=0.05)
        seconds = time.monotonic() - started
        assert one(conn, "SELECT count(*) FROM pgqueue.jobs_finished") == jobs
    return seconds


def bare(dsn: str, jobs: int) -> float:
    """Claim and finish, no handlers: two connections, one for each, at the same time."""
    fill(dsn, jobs)
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("SELECT pgqueue.resume_queue('default')")
    return asyncio.run(_bare(dsn, jobs))


async def _bare(dsn: str, jobs: int) -> float:
    claims: asyncio.Queue[claim.Claim] = asyncio.Queue(maxsize=2)
    drain = Drain(dsn)
    await drain.open()
    second = await connect(dsn)

    async def claiming() -> None:
        while (taken := await drain.claim()).jobs:
            await claims.put(taken)
        await claims.put(taken)

    async def finishing() -> None:
        while (taken := await claims.get()).jobs:
            assert len(await finish.complete(second, completed(taken))) == len(taken.jobs)

    started = time.monotonic()
    await asyncio.gather(claiming(), finishing())
    seconds = time.monotonic() - started
    await drain.close()
    await second.close()
    return seconds


def latency(dsn: str, samples: int, *, pause: float) -> list[float]:
    """From the return of COMMIT to the first line of the handler, in seconds."""
    committed: dict[int, float] = {}
    with psycopg.connect(dsn, autocommit=True) as conn:
        for _ in range(samples):
            id = one(conn, "INSERT INTO pgqueue.jobs (type) VALUES ('stamp') RETURNING id")
            committed[id] = time.time()
            time.sleep(pause * random.uniform(0.5, 1.5))
        wait_for(lambda: one(conn, EMPTY))
        rows = conn.execute("SELECT id, result::float8 FROM pgqueue.jobs_finished WHERE type = 'stamp'").fetchall()
    return [at - committed[id] for id, at in rows if id in committed]


def lateness(dsn: str, samples: int) -> list[float]:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("TRUNCATE pgqueue.jobs_finished")
        conn.execute(
            "INSERT INTO pgqueue.jobs (type, run_at)"
            " SELECT 'stamp', now() + interval '0.1 s' + random() * interval '5 s' FROM generate_series(1, %s)",
            [samples],
        )
        wait_for(lambda: one(conn, EMPTY))
        late = "SELECT result::float8 - extract(epoch FROM run_at)::float8 FROM pgqueue.jobs_finished"
        return [seconds for (seconds,) in conn.execute(late).fetchall()]


def idling(dsn: str, process: subprocess.Popen[bytes], seconds: float) -> dict[str, float]:
    calls = "SELECT coalesce(sum(calls), 0)::float8 FROM pg_stat_statements"
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
        time.sleep(min(2, seconds))
        try:
            before = one(conn, calls)
        except psycopg.errors.ObjectNotInPrerequisiteState:
            return {"idle_statements_per_second": float("nan"), "idle_cpu": float("nan")}  # it was not preloaded
        cpu = cpu_seconds(process.pid)
        time.sleep(seconds)
        # The first count is one of the calls itself.
        statements = (one(conn, calls) - before - 1) / seconds
    return {"idle_statements_per_second": statements, "idle_cpu": (cpu_seconds(process.pid) - cpu) / seconds}


def sizes(dsn: str, jobs: int) -> list[float]:
    """The worker's memory: at first, and after each quarter of the jobs."""
    with worker(dsn) as process, psycopg.connect(dsn, autocommit=True) as conn:
        figures = [resident_mb(process.pid)]
        for _ in range(4):
            conn.execute("INSERT INTO pgqueue.jobs (type) SELECT 'noop' FROM generate_series(1, %s)", [jobs // 4])
            wait_for(lambda: one(conn, EMPTY), every=0.2)
            figures.append(resident_mb(process.pid))
    return figures


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(seconds, n=100)
    return {
        key: value * 1000 for key, value in zip(("p50", "p95", "p99"), (cuts[49], cuts[94], cuts[98]), strict=True)
    } | {"max": max(seconds) * 1000}


def one(conn: psycopg.Connection[Any], query: str, *parameters: Any) -> Any:
    row = conn.execute(query.encode(), parameters or None).fetchone()
    return row[0] if row else None


def wait_for(condition: Callable[[], Any], *, every: float = 0.02, timeout: float = 300) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(every)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS"))) / 1024


if __name__ == "__main__":
    with benchmark_server() as bench:
        run(bench)
