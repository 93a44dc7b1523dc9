"""The command line. A command's module is imported when the command is used, so that `--help` is quick."""

import importlib
from typing import Any

import click

from pgqueue.errors import DatabaseUnavailable, InvalidSettings, PgQueueError

# Exit codes; click itself ends with 2 when the command line is wrong.
ERROR, UNREACHABLE, CHECK_FAILED = 1, 7, 8

COMMANDS = {
    "up": "Start everything here, and stop it with Ctrl-C.",
    "api": "Serve the HTTP API.",
    "worker": "Claim jobs and run them.",
    "jobs": "Look at jobs and act on them.",
    "migrate": "Create and change the schema in the database.",
    "token": "Make tokens for the HTTP API.",
    "users": "Accounts for /login of the HTTP API.",
    "config": "Show every setting and where it comes from.",
}


class _Failure(click.ClickException):
    """An error of ours as one clear line, without a traceback."""

    exit_code = ERROR

    def show(self, file: Any = None) -> None:
        first, *rest = self.message.splitlines()
        click.secho(f"error: {first}", fg="red", err=True)
        for line in rest:
            click.echo(line, err=True)


class _Unreachable(_Failure):
    exit_code = UNREACHABLE


def _failure(error: PgQueueError) -> _Failure:
    if isinstance(error, InvalidSettings):
        return _Failure("wrong settings:\n" + "\n".join(f"  {problem}" for problem in error.problems))
    if isinstance(error, DatabaseUnavailable):
        return _Unreachable(f"{error}\nLook at DATABASE_URL with: pgqueue config")
    return _Failure(str(error))


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"pgqueue.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PgQueueError as error:
            raise _failure(error) from error


def _version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        from importlib.metadata import version

        click.echo(f"pgqueue {version('pgqueue-server')}")
        ctx.exit()


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version.")
def cli() -> None:
    """A distributed job queue that lives in PostgreSQL.

    Settings come from the environment and from .env; `pgqueue config` shows them.
    """


def main() -> None:
    cli(prog_name="pgqueue")
