"""Logins that have one of the roles each, and nothing else."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import psycopg

PASSWORD = "test"
LOGINS = ("producer", "worker", "auditor", "operator", "stranger")
"""The stranger has no role at all."""


def dsn_of(login: str, dsn: str) -> str:
    parts = urlsplit(dsn)
    return parts._replace(netloc=f"{login}:{PASSWORD}@{parts.hostname}:{parts.port}").geturl()


@asynccontextmanager
async def connected_as(role: str, dsn: str) -> AsyncIterator[psycopg.AsyncConnection]:
    connection = await psycopg.AsyncConnection.connect(dsn_of(f"test_{role}", dsn), autocommit=True)
    try:
        yield connection
    finally:
        await connection.close()
