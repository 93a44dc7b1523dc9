"""The private statements: each file is one that the migrated database understands, is used, and tells the truth."""

import re
from dataclasses import fields
from pathlib import Path

import psycopg
import pytest
from psycopg.pq import ExecStatus

from pgqueue.claim import Claimed
from pgqueue.job import TRANSITIONS, Job, Status
from pgqueue.read import Attempt
from pgqueue.sql import SQL

ROOT = Path(__file__).parents[2]
SOURCES = [file for folder in ("pgqueue", "worker", "api") for file in (ROOT / folder).rglob("*.py")]
PLACEHOLDER = re.compile(r"%\((\w+)\)s")
# These two claim as well, from other places.
VERBS = {"sweep": "claim", "claim_parked": "claim"}


def for_libpq(text: str) -> tuple[str, list[str]]:
    """The statement with $1, $2 … as the driver would send it, and the names that they stand for."""
    names = list(dict.fromkeys(PLACEHOLDER.findall(text)))
    return PLACEHOLDER.sub(lambda found: f"${names.index(found[1]) + 1}", text).replace("%%", "%"), names


def prepared(conn: psycopg.Connection, text: str) -> tuple[int, list[str]]:
    """How many parameters PostgreSQL sees, and the columns that come back. It decides the types of all of them."""
    statement, _ = for_libpq(text)
    for result in (conn.pgconn.prepare(b"", statement.encode()), conn.pgconn.describe_prepared(b"")):
        assert result.status == ExecStatus.COMMAND_OK, result.error_message.decode()
    return result.nparams, [(result.fname(i) or b"").decode() for i in range(result.nfields)]


def test_every_file_prepares(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        for name in SQL.names():
            text = getattr(SQL, name)
            try:
                parameters, _ = prepared(conn, text)
            except AssertionError as error:
                pytest.fail(f"{name}.sql: {error}")
            assert parameters == len(for_libpq(text)[1]), name


def test_columns_are_those_of_the_values_they_become(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        for name in ("claim", "sweep", "claim_parked"):
            assert prepared(conn, getattr(SQL, name))[1] == list(Claimed._fields), name
        assert prepared(conn, SQL.list_attempts)[1] == list(Attempt._fields)
        job = ["extract" if field.name == "timeout" else field.name for field in fields(Job)]
        for name in ("get_job", "list_jobs", "list_failed"):
            assert prepared(conn, getattr(SQL, name))[1] == job, name


def test_placeholders_are_named_and_statements_single() -> None:
    for name in SQL.names():
        text = getattr(SQL, name)
        code = re.sub(r"--.*", "", text)
        assert not re.search(r"%(?!\(\w+\)s|%)", code.replace("%%", "")), f"{name}.sql has a % that is no %(name)s"
        assert "%" not in "".join(re.findall(r"--.*", text)), f"{name}.sql: the driver reads the % of a comment as well"
        assert not re.search(r"[{;]", code.replace("'{}'", "")), (
            f"{name}.sql must be one statement, without braces to fill"
        )


def test_predicates_use_the_time_of_the_statement() -> None:
    """clock_timestamp() is asked again for each row, and no index can answer."""
    for name in ("claim", "sweep", "claim_parked", "promote", "rescue", "complete", "fail"):
        assert "clock_timestamp" not in getattr(SQL, name), name


def test_every_file_is_used() -> None:
    code = "\n".join(file.read_text(encoding="utf-8") for file in SOURCES)
    unused = [name for name in SQL.names() if not re.search(rf"\bSQL\.{name}\b", code)]
    assert not unused
    missing = set(re.findall(r"\bSQL\.([a-z]\w*)\b", code)) - set(SQL.names()) - {"names"}
    assert not missing


@pytest.mark.parametrize("name", [name for name in SQL.names() if "->" in getattr(SQL, name).partition("\n")[0]])
def test_the_transition_in_the_first_line_is_the_one_of_the_table(name: str) -> None:
    origin, *targets = getattr(SQL, name).partition("\n")[0].removeprefix("-- ").split("->")
    words = [re.findall(r"[a-z]+", part)[0] for part in (origin, *targets)]
    source, *ends = [Status(word) for word in words]
    assert {(source, end) for end in ends} == TRANSITIONS[VERBS.get(name, name)]


def test_every_transition_of_a_worker_has_a_file_that_names_it() -> None:
    for verb in TRANSITIONS:
        text = getattr(SQL, verb)
        assert "->" in text.partition("\n")[0] or f"pgqueue.{verb}(" in text, verb
