"""Real worker processes, started and ended as an operator or an accident would, and a patient eye on their database."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from uuid import UUID, uuid4

import psycopg
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb, set_json_loads

from pgqueue.embedded import PostgresServer

T = TypeVar("T")

LEASE = 2.0
"""Of tests that wait until one runs out."""
LONG_LEASE = 15.0
"""Of all others: on a busy machine a worker may stand still for a while."""
RESCUE = 0.3
POLL = 0.3
GRACE = 4.0
SHORT_LEASE = {"PGQUEUE_LEASE_TIMEOUT": str(LEASE)}
QUICK = {
    "PGQUEUE_LEASE_TIMEOUT": str(LONG_LEASE),
    "PGQUEUE_HEARTBEAT_INTERVAL": "0.3",
    "PGQUEUE_RESCUE_INTERVAL": str(RESCUE),
    "PGQUEUE_POLL_INTERVAL": str(POLL),
    "PGQUEUE_SHUTDOWN_GRACE": str(GRACE),
    "PGQUEUE_LOG": "json",
}
PATIENCE = 20.0
"""Seconds, where the time is not what is tested."""

_numbers = count(1)


def wait(condition: Callable[[], T], what: str = "", seconds: float = PATIENCE) -> T:
    """Asks until the answer is true, and returns it."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what or condition}; the last answer: {answer}"
        time.sleep(0.02)
    return answer


def _readable(text: str | bytes) -> Any:
    """PostgreSQL's JSON may be more than Python's can read."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


class Database:
    """A test's own view of the queue: plain SQL, as anybody would write it."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self._conn = self._connect()
        self.run(
            "CREATE TABLE IF NOT EXISTS effects (job_id bigint, attempt int, worker text, pid int, note text,"
            " at timestamptz DEFAULT clock_timestamp())"
        )

    def close(self) -> None:
        self._conn.close()

    def again(self) -> None:
        """Connects anew, when the server is back."""

        def connected() -> bool:
            with suppress(psycopg.OperationalError):
                self._conn.close()
                self._conn = self._connect()
                return True
            return False

        wait(connected, "PostgreSQL is back")

    def _connect(self) -> psycopg.Connection[dict[str, Any]]:
        conn = psycopg.connect(self.dsn, autocommit=True, row_factory=dict_row)
        set_json_loads(_readable, conn)
        return conn

    def run(self, statement: str, *parameters: Any) -> None:
        self._conn.execute(statement, parameters or None)

    def rows(self, query: str, *parameters: Any) -> list[dict[str, Any]]:
        return self._conn.execute(query, parameters or None).fetchall()

    def value(self, query: str, *parameters: Any) -> Any:
        rows = self.rows(query, *parameters)
        return next(iter(rows[0].values())) if rows else None

    def values(self, query: str, *parameters: Any) -> list[Any]:
        return [next(iter(row.values())) for row in self.rows(query, *parameters)]

    # Jobs

    def add(self, type: str, payload: Any = None, **columns: Any) -> int:
        return self.add_many(type, [payload], **columns)[0]

    def add_many(self, type: str, payloads: Iterable[Any], **columns: Any) -> list[int]:
        """One statement, so all of them become ready together and in this order."""
        names = "".join(f", {name}" for name in columns)
        row = "(%s, %s" + ", %s" * len(columns) + ")"
        rows = [[type, Jsonb({} if payload is None else payload), *columns.values()] for payload in payloads]
        return self.values(
            f"INSERT INTO pgqueue.jobs (type, payload{names}) VALUES {', '.join([row] * len(rows))} RETURNING id",
            *(each for row in rows for each in row),
        )

    def job(self, id: int) -> dict[str, Any]:
        return self.rows("SELECT *, status::text AS status FROM pgqueue.jobs WHERE id = %s", id)[0]

    def statuses(self, ids: list[int] | None = None) -> dict[str, int]:
        rows = self.rows(
            "SELECT status::text, count(*) FROM pgqueue.jobs WHERE %s::bigint[] IS NULL OR id = ANY (%s) GROUP BY 1",
            ids,
            ids,
        )
        return {row["status"]: row["count"] for row in rows}

    def attempts(self, id: int) -> list[dict[str, Any]]:
        return self.rows("SELECT * FROM pgqueue.attempts WHERE job_id = %s ORDER BY id", id)

    def cancel(self, id: int) -> None:
        self.run("SELECT pgqueue.cancel_job(%s, 'a test says so')", id)

    def wait_for(self, id: int, status: str, seconds: float = PATIENCE) -> dict[str, Any]:
        """The job, once it has this status."""

        def reached() -> dict[str, Any] | None:
            job = self.job(id)
            if job["status"] in ("completed", "failed", "cancelled"):
                assert job["status"] == status, f"job {id} is {job['status']}: {job['error_type']} {job['error']}"
            return job if job["status"] == status else None

        return wait(reached, f"job {id} is {status}", seconds)

    def wait_for_all(self, ids: list[int], status: str, seconds: float = PATIENCE) -> None:
        wait(lambda: self.statuses(ids) == {status: len(ids)}, f"{len(ids)} jobs are {status}", seconds)

    # What handlers did

    def effects(self, id: int | None = None, note: str | None = None) -> list[dict[str, Any]]:
        return self.rows(
            "SELECT * FROM effects WHERE (%s::bigint IS NULL OR job_id = %s) AND (%s::text IS NULL OR note = %s)"
            " ORDER BY at",
            id,
            id,
            note,
            note,
        )

    def wait_for_effect(self, id: int, note: str = "", seconds: float = PATIENCE) -> dict[str, Any]:
        return wait(lambda: self.effects(id, note), f"job {id} has left {note or 'an effect'}", seconds)[0]

    def how_often(self) -> dict[int, int]:
        """How many effects each job had."""
        rows = self.rows("SELECT job_id, count(*) FROM effects GROUP BY 1")
        return {row["job_id"]: row["count"] for row in rows}

    # Workers

    def worker(self, name: str) -> dict[str, Any] | None:
        rows = self.rows("SELECT * FROM pgqueue.workers WHERE name = %s ORDER BY started_at DESC LIMIT 1", name)
        return rows[0] if rows else None

    def is_idle(self, name: str) -> bool:
        """Registered, and asleep until a NOTIFY wakes it."""
        worker = self.worker(name)
        return worker is not None and worker["listening"] and worker["idle_since"] is not None

    def bury(self) -> None:
        """The leases of workers whose process is gone run out now: nobody has to wait for that."""
        alive = "SELECT id, pid FROM pgqueue.workers WHERE stopped_at IS NULL AND expires_at > now()"
        dead = [row["id"] for row in self.rows(alive) if not Path(f"/proc/{row['pid']}").exists()]
        self.run("UPDATE pgqueue.workers SET expires_at = now() WHERE id = ANY (%s)", dead)

    def sessions(self, part: str = "") -> list[int]:
        """The backends of workers, or of this part of theirs: claim, finish, janitor, listen, heartbeat."""
        return self.values(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE %s",
            f"pgqueue-{part}%",
        )

    def terminate(self, part: str = "") -> int:
        pids = self.sessions(part)
        self.run("SELECT pg_terminate_backend(pid) FROM unnest(%s::int[]) AS pid", pids)
        return len(pids)


@dataclass
class WorkerProcess:
    """One `pgqueue worker`; with processes > 1 its supervisor."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    _killed: bool = field(default=False, init=False)

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def signal_to_stop(self) -> None:
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def wait(self, seconds: float = PATIENCE) -> int:
        return self.process.wait(seconds)

    def stop(self, seconds: float = PATIENCE) -> float:
        """SIGTERM; answers with how long it took."""
        started = time.monotonic()
        self.signal(signal.SIGTERM)
        assert self.wait(seconds) == 0, self.tail()
        return time.monotonic() - started

    def events(self, event: str | None = None) -> list[dict[str, Any]]:
        """The lines of its log."""
        lines = []
        for line in self.log.read_text().splitlines():
            with suppress(json.JSONDecodeError):
                lines.append(json.loads(line))
        return [line for line in lines if isinstance(line, dict) and (event is None or line.get("event") == event)]

    def tail(self, lines: int = 60) -> str:
        return f"--- {self.name}\n" + "\n".join(self.log.read_text().splitlines()[-lines:])


class Fleet:
    """Workers of one test on one database. Whoever they leave behind is found by a mark in the environment."""

    def __init__(self, dsn: str, directory: Path, db: Database | None = None) -> None:
        self.dsn = dsn
        self.directory = directory
        self.db = db
        self.workers: list[WorkerProcess] = []
        self._mark = f"TEST_FLEET={uuid4()}"

    def start(
        self,
        name: str = "w",
        *,
        app: str = "sample_app",
        threads: int = 4,
        queues: str | None = None,
        processes: int = 1,
        ready: bool = True,
        **settings: str,
    ) -> WorkerProcess:
        """Starts it, and waits until it sleeps and can be woken, unless told."""
        command = [sys.executable, "-m", "pgqueue", "worker", "--name", name, "--threads", str(threads)]
        command += [word for each in app.split() for word in ("--app", each)]
        command += ["--queues", queues] if queues else []
        command += ["--processes", str(processes)] if processes > 1 else []
        log = self.directory / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.directory,
                env=self._environment(settings),
                start_new_session=True,
            )
        worker = WorkerProcess(name, process, log)
        self.workers.append(worker)
        if ready:
            self.wait_until_idle(worker)
        return worker

    def start_all(self, names: Iterable[str], **what: Any) -> list[WorkerProcess]:
        """Starts them at the same time."""
        workers = [self.start(name, ready=False, **what) for name in names]
        self.wait_until_idle(*workers)
        return workers

    def wait_until_idle(self, *workers: WorkerProcess) -> None:
        assert self.db is not None
        for worker in workers:
            started = [worker.name]
            if "--processes" in worker.process.args:  # type: ignore[operator]
                number = int(worker.process.args[-1])  # type: ignore[index, call-overload]
                started = [f"{worker.name}-{each}" for each in range(1, number + 1)]
            for name in started:
                wait(
                    lambda name=name, worker=worker: self.db.is_idle(name) or worker.process.poll() is not None,  # type: ignore[misc, union-attr]
                    f"{name} is idle\n{worker.tail()}",
                )
            assert worker.process.poll() is None, worker.tail()

    def members(self) -> dict[int, str]:
        """Every living process of this fleet, with its command: workers, their children and those that lost them."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if self._mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def told(self) -> str:
        """The last that each of them said."""
        return "\n".join(worker.tail(20) for worker in self.workers)

    def close(self) -> None:
        """Ends them all; a process that outlives its worker is an error."""
        print(self.told(), file=sys.stderr)
        self.end()

    def end(self) -> None:
        leaders = {worker.pid for worker in self.workers if worker.process.poll() is None}
        ours = {pid for pid, command in self.members().items() if pid in leaders or "pgqueue worker" in command}
        for pid in ours:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for worker in self.workers:
            worker.process.wait()
        try:
            wait(lambda: not self.members(), "no process is left behind")
        finally:
            for pid in self.members():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _environment(self, settings: dict[str, str]) -> dict[str, str]:
        ours = ("PGQUEUE_", "DATABASE_URL", "REDIS_", "POSTGRES_", "SMTP_", "WORKER_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        mark, _, value = self._mark.partition("=")
        path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        return kept | QUICK | {"DATABASE_URL": self.dsn, "PYTHONPATH": path, mark: value} | settings


@contextmanager
def database_on(server: PostgresServer) -> Iterator[Database]:
    """A database that lives longer than one test."""
    name = f"shared_{next(_numbers)}"
    with psycopg.connect(server.dsn, autocommit=True) as conn:
        conn.execute(f"CREATE DATABASE {name} TEMPLATE pgqueue_template")
        db = Database(urlsplit(server.dsn)._replace(path=f"/{name}").geturl())
        try:
            yield db
        finally:
            db.close()
            conn.execute(f"DROP DATABASE {name} WITH (FORCE)")


def worker_id(db: Database, name: str) -> UUID:
    worker = db.worker(name)
    assert worker is not None
    id: UUID = worker["id"]
    return id
