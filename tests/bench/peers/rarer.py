"""What only the full run measures: a held snapshot, many inserters, a backlog, a killed worker, what features cost."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import pairwise

import psycopg

from pgqueue.embedded import find_postgres
from tests.bench.peers.measures import Figures, drain
from tests.bench.peers.peer import InPostgres
from tests.bench.peers.site import PATIENCE, Site, TooSlow, Workers

PARTS = 10
AT_ONCE = 250_000
FEATURES = {
    "plain": ("noop", 1),
    "with a result": ("result", 1),
    "with a step": ("step", 40),
    "in a transaction": ("transaction", 40),
    "at most once": ("at_most_once", 40),
}
"""Of ours: what is measured, the type of its jobs, and how many times fewer there are, as each has its own commits."""


def store(site: Site) -> InPostgres:
    assert isinstance(site.peer.store, InPostgres)
    return site.peer.store


def held(site: Site, jobs: int) -> list[float]:
    """Jobs per second in each tenth of the drain while somebody holds a snapshot from before the first claim on."""
    site.clear()
    site.part = max(1, jobs // PARTS)
    with psycopg.connect(site.dsn) as holder:
        holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        holder.execute("SELECT 1")
        with site.working() as workers, site.filled("count", site.part * PARTS) as reveal:
            reveal()
            started = time.time()
            site.wait(site.empty, time.monotonic() + PATIENCE, workers)
    times = [started, *(float(line.split()[1]) for line in site.counts.read_text().splitlines())]
    return [site.part / max(end - start, 1e-6) for start, end in pairwise(times)]


def inserters(site: Site, clients: int, seconds: int, *, busy: bool) -> float:
    """Single-row transactions per second of so many clients, while a worker runs what it can or has no slot free."""
    site.clear()
    with site.working() as workers:
        if busy:
            _occupy(site, workers)
        return _pgbench(site, clients, seconds)


def _occupy(site: Site, workers: Workers) -> None:
    slots = site.peer.slots
    assert slots is not None
    first = site.numbers(slots)
    site.produce("hold", slots, first)
    site.wait(lambda: len(site.starts(first, first + slots)) == slots, time.monotonic() + PATIENCE, workers)


def _pgbench(site: Site, clients: int, seconds: int) -> float:
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as script:
        script.write(f"{store(site).insert};\n")
        script.flush()
        command = [str(find_postgres() / "pgbench"), "--no-vacuum", "--file", script.name, "--client", str(clients)]
        command += ["--jobs", "2", "--time", str(seconds), site.dsn]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"tps = ([\d.]+)", output)
    if found is None:
        raise RuntimeError(f"pgbench said {output!r}")
    return float(found[1])


def backlog(site: Site, jobs: int, seconds: float) -> Figures:
    """What a worker does beside so many pending and as many scheduled jobs: its rate, and what its claims take."""
    site.clear()
    _pile(site, jobs)
    site.part = 100
    with psycopg.connect(site.dsn, autocommit=True) as conn, site.started() as workers:
        conn.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
        deadline = time.monotonic() + PATIENCE
        site.wait(lambda: site.counts.exists(), deadline, workers)
        conn.execute("SELECT pg_stat_statements_reset()")
        before = len(site.counts.read_text().splitlines())
        time.sleep(seconds)
        done = (len(site.counts.read_text().splitlines()) - before) * site.part
        row = conn.execute(
            "SELECT sum(calls), sum(total_exec_time), sum(rows) FROM pg_stat_statements"
            " WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database()) AND query ILIKE %s",
            [f"%{store(site).claim}%"],
        ).fetchone()
    site.clear()
    calls, spent, _ = row if row and row[0] else (0, 0, 0)
    return {"jobs": jobs, "jobs/s": done / seconds, "ms a claim": float(spent) / float(calls) if calls else None}


def _pile(site: Site, jobs: int) -> None:
    with psycopg.connect(site.dsn, autocommit=True) as conn:
        if store(site).bare:
            conn.execute("SET session_replication_role = replica")
        for statement in (store(site).fill, store(site).backlog):
            for start in range(0, jobs, AT_ONCE):
                conn.execute(statement.encode(), {"job": "count", "jobs": min(AT_ONCE, jobs - start)})
        conn.execute(f"VACUUM (ANALYZE) {store(site).tables.split(',')[0]}".encode())
        conn.execute("CHECKPOINT")


def recovery(site: Site, limit: float) -> float | None:
    """Seconds from kill -9 of a worker to the moment another one starts its job again; None: not within the limit."""
    site.clear()
    number = site.numbers(1)
    with site.started() as workers:
        site.produce("hold", 1, number)
        site.wait(lambda: number in site.starts(), time.monotonic() + PATIENCE, workers)
        first = site.starts()[number]
        killed = time.time()
        workers.kill()
    with site.started() as workers:
        try:
            site.wait(lambda: site.starts()[number] != first, time.monotonic() + limit, workers)
        except TooSlow:
            return None
        return site.starts()[number][0] - killed


def recoveries(all: list[Site], limit: float) -> dict[str, float | Exception | None]:
    """All of them at the same time: it is mostly waiting."""

    def one(site: Site) -> float | Exception | None:
        try:
            return recovery(site, limit)
        except Exception as error:
            return error

    with ThreadPoolExecutor(max(1, len(all))) as pool:
        return dict(zip((site.peer.name for site in all), pool.map(one, all), strict=True))


def features(site: Site, jobs: int) -> dict[str, Figures]:
    """Drains of ours with what jobs may have switched on."""
    found = {}
    for name, (job, fewer) in FEATURES.items():
        site.clear()
        with site.working() as workers:
            found[name] = drain(site, workers, max(1, jobs // fewer), job)
    site.clear()
    with site.working() as workers, keyed(site):
        found["with idempotency keys"] = drain(site, workers, jobs)
    return found


@contextmanager
def keyed(site: Site) -> Iterator[None]:
    """Every job that is filled in gets a key of its own."""
    with ExitStack() as stack:
        default = "ALTER TABLE pgqueue.jobs ALTER idempotency_key SET DEFAULT gen_random_uuid()::text"
        site.conn.execute(default)
        stack.callback(site.conn.execute, "ALTER TABLE pgqueue.jobs ALTER idempotency_key DROP DEFAULT")
        yield
