"""`pgqueue token`: tokens for the HTTP API."""

import re
from pathlib import Path

import click

from pgqueue.cli.database import directory_option
from pgqueue.settings import Settings

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class Duration(click.ParamType[float]):
    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d{1,9})([smhd]?)", str(value))
        if match is None or not int(match[1]):
            self.fail("must be such as 90s, 15m, 1h or 7d", param, ctx)
        return float(int(match[1]) * UNITS[match[2] or "s"])


@click.group("token")
def command() -> None:
    """Make tokens for the HTTP API."""


@command.command()
@click.option("--scope", default="jobs:read jobs:write", show_default=True, help="Scopes, separated by spaces.")
@click.option("--ttl", type=Duration(), default="1h", show_default=True, help="How long it lives: 90s, 15m, 1h, 7d.")
@click.option("--subject", default="cli", show_default=True, help="Who it is for; the audit shows it.")
@click.option("--queues", help="Confine it to queues, such as mail,report*.")
@directory_option
def create(scope: str, ttl: float, subject: str, queues: str | None, directory: Path | None) -> None:
    """Print a new token, signed with JWT_SECRET.

    Without JWT_SECRET it is the key that `pgqueue up` made in its folder.
    """
    from pgqueue.api.auth import SCOPES, create_token, valid_queues
    from pgqueue.cli.secret import with_secret

    scopes = re.split(r"[\s,]+", scope.strip())
    if unknown := [each for each in scopes if each not in SCOPES]:
        raise click.BadParameter(f"{', '.join(unknown)}: must be of {', '.join(SCOPES)}", param_hint="--scope")
    names = [each.strip() for each in queues.split(",") if each.strip()] if queues is not None else None
    if names is not None and not (names and valid_queues(names)):
        raise click.BadParameter("must be names of queues, such as mail,report*", param_hint="--queues")
    settings = Settings.from_env()
    settings = with_secret(settings, directory or settings.directory)
    token, _ = create_token(settings, subject, scopes, ttl, queues=names)
    click.echo(token)
