"""`pgqueue api`: the HTTP API."""

from pathlib import Path

import click

from pgqueue.cli.database import database, directory_option
from pgqueue.settings import Settings


@click.command("api")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), help="The port.  [default: API_PORT, 8080]")
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
@directory_option
def command(host: str, port: int | None, log_level: str, directory: Path | None) -> None:
    """Serve the HTTP API, until SIGTERM or Ctrl-C.

    JWT_SECRET (32 bytes at least) or PGQUEUE_JWKS_FILE says which tokens are good. Any number of these may run.
    """
    from pgqueue import log
    from pgqueue.api.serve import serve

    settings = Settings.from_env()
    log.set_up(settings.log, "api", log_level)
    with database(settings, directory) as dsn:
        serve(settings, dsn, host, settings.api_port if port is None else port)
