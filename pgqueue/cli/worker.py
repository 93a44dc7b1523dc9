"""`pgqueue worker`: claims jobs and runs them."""

import os
import sys
from pathlib import Path

import click

from pgqueue.cli.database import database, directory_option
from pgqueue.settings import Settings


@click.command("worker")
@click.option(
    "--app", "apps", multiple=True, help="The module with your PgQueue, as module or module:name. Repeatable."
)
@click.option("--queues", help="The queues to serve, such as mail,default.  [default: all]")
@click.option("--threads", type=click.IntRange(1, 1024), help="Slots for jobs.  [default: WORKER_THREADS, 8]")
@click.option("--processes", type=click.IntRange(1, 256), default=1, show_default=True, help="Worker processes.")
@click.option("--name", help="The worker's name in logs and tables.  [default: host and process id]")
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
@click.option("--parent", type=int, hidden=True)
@directory_option
def command(
    apps: tuple[str, ...],
    queues: str | None,
    threads: int | None,
    processes: int,
    name: str | None,
    log_level: str,
    parent: int | None,
    directory: Path | None,
) -> None:
    """Claim jobs and run them, until SIGTERM or Ctrl-C.

    Without --app it knows the job types that ship with pgqueue. The first signal lets running jobs finish, the second
    cancels them; jobs that did not finish are given back at once.
    """
    from pgqueue import log

    settings = Settings.from_env()
    names = [queue.strip() for queue in queues.split(",") if queue.strip()] if queues else None
    threads = threads or settings.worker_threads
    if processes > 1:
        _supervise(apps, queues, threads, processes, name, log_level, directory, settings)
        return
    from pgqueue.worker.load import load_apps
    from pgqueue.worker.runtime import Runtime, exit_now, run
    from pgqueue.worker.supervisor import ORDERLY

    app = load_apps(apps or ["pgqueue.worker.jobs"])
    with database(settings, directory) as dsn:
        runtime = Runtime(app, dsn, settings, threads=threads, queues=names, name=name, parent=parent)
        log.set_up(settings.log, runtime.worker.name, log_level)
        code = run(runtime)
    exit_now(ORDERLY if code == 0 and parent is not None else code)


def _supervise(
    apps: tuple[str, ...],
    queues: str | None,
    threads: int,
    processes: int,
    name: str | None,
    log_level: str,
    directory: Path | None,
    settings: Settings,
) -> None:
    from pgqueue import log
    from pgqueue.worker.supervisor import supervise

    log.set_up(settings.log, "supervisor", log_level)
    common = [sys.executable, "-m", "pgqueue", "worker", "--threads", str(threads), "--log-level", log_level]
    for app in apps:
        common += ["--app", app]
    common += ["--parent", str(os.getpid())]
    if queues:
        common += ["--queues", queues]
    if directory:
        common += ["--dir", str(directory)]
    names = [f"{name or 'worker'}-{number}" for number in range(1, processes + 1)]
    sys.exit(supervise({each: [*common, "--name", each] for each in names}, settings.shutdown_grace))
