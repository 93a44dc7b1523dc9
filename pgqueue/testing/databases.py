"""Databases that exist for a test or a session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import psycopg
from psycopg import sql


@contextmanager
def temporary(server: str, name: str, template: str | None = None) -> Iterator[str]:
    """The URL of a new database in this server, a copy of the template if there is one; dropped at the end."""
    create = sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name))
    if template is not None:
        create += sql.SQL(" TEMPLATE {}").format(sql.Identifier(urlsplit(template).path[1:]))
    drop = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
    # A failed run of an earlier process with our number may have left it.
    execute(server, drop)
    execute(server, create)
    try:
        yield urlsplit(server)._replace(path=f"/{name}").geturl()
    finally:
        execute(server, drop)


def execute(dsn: str, statement: sql.Composed) -> None:
    with psycopg.connect(dsn, autocommit=True, prepare_threshold=None) as conn:
        conn.execute(statement)
