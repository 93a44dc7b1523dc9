"""`pgqueue users`: accounts of the HTTP API."""

import asyncio
import json
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
    password = _password()

    async def run(dsn: str) -> None:
        async with await db.connect(dsn) as conn:
            password_hash = PasswordHasher().hash(password)
            if await accounts.add_user(conn, name, password_hash, scopes, names, actor="cli") is None:
                raise PgQueueError(f"there is a user {name} already")

    with database(Settings.from_env(), directory) as dsn:
        asyncio.run(run(dsn))
    click.echo(f"added {name} with {' '.join(scopes)}", err=True)


@command.command()
@click.argument("name")
@directory_option
def passwd(name: str, directory: Path | None) -> None:
    """Set a user's password, as `add` does. All sessions of the user end."""
    from argon2 import PasswordHasher

    from pgqueue import accounts, db

    password = _password()

    async def run(dsn: str) -> None:
        async with await db.connect(dsn) as conn:
            if not await accounts.set_password(conn, name, PasswordHasher().hash(password), actor="cli"):
                raise _unknown(name)

    with database(Settings.from_env(), directory) as dsn:
        asyncio.run(run(dsn))
    click.echo(f"changed the password of {name}; all sessions have ended", err=True)


@command.command()
@click.argument("name")
@directory_option
def rm(name: str, directory: Path | None) -> None:
    """Remove a user. All sessions end, and access tokens within a second or two."""
    from pgqueue import accounts, db

    async def run(dsn: str) -> None:
        async with await db.connect(dsn) as conn:
            if not await accounts.remove_user(conn, name, actor="cli"):
                raise _unknown(name)

    with database(Settings.from_env(), directory) as dsn:
        asyncio.run(run(dsn))
    click.echo(f"removed {name}", err=True)


@command.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@directory_option
def ls(as_json: bool, directory: Path | None) -> None:
    """List the users."""
    from pgqueue import accounts, db

    async def run(dsn: str) -> list[accounts.UserRow]:
        async with await db.connect(dsn) as conn:
            return await accounts.list_users(conn)

    with database(Settings.from_env(), directory) as dsn:
        users = asyncio.run(run(dsn))
    if as_json:
        click.echo(json.dumps([user._asdict() for user in users], default=str))
        return
    for user in users:
        queues = "" if user.queues is None else f"  queues {','.join(user.queues)}"
        click.echo(f"{user.name}  {' '.join(user.scopes)}  sessions {user.sessions}{queues}")
    if not users:
        click.echo("no users: pgqueue users add NAME", err=True)


def _password() -> str:
    if sys.stdin.isatty():
        password: str = click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
    else:
        password = sys.stdin.readline().rstrip("\n")
    if not 8 <= len(password) <= 1024:
        raise click.UsageError("a password has 8 to 1024 characters")
    return password


def _unknown(name: str) -> PgQueueError:
    return PgQueueError(f"there is no user {name}: pgqueue users ls")
