"""Commands that need a database, and `pgqueue up` with servers of its own."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from pgqueue import migrate

MODULE = [sys.executable, "-m", "pgqueue"]
ENVIRON = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*MODULE, *arguments], env=ENVIRON | environ, capture_output=True, text=True, cwd="/")


def test_migrate(empty_dsn: str) -> None:
    head = migrate.head()
    behind = run("migrate", "status", DATABASE_URL=empty_dsn)
    assert (behind.returncode, behind.stderr) == (8, "")
    assert "pgqueue migrate up" in behind.stdout
    as_json = run("migrate", "status", "--json", DATABASE_URL=empty_dsn)
    assert as_json.returncode == 8
    assert json.loads(as_json.stdout) == {"current": None, "head": head, "up_to_date": False}

    up = run("migrate", "up", DATABASE_URL=empty_dsn)
    assert (up.returncode, up.stdout, up.stderr) == (0, "", f"the schema went from nothing to {head}\n")
    again = run("migrate", "up", DATABASE_URL=empty_dsn)
    assert (again.returncode, again.stderr) == (0, f"the schema is at {head}\n")
    status = run("migrate", "status", DATABASE_URL=empty_dsn)
    assert (status.returncode, status.stdout) == (0, f"up to date at {head}\n")

    unasked = run("migrate", "down", "base", DATABASE_URL=empty_dsn)
    assert unasked.returncode == 1
    assert migrate.status(empty_dsn).up_to_date
    down = run("migrate", "down", "base", "--yes", DATABASE_URL=empty_dsn)
    assert (down.returncode, down.stderr) == (0, "the schema is at nothing\n")


def test_migrate_sql() -> None:
    result = run("migrate", "sql")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("BEGIN;")


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pgqueue-") as name:
        Path(name).chmod(0o711)
        yield Path(name)


def start_up(directory: Path, **environ: str) -> tuple["subprocess.Popen[str]", str]:
    """`pgqueue up`, and what it said until it was ready."""
    command = [*MODULE, "up", "--dir", str(directory)]
    process = subprocess.Popen(command, env=ENVIRON | environ, stderr=subprocess.PIPE, text=True, cwd="/")
    said = ""
    assert process.stderr
    while "Ctrl-C" not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    return process, said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_and_down(directory: Path, number: signal.Signals) -> None:
    process, said = start_up(directory)
    try:
        url = re.search(r"export DATABASE_URL=(\S+)", said)
        assert url
        with psycopg.connect(url[1]) as conn:
            conn.execute("INSERT INTO pgqueue.jobs (type, payload) VALUES ('add_numbers', '{\"x\": 1, \"y\": 2}')")
        assert run("migrate", "status", "--dir", str(directory)).returncode == 0
        assert psycopg.connect(url[1]).close() is None, "a command must not stop the server that it found running"
        with psycopg.connect(url[1], autocommit=True) as conn:
            deadline = time.monotonic() + 30
            result = "SELECT result FROM pgqueue.jobs WHERE status = 'completed'"
            while (row := conn.execute(result).fetchone()) is None and time.monotonic() < deadline:
                time.sleep(0.05)
            assert row == ({"sum": 3},), "its workers run what is inserted"
    finally:
        process.send_signal(number)
        rest = process.communicate(timeout=30)[1]
    assert process.returncode == 0
    assert "stopping\n" in rest
    assert rest.endswith("stopped\n")
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(url[1])
    again = run("migrate", "status", "--dir", str(directory))
    assert again.returncode == 0, "the data stay"


def test_up_with_a_database_of_the_user(directory: Path, empty_dsn: str) -> None:
    process, said = start_up(directory, DATABASE_URL=empty_dsn)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[1].endswith("stopped\n")
    assert "pgqueue:***@" in said
    assert migrate.status(empty_dsn).up_to_date
    assert list(directory.iterdir()) == []
