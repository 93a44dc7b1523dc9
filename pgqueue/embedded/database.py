"""Which database a program talks to: DATABASE_URL, or the embedded server that runs."""

from pathlib import Path

from pgqueue.embedded.postgres import running_postgres
from pgqueue.errors import PgQueueError
from pgqueue.settings import Settings


def database_url(settings: Settings) -> str:
    """DATABASE_URL, or the embedded server that runs in PGQUEUE_DIR."""
    if settings.database_url is not None:
        return settings.database_url
    if (server := running_postgres(settings.directory)) is None:
        raise no_database(settings.directory)
    return server.dsn


def no_database(directory: Path) -> PgQueueError:
    return PgQueueError(
        f"DATABASE_URL is not set, and no embedded server runs in {directory}\n"
        "Start one with: pgqueue up\n"
        "Or name a database: export DATABASE_URL=postgresql://user:password@host/database"
    )
