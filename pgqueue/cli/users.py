"""`pgqueue users`: accounts of the HTTP API."""

import asyncio
import re
import sys
from pathlib import Path

import click

from pgqueue.cli.database import database, directory_option
from pgqueue.errors import PgQueueError
from pgqueue.settings import Settings


@click.group("users")
def command() -> None:
    """Accounts for /login of the HTTP API."""


@command.command()
@click.argument("name")
@click.option("--scope", default="jobs:read jobs:write", show_default=True, help="Scopes, separated by spaces.")
@click.option("--queues", help="Confine the user to queues, such as mail,report*.")
@directory_option
def add(name: str, scope: str, queues: str | None, directory: Path | None) -> None:
    """Add a user. The password is asked for, or is the first line of standard input."""
    from argon2 import PasswordHasher

    from pgqueue import accounts, db
    from pgqueue.api.auth import SCOPES, valid_queues

    scopes = re.split(r"[\s,]+", scope.strip())
    if unknown := [each for each in scopes if each not in SCOPES]:
        raise click.BadParameter(f"{', '.join(unknown)}: must be of {', '.join(SCOPES)}", param_hint="--scope")
    names = [each.strip() for each in queues.split(",") if each.strip()] if queues is not None else None
    if names is not None and not (names and valid_queues(names)):
        raise click.BadParameter("must be names of queues, such as mail,report*", param_hint="--queues")
    if sys.stdin.isatty():
        password = click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
    else:
        password = sys.stdin.readline().rstrip("\n")
    if not 8 <= len(password) <= 1024:
        raise click.UsageError("a password has 8 to 1024 characters")

    async def run(dsn: str) -> None:
        async with await db.connect(dsn) as conn:
            password_hash = PasswordHasher().hash(password)
            if await accounts.add_user(conn, name, password_hash, scopes, names, actor="cli") is None:
                raise PgQueueError(f"there is a user {name} already")

    with database(Settings.from_env(), directory) as dsn:
        asyncio.run(run(dsn))
    click.echo(f"added {name} with {' '.join(scopes)}", err=True)
