"""Which database a command talks to: DATABASE_URL, or the embedded server of a folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from pgqueue.settings import Settings

directory_option = click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="The folder of the embedded servers, used without DATABASE_URL.  [default: PGQUEUE_DIR, .pgqueue]",
)


@contextmanager
def database(settings: Settings, directory: Path | None) -> Iterator[str]:
    """The URL; an embedded server that is not running runs as long as the block does."""
    if settings.database_url is not None:
        yield settings.database_url
        return
    directory = directory or settings.directory
    from pgqueue.embedded import no_database, start_postgres

    if not directory.is_dir():
        raise no_database(directory)
    server = start_postgres(directory, bin_dir=settings.pg_bin)
    try:
        yield server.dsn
    finally:
        if server.started:
            server.stop()
