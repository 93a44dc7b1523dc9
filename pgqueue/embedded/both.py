"""Both servers of a directory, for as long as a block runs."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from pgqueue.embedded.postgres import PostgresServer, start_postgres
from pgqueue.embedded.valkey import ValkeyServer, start_valkey
from pgqueue.errors import ServerUnavailable

logger = logging.getLogger("pgqueue.embedded")


@dataclass(frozen=True)
class EmbeddedServers:
    postgres: PostgresServer
    valkey: ValkeyServer | None


@contextmanager
def embedded_servers(
    directory: Path, *, bin_dir: Path | None = None, fast: bool = False, with_valkey: bool = True
) -> Iterator[EmbeddedServers]:
    """Both servers of this directory, stopped at the end even when they were found running."""
    with ExitStack() as stack:
        postgres = start_postgres(directory, bin_dir=bin_dir, fast=fast)
        stack.callback(postgres.stop)
        valkey = None
        if with_valkey:
            try:
                valkey = start_valkey(directory)
                stack.callback(valkey.stop)
            except ServerUnavailable as error:
                logger.warning("valkey_unavailable", extra={"reason": str(error)})
        yield EmbeddedServers(postgres, valkey)
