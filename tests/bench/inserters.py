"""What does waking cost those who insert? 32 clients insert single rows, each in a transaction of its own.

Compared are the trigger with workers that are all busy, with workers that sleep and are woken, with the switch off, no
trigger at all, and, as a reference, one that sends a NOTIFY for every statement.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from uuid import UUID, uuid4

import psycopg

from pgqueue.embedded import PostgresServer
from pgqueue.sql import SQL
from pgqueue.workers import channel
from tests.bench.common import alternate, benchmark_server, database, print_json, print_table, spread

INSERT = "INSERT INTO pgqueue.jobs (type) VALUES ('noop')"
NAIVE = """
    CREATE OR REPLACE FUNCTION pgqueue.wake_for_inserted() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN PERFORM pg_notify('pgqueue_jobs', ''); RETURN NULL; END $$
"""
WORKERS = 4
BUSY_FOR = 0.02
"""Seconds for which a woken worker is busy before it sleeps again."""


class Sleepers:
    """Workers that listen, are busy for a while when they are woken, and sleep again."""

    def __init__(self, dsn: str, workers: list[UUID]) -> None:
        self.dsn = dsn
        self.woken = 0
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._sleep, args=[worker]) for worker in workers]

    def __enter__(self) -> Sleepers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _sleep(self, worker: UUID) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            conn.execute(f'LISTEN "{channel(worker)}"')
            while not self._stop.is_set():
                conn.execute(SQL.mark_idle, {"id": worker})
                if woken := len(list(conn.notifies(timeout=0.2, stop_after=1))):
                    conn.execute(SQL.mark_busy, {"id": worker})
                    time.sleep(BUSY_FOR)
                    woken += len(list(conn.notifies(timeout=0)))
                    with self._lock:
                        self.woken += woken
            conn.execute(SQL.mark_busy, {"id": worker})


class Site:
    """A database with some workers and one way to wake them."""

    def __init__(self, dsn: str, clients: int, seconds: float, pgbench: Path | None, *, asleep: bool = False) -> None:
        self.dsn = dsn
        self.clients = clients
        self.seconds = seconds
        self.pgbench = pgbench
        self.asleep = asleep
        self.woken: list[int] = []
        self.workers = [uuid4() for _ in range(WORKERS)]
        for worker in self.workers:
            self.execute(
                "INSERT INTO pgqueue.workers (id, name, host, pid, version, threads, listening, expires_at)"
                f" VALUES ('{worker}', 'bench', 'bench', 1, '0', 8, true, now() + interval '1 day')"
            )

    def execute(self, statement: str) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            conn.execute(statement.encode())

    def run(self) -> float:
        """Inserts per second."""
        self.execute("TRUNCATE pgqueue.jobs")
        self.execute("CHECKPOINT")
        with ExitStack() as stack:
            sleepers = stack.enter_context(Sleepers(self.dsn, self.workers)) if self.asleep else None
            rate = self._insert()
        self.woken.append(sleepers.woken if sleepers else 0)
        return rate

    def _insert(self) -> float:
        if self.pgbench is None:
            with multiprocessing.get_context("spawn").Pool(self.clients) as pool:
                return sum(pool.starmap(insert_for, [(self.dsn, self.seconds)] * self.clients)) / self.seconds
        with tempfile.NamedTemporaryFile("w", suffix=".sql") as script:
            script.write(f"{INSERT};\n")
            script.flush()
            command = [str(self.pgbench), "--no-vacuum", "--file", script.name, "--client", str(self.clients)]
            command += ["--jobs", "2", "--time", str(max(1, round(self.seconds))), self.dsn]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = re.search(r"tps = ([\d.]+)", output)
        if found is None:
            raise RuntimeError(f"pgbench said {output!r}")
        return float(found[1])


def insert_for(dsn: str, seconds: float) -> int:
    with psycopg.connect(dsn, autocommit=True) as conn:
        deadline, inserted = time.monotonic() + seconds, 0
        while time.monotonic() < deadline:
            conn.execute(INSERT)
            inserted += 1
    return inserted


@contextmanager
def sites(server: PostgresServer, clients: int, seconds: float) -> Iterator[dict[str, Site]]:
    pgbench = server.bin_dir / "pgbench"
    tool = pgbench if pgbench.exists() else None
    with ExitStack() as stack:
        made = {}
        for name in ("no trigger", "workers busy", "workers asleep", "switch off", "NOTIFY always"):
            dsn = stack.enter_context(database(server))
            made[name] = Site(dsn, clients, seconds, tool, asleep=name == "workers asleep")
        made["no trigger"].execute("DROP TRIGGER wake ON pgqueue.jobs")
        made["switch off"].execute("UPDATE pgqueue.switches SET enabled = false WHERE name = 'wake'")
        made["NOTIFY always"].execute(NAIVE)
        yield made


def run(server: PostgresServer, clients: int = 32, seconds: float = 4, rounds: int = 3) -> dict[str, list[float]]:
    with sites(server, clients, seconds) as made:
        figures = alternate(rounds, {name: site.run for name, site in made.items()})
        woken = {name: site.woken for name, site in made.items()}
    best = median(figures["no trigger"])
    rows = [
        [name, spread(rates), f"{median(rates) / best:.2f}", f"{median(woken[name]):,.0f}" if any(woken[name]) else "–"]
        for name, rates in figures.items()
    ]
    head = ["", "inserts/s", "of no trigger", "NOTIFYs heard in a round"]
    print_table(f"inserters: {clients} clients, single rows, {rounds} rounds of {seconds:g} s", head, rows)
    ratios = {name: round(median(rates) / best, 3) for name, rates in figures.items()}
    rounded = {name: [round(rate) for rate in rates] for name, rates in figures.items()}
    print_json("inserters", {"clients": clients, "inserts_per_second": rounded, "ratio": ratios, "notifies": woken})
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with benchmark_server() as server:
        run(server, options.clients, options.seconds, options.rounds)


if __name__ == "__main__":
    main()
