"""What does waking cost those who insert? 32 clients insert single rows, each in a transaction of its own.

Without a worker process: no trigger at all, the trigger with workers that are all busy, with its switch off, and, as a
reference, a trigger that sends a NOTIFY for every statement. With one that is asleep when it begins and runs the jobs,
which takes its share of the machine: woken, and with the switch off, so that it polls.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from uuid import UUID

import psycopg

from pgqueue.embedded import PostgresServer
from pgqueue.workers import channel
from tests.bench.common import alternate, benchmark_server, database, print_json, print_table, spread

INSERT = "INSERT INTO pgqueue.jobs (type) VALUES ('noop')"
NAIVE = """
    CREATE OR REPLACE FUNCTION pgqueue.tell_of_inserted() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN PERFORM pg_notify('pgqueue_jobs', ''); RETURN NULL; END $$
"""
WORKERS = 4


class Sleeper:
    """A worker process that has gone to sleep, and how often it is woken."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.woken = 0
        self._stop = threading.Event()
        self._listener = threading.Thread(target=self._listen)

    def __enter__(self) -> Sleeper:
        command = [sys.executable, "-m", "pgqueue", "worker", "--app", "tests.bench.noop", "--log-level", "warning"]
        self._process = subprocess.Popen(command, env={**os.environ, "DATABASE_URL": self.dsn, "REDIS_URL": ""})
        try:
            self._id = self._asleep()
        except BaseException:
            self._process.kill()
            raise
        self._listener.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._stop.set()
        self._listener.join()

    def _asleep(self) -> UUID:
        query = "SELECT id FROM pgqueue.workers WHERE idle_since IS NOT NULL AND listening AND stopped_at IS NULL"
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            deadline = time.monotonic() + 30
            while (row := conn.execute(query).fetchone()) is None:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise RuntimeError("the worker did not start")
                time.sleep(0.05)
        return UUID(str(row[0]))

    def _listen(self) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            conn.execute(f'LISTEN "{channel(self._id)}"')
            while not self._stop.is_set():
                self.woken += sum(1 for _ in conn.notifies(timeout=0.2))


class Site:
    """A database with one way to wake its workers: one that is real, or some that seem busy."""

    def __init__(self, dsn: str, clients: int, seconds: float, pgbench: Path | None, *, worker: bool) -> None:
        self.dsn = dsn
        self.clients = clients
        self.seconds = seconds
        self.pgbench = pgbench
        self.worker = worker
        self.woken: list[int] = []
        for _ in range(0 if worker else WORKERS):
            self.execute(
                "INSERT INTO pgqueue.workers (id, name, host, pid, version, threads, listening, expires_at)"
                " VALUES (gen_random_uuid(), 'bench', 'bench', 1, '0', 8, true, now() + interval '1 day')"
            )

    def execute(self, statement: str) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            conn.execute(statement.encode())

    def run(self) -> float:
        """Inserts per second."""
        self.execute("TRUNCATE pgqueue.jobs")
        self.execute("CHECKPOINT")
        with ExitStack() as stack:
            sleeper = stack.enter_context(Sleeper(self.dsn)) if self.worker else None
            rate = self._insert()
        self.woken.append(sleeper.woken if sleeper else 0)
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
        for name in ("no trigger", "busy", "switch off", "NOTIFY always", "worker, woken", "worker, polling"):
            dsn = stack.enter_context(database(server))
            made[name] = Site(dsn, clients, seconds, tool, worker=name.startswith("worker"))
        made["no trigger"].execute("DROP TRIGGER tell ON pgqueue.jobs")
        made["NOTIFY always"].execute(NAIVE)
        for name in ("switch off", "worker, polling"):
            made[name].execute("UPDATE pgqueue.switches SET enabled = false WHERE name = 'wake'")
        yield made


def run(server: PostgresServer, clients: int = 32, seconds: float = 4, rounds: int = 3) -> dict[str, list[float]]:
    with sites(server, clients, seconds) as made:
        figures = alternate(rounds, {name: site.run for name, site in made.items()})
        woken = {name: site.woken for name, site in made.items()}
    rows, ratios = [], {}
    for name, rates in figures.items():
        reference = "worker, polling" if name.startswith("worker") else "no trigger"
        ratios[name] = round(median(rates) / median(figures[reference]), 3)
        heard = f"{median(woken[name]):,.0f}" if any(woken[name]) else "–"
        rows.append([name, spread(rates), f"{ratios[name]:.2f} of {reference}", heard])
    title = f"inserters: {clients} clients, single rows, {rounds} rounds of {seconds:g} s"
    print_table(title, ["", "inserts/s", "", "NOTIFYs in a round"], rows)
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
