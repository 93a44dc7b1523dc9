"""`pgqueue jobs`: look at jobs and act on them."""

import asyncio
import getpass
import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pgqueue.cli.database import database, directory_option
from pgqueue.job import Job, Status
from pgqueue.settings import Settings

if TYPE_CHECKING:
    from pgqueue.db import Connection

T = TypeVar("T")

json_option = click.option("--json", "as_json", is_flag=True, help="As JSON, one object a line.")
reason_option = click.option("--reason", help="Why; it is kept in the audit.")
COLUMNS = ("id", "type", "queue", "status", "attempt", "priority", "created_at", "error")


@click.group("jobs")
def command() -> None:
    """Look at jobs and act on them."""


@command.command("ls")
@click.option("--status", type=click.Choice([str(status) for status in Status]), help="Only these.")
@click.option("--queue", help="Only of this queue.")
@click.option("--type", "type_", help="Only of this type.")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True)
@click.option("--before", type=int, help="The page before this id.")
@json_option
@directory_option
def list_(
    status: str | None,
    queue: str | None,
    type_: str | None,
    limit: int,
    before: int | None,
    as_json: bool,
    directory: Path | None,
) -> None:
    """List jobs, newest first."""
    from pgqueue import read

    statuses = [Status(status)] if status else None
    jobs = _with_database(
        directory,
        lambda conn: read.list_jobs(conn, statuses=statuses, queue=queue, type=type_, limit=limit, before=before),
    )
    if as_json:
        for job in jobs:
            click.echo(_json(job))
        return
    rows = [[_text(getattr(job, column)) for column in COLUMNS] for job in jobs]
    widths = [max(len(row[place]) for row in [list(COLUMNS), *rows]) for place in range(len(COLUMNS))]
    for row in [list(COLUMNS), *rows]:
        click.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    if len(jobs) == limit:
        click.echo(f"more: pgqueue jobs ls --before {jobs[-1].id}", err=True)


@command.command("show")
@click.argument("id", type=int)
@json_option
@directory_option
def show(id: int, as_json: bool, directory: Path | None) -> None:
    """Show everything about one job, with its failed attempts."""
    from pgqueue import read

    async def load(conn: "Connection") -> tuple[Job, list[read.Attempt]]:
        return await read.get_job(conn, id), await read.list_attempts(conn, id)

    job, attempts = _with_database(directory, load)
    if as_json:
        told = json.loads(_json(job)) | {"attempts": [attempt._asdict() for attempt in attempts]}
        click.echo(json.dumps(told, default=str))
        return
    for name, value in asdict(job).items():
        if value not in (None, []) and name != "lease_token":
            click.echo(f"{name:<20} {value}")
    for attempt in attempts:
        click.echo(f"\nattempt {attempt.attempt}: {attempt.outcome} ({attempt.reason}) at {attempt.finished_at}")
        click.echo(attempt.traceback or f"{attempt.error_type}: {attempt.error}")


@command.command("why")
@click.argument("id", type=int)
@json_option
@directory_option
def why(id: int, as_json: bool, directory: Path | None) -> None:
    """Say why a job is not running."""
    from pgqueue import read

    for reason in _with_database(directory, lambda conn: read.why(conn, id)):
        if as_json:
            click.echo(json.dumps(reason._asdict()))
        else:
            click.echo(f"{'✗' if reason.blocking else '·'} {reason.reason}: {reason.detail}")


@command.command("retry")
@click.argument("ids", type=int, nargs=-1, required=True)
@reason_option
@directory_option
def retry(ids: tuple[int, ...], reason: str | None, directory: Path | None) -> None:
    """Run failed, cancelled or scheduled jobs again, now."""
    from pgqueue import control

    _act(directory, ids, lambda conn, id: control.retry_job(conn, id, actor=_actor(), reason=reason))


@command.command("cancel")
@click.argument("ids", type=int, nargs=-1, required=True)
@reason_option
@directory_option
def cancel(ids: tuple[int, ...], reason: str | None, directory: Path | None) -> None:
    """Cancel jobs; a running one is asked to stop."""
    from pgqueue import control

    _act(directory, ids, lambda conn, id: control.cancel_job(conn, id, actor=_actor(), reason=reason))


@command.command("resolve")
@click.argument("id", type=int)
@click.option("--completed", "outcome", flag_value="completed", help="Its effect happened.")
@click.option("--retry", "outcome", flag_value="retry", help="Its effect did not happen: run it again.")
@reason_option
@directory_option
def resolve(id: int, outcome: str | None, reason: str | None, directory: Path | None) -> None:
    """End the doubt about a job whose effect may or may not have happened."""
    from pgqueue import control

    if outcome is None:
        raise click.UsageError("say what is true: --completed if the effect happened, --retry if it did not")
    decided: Any = outcome
    _act(directory, (id,), lambda conn, id: control.resolve_job(conn, id, decided, actor=_actor(), reason=reason))


def _act(
    directory: Path | None, ids: tuple[int, ...], action: Callable[["Connection", int], Awaitable[Status]]
) -> None:
    async def all_of_them(conn: "Connection") -> None:
        for id in ids:
            click.echo(f"{id} {await action(conn, id)}")

    _with_database(directory, all_of_them)


def _with_database(directory: Path | None, work: Callable[["Connection"], Awaitable[T]]) -> T:
    from pgqueue.db import connect
    from pgqueue.migrate import check_schema

    async def run(dsn: str) -> T:
        async with await connect(dsn, application_name="pgqueue-cli") as conn:
            await check_schema(conn)
            return await work(conn)

    with database(Settings.from_env(), directory) as dsn:
        return asyncio.run(run(dsn))


def _actor() -> str:
    return f"cli:{getpass.getuser()}"


def _json(job: Job) -> str:
    told = {name: value for name, value in asdict(job).items() if name != "lease_token"}
    return json.dumps(told, default=str)


def _text(value: Any) -> str:
    """One line, without what a stranger could do to a terminal."""
    text = "" if value is None else str(value)
    text = "".join(each if each.isprintable() else " " for each in text)
    return text if len(text) <= 40 else text[:39] + "…"
