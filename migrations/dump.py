"""`python -m pgqueue.migrations.dump`: writes schema.sql, what all migrations together make on PostgreSQL 18."""

import re
import subprocess
import tempfile
from pathlib import Path

from pgqueue import migrate
from pgqueue.embedded import PostgresServer, start_postgres

TARGET = Path(__file__).with_name("schema.sql")
# Partitions of a day: their names differ from one day to the next.
_DATED = re.compile(r"_\d{8}(?!\d)")
_NOISE = re.compile(r"(--.*|\\(un)?restrict .*|SET \w+ = .*;|SELECT pg_catalog\.set_config.*)$")


def dump(server: PostgresServer, dsn: str) -> str:
    """The schema of this database, without what changes from run to run."""
    command = [str(server.bin_dir / "pg_dump"), "--schema-only", "--schema=pgqueue", "--no-owner", "--dbname", dsn]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    objects = [each for each in re.split(r"(?m)^--\n-- Name: ", text) if not _DATED.search(each)]
    # The rest of an object's header ends with "--"; before the first object there are only settings.
    statements = [each.partition("\n--\n")[2] for each in objects[1:]]
    lines = [[line for line in each.strip().splitlines() if not _NOISE.match(line)] for each in statements]
    return "\n\n".join("\n".join(each).strip() for each in lines if each) + "\n"


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="pgqueue-") as directory:
        Path(directory).chmod(0o711)
        server = start_postgres(Path(directory), fast=True)
        try:
            migrate.up(server.dsn)
            TARGET.write_text(dump(server, server.dsn), encoding="utf-8")
        finally:
            server.stop()


if __name__ == "__main__":
    main()
