"""The child processes of `pgqueue up`: started together, their output prefixed, stopped in reverse order."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import click

GRACE = 10.0


@dataclass(frozen=True)
class Service:
    """A part of pgqueue that runs as `python -m pgqueue <arguments>`."""

    name: str
    arguments: tuple[str, ...]


@contextmanager
def running(services: Iterable[Service], environ: Mapping[str, str], grace: float = GRACE) -> Iterator[None]:
    """Run the services as long as the block runs."""
    with ExitStack() as stack:
        for service in services:
            stack.enter_context(_process(service, environ, grace))
        yield


@contextmanager
def _process(service: Service, environ: Mapping[str, str], grace: float) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-m", "pgqueue", *service.arguments],
        env={**os.environ, **environ, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # the terminal's Ctrl-C must reach `up` alone, which stops things in their order
    )
    printer = threading.Thread(target=_print, args=(service, process), daemon=True)
    printer.start()
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            click.secho(f"{service.name} did not stop within {grace:g} s and is killed", fg="yellow", err=True)
            process.kill()
            process.wait()
        printer.join(1)


def _print(service: Service, process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            # A worker's line says already whose it is.
            prefix = "" if " | " in line else f"{click.style(service.name, fg='cyan')} | "
            click.echo(prefix + line.rstrip(), err=True)
    if (code := process.wait()) not in (0, -signal.SIGTERM):
        click.secho(f"{service.name} ended with exit code {code}", fg="red", err=True)
