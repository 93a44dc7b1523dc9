"""`pgqueue migrate`: the schema in the database."""

import json
from pathlib import Path

import click

from pgqueue import migrate
from pgqueue.cli import CHECK_FAILED
from pgqueue.cli.database import database, directory_option
from pgqueue.settings import Settings


@click.group("migrate")
def command() -> None:
    """Create and change the schema in the database."""


@command.command()
@directory_option
def up(directory: Path | None) -> None:
    """Bring the schema to the newest revision."""
    with database(Settings.from_env(), directory) as dsn:
        before, after = migrate.status(dsn).current, migrate.head()
        migrate.up(dsn)
    done = "is at" if before == after else f"went from {before or 'nothing'} to"
    click.echo(f"the schema {done} {after}", err=True)


@command.command()
@click.argument("revision")
@click.option("--yes", is_flag=True, help="Do not ask.")
@directory_option
def down(revision: str, yes: bool, directory: Path | None) -> None:
    """Take the schema back to REVISION, or to nothing with "base".

    What newer revisions added is dropped with its data.
    """
    with database(Settings.from_env(), directory) as dsn:
        if not yes:
            click.confirm(f"Drop everything that came after {revision}, with its data?", abort=True, err=True)
        migrate.down(dsn, revision)
        click.echo(f"the schema is at {migrate.status(dsn).current or 'nothing'}", err=True)


@command.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@directory_option
@click.pass_context
def status(ctx: click.Context, as_json: bool, directory: Path | None) -> None:
    """Compare the schema with this version of pgqueue; exit code 8 when they differ."""
    with database(Settings.from_env(), directory) as dsn:
        found = migrate.status(dsn)
    if as_json:
        click.echo(json.dumps({"current": found.current, "head": found.head, "up_to_date": found.up_to_date}))
    else:
        click.echo(found.problem() or f"up to date at {found.head}")
    ctx.exit(0 if found.up_to_date else CHECK_FAILED)


@command.command()
def sql() -> None:
    """Print the whole schema as a script for psql."""
    click.echo(migrate.sql(), nl=False)
