"""What both servers have in common: how they start, stop and are killed."""

import os
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from pgqueue.embedded.directory import locked, log_tail, note, open_log, password_in, read_notes
from pgqueue.embedded.processes import Account, spawn
from pgqueue.errors import ServerUnavailable

HOST = "127.0.0.1"
PATIENCE = 120.0
"""Seconds that a server may take to start or to stop: PostgreSQL's crash recovery can be long."""
# Someone else was faster to take the port, or a backend of a killed server is still at work.
PASSING_PROBLEMS = ("Address already in use", "pre-existing shared memory block")


class Server(ABC):
    """A server that belongs to a directory and runs until it is stopped."""

    _name: ClassVar[str]
    _stop_signal: ClassVar[signal.Signals]

    def __init__(self, directory: Path, account: Account, port: int | None) -> None:
        self.directory = directory
        self.started = False
        self.pid = 0
        self._account = account
        self._wanted_port = port
        self._process: subprocess.Popen[bytes] | None = None
        self._log = directory / f"{self._name}.log"
        self._notes = directory / f"{self._name}.json"
        self._password = password_in(directory / f"{self._name}.password")
        self.port: int = read_notes(self._notes).get("port", 0)

    def stop(self) -> None:
        with locked(self.directory):
            self._stop(self._stop_signal)

    def restart(self) -> None:
        with locked(self.directory):
            self._stop(self._stop_signal)
            self._launch()

    def kill(self) -> None:
        """End the server and its children as a crash would."""
        while pids := self._members():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        if self._process:
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        if not self._wait_until_ready():
            self._launch()
            self.started = True

    def _launch(self) -> None:
        deadline = time.monotonic() + 15
        while True:
            self.port = _free_port(self._wanted_port or self.port, strict=self._wanted_port is not None)
            note(self._notes, port=self.port)
            command = self._command()
            with open_log(self._log) as log:
                start = log.tell()
                self._process = spawn(command, log, self._account, session=True)
            try:
                if self._wait_until_ready(self._process):
                    return
            except BaseException:
                self._stop(self._stop_signal)
                raise
            tail = log_tail(self._log, start)
            if time.monotonic() > deadline or not any(problem in tail for problem in PASSING_PROBLEMS):
                raise ServerUnavailable(f"{self._name} did not start:\n{tail}")
            self.kill()
            time.sleep(0.1)

    def _wait_until_ready(self, process: subprocess.Popen[bytes] | None = None) -> bool:
        """Whether the server answers; no when it ends instead, or does not run."""
        deadline = time.monotonic() + PATIENCE
        while self._main_pid() or (process and process.poll() is None):
            if self._answers():
                return True
            if time.monotonic() > deadline:
                raise ServerUnavailable(f"{self._name} does not answer:\n{log_tail(self._log)}")
            time.sleep(0.02)
        return False

    def _stop(self, how: signal.Signals) -> None:
        deadline = time.monotonic() + PATIENCE
        if pid := self._main_pid():
            with suppress(ProcessLookupError):
                os.kill(pid, how)
            while pid in self._members() and time.monotonic() < deadline:
                time.sleep(0.02)
        self.kill()

    @abstractmethod
    def _command(self) -> list[str]:
        """What to run, everything that it needs being made ready."""

    @abstractmethod
    def _main_pid(self) -> int:
        """The pid of the living server, never one that is now another process's; 0 when there is none."""

    @abstractmethod
    def _members(self) -> list[int]: ...

    @abstractmethod
    def _answers(self) -> bool: ...


def _free_port(wished: int | None, *, strict: bool = False) -> int:
    """The wished port, or any other when it is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, wished or 0))
        except OSError as error:
            if strict:
                raise ServerUnavailable(f"port {wished}: {error.strerror}") from error
            probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
