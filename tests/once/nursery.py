"""Real processes, quickly: one that has imported everything forks workers and producers on demand.

A worker that starts from nothing spends half a second on imports; a fork of this process needs a tenth of that. Each is
a process of its own, with its own environment, connections and log, and dies like any other.

It speaks JSON lines: a request on stdin is answered with the pid; later the pid is told again, with its exit code.
"""

import asyncio
import gc
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
QUIET = {"PGQUEUE_LOG": "json"}
QUICK = {
    # Long leases: a slow machine must not cost one. Whoever died is declared dead by the test.
    "PGQUEUE_LEASE_TIMEOUT": "30",
    "PGQUEUE_HEARTBEAT_INTERVAL": "1",
    "PGQUEUE_RESCUE_INTERVAL": "0.1",
    "PGQUEUE_POLL_INTERVAL": "0.1",
    "PGQUEUE_SHUTDOWN_GRACE": "0",
}


def plain_environment() -> dict[str, str]:
    """The caller's, without what would reach into a worker."""
    ours = ("PGQUEUE_", "DATABASE_URL", "POSTGRES_", "REDIS_", "SMTP_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


class Process:
    def __init__(self, pid: int, log: Path) -> None:
        self.pid = pid
        self.log = log
        self.code: int | None = None

    def send(self, number: signal.Signals) -> None:
        if self.code is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    async def ended(self, within: float = 30) -> int:
        deadline = time.monotonic() + within
        while self.code is None:
            assert time.monotonic() < deadline, f"process {self.pid} still runs; its log:\n{self.told()}"
            await asyncio.sleep(0.01)
        return self.code

    @property
    def stopped(self) -> bool:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def told(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def said(self, event: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.told().splitlines() if line.startswith("{")]
        return [line for line in lines if line.get("event") == event]


class Nursery:
    """Its processes end with it."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.all: dict[int, Process] = {}
        self._zygote = subprocess.Popen(
            [sys.executable, "-m", "tests.once.nursery"],
            cwd=ROOT,
            env=plain_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answers: list[int] = []
        self._told = threading.Condition()
        self._asking = threading.Lock()
        self._count = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def worker(
        self,
        dsn: str,
        app: str = "tests.once.handlers",
        *,
        queues: list[str] | None = None,
        threads: int = 4,
        mutant: str | None = None,
        redis_budget: float | None = None,
        handlers_dsn: str | None = None,
        level: str = "info",
        **env: str,
    ) -> Process:
        request = {
            "what": "worker",
            "dsn": dsn,
            "app": app,
            "queues": queues,
            "threads": threads,
            "mutant": mutant,
            "redis_budget": redis_budget,
            "handlers_dsn": handlers_dsn,
            "level": level,
        }
        return self._spawn(request, env | {"DATABASE_URL": dsn})

    def producer(self, dsn: str, type: str, payload: dict[str, Any], options: dict[str, Any], **env: str) -> Process:
        """Adds one job and prints its id."""
        return self._spawn(
            {"what": "producer", "type": type, "payload": payload, "options": options}, env | {"DATABASE_URL": dsn}
        )

    def _spawn(self, request: dict[str, Any], env: dict[str, str]) -> Process:
        with self._asking:
            self._count += 1
            log = self.logs / f"{self._count}.log"
            line = json.dumps(request | {"log": str(log), "env": QUIET | QUICK | env})
            assert self._zygote.stdin is not None
            self._zygote.stdin.write(line + "\n")
            self._zygote.stdin.flush()
            with self._told:
                assert self._told.wait_for(lambda: self._answers, 30), "the nursery does not answer"
                return self.all[self._answers.pop()]

    def _read(self) -> None:
        assert self._zygote.stdout is not None
        for line in self._zygote.stdout:
            told = json.loads(line)
            with self._told:
                if "log" in told:
                    self.all[told["pid"]] = Process(told["pid"], Path(told["log"]))
                    self._answers.append(told["pid"])
                    self._told.notify_all()
                else:
                    self.all[told["pid"]].code = told["code"]

    def close(self) -> None:
        assert self._zygote.stdin is not None
        self._zygote.stdin.close()
        self._zygote.wait(30)
        self._reader.join(5)
        assert self._zygote.stdout is not None
        self._zygote.stdout.close()


# In the nursery


def main() -> None:
    importlib.import_module("tests.once.handlers")
    for name in ("runtime", "load", "jobs"):
        importlib.import_module(f"pgqueue.worker.{name}")
    for name in ("redis.asyncio", "psycopg_pool", "uvloop", "pgqueue.log", "tests.mutants"):
        importlib.import_module(name)
    gc.freeze()  # a collection in a fork would copy every page
    children: set[int] = set()
    heard, speak = os.pipe()
    os.set_blocking(speak, False)
    signal.set_wakeup_fd(speak)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    selector.register(heard, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fd == heard:
                os.read(heard, 4096)
                reap(children)
            elif line := sys.stdin.readline():
                request = json.loads(line)
                if (pid := os.fork()) == 0:
                    be(request)
                children.add(pid)
                say({"pid": pid, "log": request["log"]})
            else:
                for pid in children:
                    os.kill(pid, signal.SIGKILL)
                return


def reap(children: set[int]) -> None:
    for pid in list(children):
        if (ended := os.waitpid(pid, os.WNOHANG))[0]:
            children.discard(pid)
            say({"pid": pid, "code": os.waitstatus_to_exitcode(ended[1])})


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def be(request: dict[str, Any]) -> NoReturn:
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, nothing), (1, log), (2, log)):
            os.dup2(source, target)
        os.environ |= request["env"]
        from pgqueue import failpoints

        # It reads the environment when it is imported.
        importlib.reload(failpoints)
        if request["what"] == "worker":
            be_worker(request)
        else:
            asyncio.run(produce(request["type"], request["payload"], request["options"]))
        sys.stdout.flush()
        os._exit(0)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(1)


def be_worker(request: dict[str, Any]) -> None:
    from pgqueue import idempotency, log
    from pgqueue.settings import Settings
    from pgqueue.worker.load import load_apps
    from pgqueue.worker.runtime import Runtime, run

    if request["mutant"] is not None:
        from tests.mutants import MUTANTS

        MUTANTS[request["mutant"]].apply(setattr)
    if request["redis_budget"] is not None:
        idempotency.BUDGET = request["redis_budget"]
    settings = Settings.from_env(dotenv=None)
    app = load_apps([request["app"]])
    runtime = Runtime(app, request["dsn"], settings, threads=request["threads"], queues=request["queues"])
    if request["handlers_dsn"] is not None:
        runtime.host.dsn = request["handlers_dsn"]
    log.set_up("json", runtime.worker.name, request["level"])
    run(runtime)


async def produce(type: str, payload: dict[str, Any], options: dict[str, Any]) -> None:
    from tests.once.handlers import app

    ref = await app.enqueue(type, payload, **options)
    print(ref.id, flush=True)
    await app.pools.close()


if __name__ == "__main__":
    main()
