"""A peer: how it is installed, started, filled, and how one sees that it is done."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[3]
ENVIRONMENTS = ROOT / ".bench"
DRIVERS = Path(__file__).parent / "drivers"
NODE = "node@24.21.0"


class CannotInstall(Exception):
    """The peer is shown without figures, and with this reason."""


@dataclass(frozen=True, kw_only=True)
class InPostgres:
    """What the runner has to know of a peer's tables."""

    fill: str
    """Adds %(jobs)s pending jobs of the type %(job)s."""
    tables: str
    """Its hot table, and those to be emptied with it."""
    empty: str
    """True when all jobs have been finished, and that is written."""
    insert: str
    """One job, as SQL for pgbench."""
    claim: str
    """What only its claim statement contains, for pg_stat_statements."""
    backlog: str
    """Adds %(jobs)s jobs of the type noop that are due in a day."""
    bare: bool = False
    """Whether a backlog is filled in without triggers, which would take minutes."""


@dataclass(frozen=True, kw_only=True)
class InRedis:
    """What the runner has to know of a peer's keys. `hold` is the queue that no worker serves."""

    keys: tuple[tuple[str, str], ...]
    """From, to: what is renamed so that the jobs are there at once."""
    left: tuple[tuple[str, str], ...]
    """Commands that answer 0 when all jobs have been finished."""


@dataclass(frozen=True, kw_only=True)
class Peer(ABC):
    name: str
    package: str
    """The package that is measured, with its version, such as `arq==0.28.0`."""
    settings: str
    """How it is set up here, for the docs."""
    hint: float
    """Roughly how many jobs it does in a second; calibration begins with it."""
    driver: str
    store: InPostgres | InRedis
    beside: tuple[str, ...] = ()
    """Packages that it runs best with."""
    environ: dict[str, str] = field(default_factory=dict)
    variant: str | None = None
    """The folder of the environment, when two peers share one."""
    handlers: bool = True
    """Whether it runs handlers: the floor does not."""
    slots: int | None = None
    """How many jobs one process runs at a time; None: without a limit."""
    lease: str = ""
    """What makes it take over a dead worker's jobs; for the docs."""
    alike: bool = True
    """Whether that can be set to about half a minute."""

    @property
    def environment(self) -> Path:
        return ENVIRONMENTS / (self.variant or self.name)

    @property
    def version(self) -> str:
        return self.package.replace("==", " ").replace("@", " ")

    @property
    def installed(self) -> bool:
        stamp = self.environment / ".installed"
        return stamp.exists() and stamp.read_text() == self._wanted()

    def install(self) -> None:
        """Once; later runs find it."""
        if self.installed:
            return
        print(f"installing {self.package}", file=sys.stderr, flush=True)
        shutil.rmtree(self.environment, ignore_errors=True)
        try:
            self._install()
        except subprocess.CalledProcessError as error:
            lines = (error.stderr or error.stdout or b"").decode(errors="replace").strip().splitlines()
            raise CannotInstall(lines[-1] if lines else str(error)) from error
        except OSError as error:
            raise CannotInstall(str(error)) from error
        (self.environment / ".installed").write_text(self._wanted())

    def _wanted(self) -> str:
        return " ".join((self.package, *self.beside))

    @abstractmethod
    def _install(self) -> None: ...

    @abstractmethod
    def produce(self, *arguments: str) -> list[str]:
        """The driver's command line for a measure of the producer."""

    @abstractmethod
    def workers(self, processes: int) -> list[list[str]]:
        """The command lines that together are so many processes which run jobs."""

    def setup(self) -> list[list[str]]:
        """The command lines that prepare an empty database."""
        return [self.produce("setup")]


@dataclass(frozen=True, kw_only=True)
class Python(Peer):
    """From PyPI, in a virtual environment."""

    def _install(self) -> None:
        venv.create(self.environment, with_pip=True)
        command = [self.bin("python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*command, self.package, *self.beside], check=True, capture_output=True)

    def bin(self, name: str) -> str:
        return str(self.environment / "bin" / name)

    def produce(self, *arguments: str) -> list[str]:
        return [self.bin("python"), str(DRIVERS / self.driver), *arguments]


@dataclass(frozen=True, kw_only=True)
class Node(Peer):
    """From npm, with a Node of its own: the system's may be too old."""

    def _install(self) -> None:
        self.environment.mkdir(parents=True)
        (self.environment / "package.json").write_text('{"private": true}')
        command = ["npm", "install", "--no-fund", "--no-audit", "--loglevel=error", self.package, NODE, *self.beside]
        subprocess.run(command, cwd=self.environment, check=True, capture_output=True)

    def node(self, *arguments: str) -> list[str]:
        """Modules are looked for beside the script: so it is copied to them."""
        for script in ("driver.mjs", self.driver):
            shutil.copy(DRIVERS / script, self.environment)
        return [str(self.environment / "node_modules/.bin/node"), str(self.environment / self.driver), *arguments]

    def produce(self, *arguments: str) -> list[str]:
        return self.node(*arguments)

    def workers(self, processes: int) -> list[list[str]]:
        return [self.node("worker")] * processes


@dataclass(frozen=True, kw_only=True)
class Here(Peer):
    """In our own environment."""

    @property
    def installed(self) -> bool:
        return True

    def _install(self) -> None: ...

    def produce(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", f"tests.bench.peers.drivers.{self.driver}", *arguments]


def environ(peer: Peer, **more: str) -> dict[str, str]:
    return {**os.environ, **peer.environ, "PYTHONPATH": str(DRIVERS), "NODE_ENV": "production", **more}
