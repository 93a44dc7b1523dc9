"""The whole worker: drain beside a bare SQL loop, latency, scheduled lateness, cost of idling, memory.

python -m tests.bench.worker [--jobs 100000] [--rounds 3] [--memory 1000000]
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg

from pgqueue import claim, finish, migrate
from pgqueue.claim import Claimant, Lanes
from pgqueue.db import connect
from pgqueue.embedded import start_postgres

BATCH = 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--memory", type=int, default=0)
    arguments = parser.parse_args()
    with database() as dsn:
        figures = drains(dsn, arguments.jobs, arguments.rounds)
        with worker(dsn) as process:
            figures |= latency(dsn, arguments.samples, pause=0.02, name="idle")
            figures |= latency(dsn, arguments.samples * 4, pause=0.001, name="at about 1,000/s")
            figures |= lateness(dsn, arguments.samples)
            figures |= idling(dsn, process, arguments.seconds)
        if arguments.memory:
            figures |= memory(dsn, arguments.memory)
    print(json.dumps({"bench": "worker", **figures}))


@contextmanager
def database() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="pgqueue-bench-") as directory:
        Path(directory).chmod(0o711)
        settings = {"shared_buffers": "512MB", "max_wal_size": "4GB", "checkpoint_timeout": "30min"}
        server = start_postgres(Path(directory), settings=settings)
        try:
            migrate.up(server.dsn)
            with psycopg.connect(server.dsn) as conn:
                shown = conn.execute(
                    "SELECT current_setting('server_version') || ', fsync ' || current_setting('fsync')"
                    " || ', synchronous_commit ' || current_setting('synchronous_commit')"
                ).fetchone()
            cpus = os.cpu_count()
            print(f"PostgreSQL {shown[0] if shown else '?'}; {cpus} cores; Python {sys.version.split()[0]}\n")
            yield server.dsn
        finally:
            server.stop()


@contextmanager
def worker(dsn: str, processes: int = 1) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-m", "pgqueue", "worker", "--app", "tests.bench.handlers", "--log-level", "warning"]
    process = subprocess.Popen([*command, "--processes", str(processes)], env=os.environ | {"DATABASE_URL": dsn})
    try:
        with psycopg.connect(dsn, autocommit=True) as conn:
            listening = "SELECT count(*) = %s FROM pgqueue.workers WHERE listening AND idle_since IS NOT NULL"
            wait_for(lambda: one(conn, listening, processes))
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def drains(dsn: str, jobs: int, rounds: int) -> dict[str, Any]:
    """Every way of draining, in turns, so that a slow minute of the machine hits all of them."""
    ways: dict[str, Callable[[], float]] = {
        "bare SQL loop": lambda: bare(dsn, jobs),
        "one process": lambda: drained(dsn, jobs, 1),
        "two processes": lambda: drained(dsn, jobs, 2),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            rates[name].append(jobs / way())
    floor = statistics.median(rates["bare SQL loop"])
    print(f"{jobs:,} no-op jobs, after ANALYZE    jobs/s (median of {rounds})   spread          of the bare loop")
    for name, measured in rates.items():
        rate = statistics.median(measured)
        print(f"  {name:<30} {rate:>12,.0f}          {min(measured):>8,.0f}–{max(measured):<8,.0f} {rate / floor:.2f}")
    return {"jobs_per_second": rates}


def fill(dsn: str, jobs: int) -> None:
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
        wait_for(lambda: not one(conn, "SELECT EXISTS (SELECT FROM pgqueue.jobs_live)"), every=0.05)
        seconds = time.monotonic() - started
        assert one(conn, "SELECT count(*) FROM pgqueue.jobs_finished") == jobs
    return seconds


def bare(dsn: str, jobs: int) -> float:
    """Claim and finish, no handlers: two connections, one for each, at the same time."""
    fill(dsn, jobs)
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("SELECT pgqueue.resume_queue('default')")
    return asyncio.run(bare_loop(dsn, jobs))


async def bare_loop(dsn: str, jobs: int) -> float:
    claims: asyncio.Queue[claim.Claim | None] = asyncio.Queue(maxsize=2)
    first, second = await connect(dsn), await connect(dsn)

    async def claiming() -> None:
        who, lanes = Claimant(uuid4(), types=["noop"]), Lanes()
        while taken := await claim.claim_next(first, who, lanes, BATCH, quick=True):
            for each in taken:
                await claims.put(each)
        await claims.put(None)

    async def finishing() -> None:
        while (taken := await claims.get()) is not None:
            now = time.monotonic()
            done = [finish.Completed(job.id, taken.lease_token, now, now, 1, None) for job in taken.jobs]
            assert len(await finish.complete(second, done)) == len(done)

    started = time.monotonic()
    await asyncio.gather(claiming(), finishing())
    seconds = time.monotonic() - started
    await first.close()
    await second.close()
    return seconds


def latency(dsn: str, samples: int, *, pause: float, name: str) -> dict[str, Any]:
    """From the return of COMMIT to the first line of the handler."""
    committed: dict[int, float] = {}
    with psycopg.connect(dsn, autocommit=True) as conn:
        for _ in range(samples):
            id = one(conn, "INSERT INTO pgqueue.jobs (type) VALUES ('stamp') RETURNING id")
            committed[id] = time.time()
            time.sleep(pause * random.uniform(0.5, 1.5))
        wait_for(lambda: not one(conn, "SELECT EXISTS (SELECT FROM pgqueue.jobs_live)"))
        rows = conn.execute("SELECT id, result::float8 FROM pgqueue.jobs_finished WHERE type = 'stamp'").fetchall()
    return percentiles(f"commit to start, {name}", [(at - committed[id]) * 1000 for id, at in rows if id in committed])


def lateness(dsn: str, samples: int) -> dict[str, Any]:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("TRUNCATE pgqueue.jobs_finished")
        conn.execute(
            "INSERT INTO pgqueue.jobs (type, run_at)"
            " SELECT 'stamp', now() + random() * interval '5 s' FROM generate_series(1, %s)",
            [samples],
        )
        wait_for(lambda: not one(conn, "SELECT EXISTS (SELECT FROM pgqueue.jobs_live)"))
        rows = conn.execute(
            "SELECT result::float8 - extract(epoch FROM run_at)::float8 FROM pgqueue.jobs_finished"
            " WHERE run_at > created_at + interval '0.1 s'"
        ).fetchall()
    return percentiles("scheduled jobs start late by", [late * 1000 for (late,) in rows])


def idling(dsn: str, process: "subprocess.Popen[bytes]", seconds: float) -> dict[str, Any]:
    """Each statement of the worker is a transaction of its own."""
    query = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
    with psycopg.connect(dsn, autocommit=True) as conn:
        time.sleep(2)
        before, cpu = one(conn, query), cpu_seconds(process.pid)
        time.sleep(seconds)
        statements = (one(conn, query) - before) / seconds
        share = (cpu_seconds(process.pid) - cpu) / seconds
    resident = resident_mb(process.pid)
    print(f"\nidle worker: {statements:.1f} statements/s, {share:.2%} of a core, {resident:.0f} MB")
    return {"idle_statements_per_second": statements, "idle_cpu": share, "resident_mb": resident}


def memory(dsn: str, jobs: int) -> dict[str, Any]:
    sizes = []
    with worker(dsn) as process, psycopg.connect(dsn, autocommit=True) as conn:
        sizes.append(resident_mb(process.pid))
        for _ in range(4):
            conn.execute("INSERT INTO pgqueue.jobs (type) SELECT 'noop' FROM generate_series(1, %s)", [jobs // 4])
            wait_for(lambda: not one(conn, "SELECT EXISTS (SELECT FROM pgqueue.jobs_live)"), every=0.2)
            sizes.append(resident_mb(process.pid))
    print(f"memory over {jobs:,} jobs: {' → '.join(f'{size:.0f}' for size in sizes)} MB")
    return {"memory_mb": sizes}


def percentiles(name: str, milliseconds: list[float]) -> dict[str, Any]:
    cuts = statistics.quantiles(milliseconds, n=100)
    figures = {"p50": cuts[49], "p95": cuts[94], "p99": cuts[98], "max": max(milliseconds)}
    print(f"\n{name}: " + ", ".join(f"{key} {value:.1f} ms" for key, value in figures.items()))
    return {name: figures}


def one(conn: "psycopg.Connection[Any]", query: str, *parameters: Any) -> Any:
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
    main()
