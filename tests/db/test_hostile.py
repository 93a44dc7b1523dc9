r"""What strangers can do by SQL: each hostile value is refused by name, or is one job among others and harms none.

The tests insert as a producer does, and claim as a worker does: the hostile job among a hundred innocent ones, in one
batch. The claim must not raise, and whoever decodes a payload may fail with that one only.
"""

import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg import errors as pg

from pgqueue import control, enqueue, finish, migrate, promote, read, rescue, workers
from pgqueue.claim import Claimed
from pgqueue.embedded import PostgresServer, start_postgres
from pgqueue.errors import InvalidJob
from pgqueue.job import Job, Lease, NewJob, Status
from tests.db.logins import connected_as, dsn_of
from tests.db.queue import MiniWorker, add, statuses, value

pytestmark = pytest.mark.usefixtures("logins")

MIB = 1 << 20
UNREADABLE = (ValueError, RecursionError)
"""What json.loads raises for what PostgreSQL can store and Python cannot read."""

# SQL expressions that the rules refuse, by the column that the error names
REFUSED = {
    "run_at": [
        "'infinity'",
        "'-infinity'",
        "'0044-03-15 BC'",
        "'4714-11-24 00:00:00+00 BC'",
        "'1969-12-31 23:59:59+00'",
        "'3000-01-01'",
        "'20000-01-01'",
        "'294276-12-31 23:59:59+00'",
    ],
    "priority": ["1001", "-1001", "2147483647", "-2147483648"],
    "thread_demand": ["0", "-1", "1025", "2147483647"],
    "max_attempts": ["0", "-1", "1001", "2147483647"],
    "timeout": [
        "'0'",
        "'-1 second'",
        "'999 microseconds'",
        "'367 days'",
        "'1000 years'",
        "'178956970 years'",
        # A month counts as 30 days when intervals are compared, and as 30.44 when they become seconds.
        "'-1000000 months 30000001 days'",
        "'1000000 months -29999999 days'",
    ],
    "queue": [
        "''",
        "' '",
        "'a b'",
        r"E'a\n'",
        r"E'\t'",
        r"E'a\x01b'",
        r"E'\x1b[31m'",
        "'-a'",
        "'.a'",
        "'a;b'",
        "'%s'",
        "'ü'",
        r"U&'\202Egpj'",
        r"U&'a\200Bb'",
        "repeat('q', 64)",
        "repeat('q', 300)",
        "repeat('q', 1048576)",
    ],
    "type": [
        "''",
        r"E'a\nb'",
        r"E'\r'",
        r"E'\x1b[31mred'",
        r"E'a\x7f'",
        "repeat('t', 129)",
        "repeat('t', 10000000)",
    ],
    "name": ["repeat('n', 201)", "repeat('n', 10000000)"],
    "idempotency_key": ["''", "repeat('k', 256)", "repeat('k', 1048576)"],
    "tags": [
        "'{NULL}'",
        "'{a,NULL,b}'",
        "'{{a,b},{c,d}}'",
        "'{{{a}}}'",
        "'{{NULL},{b}}'",
        "array_fill('a'::text, ARRAY[33])",
        "array_fill('a'::text, ARRAY[1000000])",
        "array_fill(''::text, ARRAY[33])",
        "ARRAY[repeat('x', 2049)]",
        "array_fill(repeat('ü', 100), ARRAY[11])",
        "array_fill(repeat('x', 1000000), ARRAY[30])",
    ],
    "payload": [
        f"to_jsonb(repeat('a', {MIB}))",
        f"jsonb_build_object(repeat('k', {MIB}), 1)",
        "(SELECT jsonb_object_agg('key' || i, repeat('v', 100)) FROM generate_series(1, 10000) i)",
        "to_jsonb(array_fill(0, ARRAY[400000]))",
        f"to_jsonb(repeat('\"', {MIB // 2}))",
        # Each of these numbers is stored in 16 bytes, and read as 131 kB.
        "to_jsonb(array_fill(1e131071, ARRAY[8]))",
        "to_jsonb(array_fill(-1e131071, ARRAY[400]))",
        "to_jsonb(array_fill(1e-16383, ARRAY[64]))",
    ],
}
NOT_NULL = ["type", "payload", "queue", "priority", "run_at", "thread_demand", "max_attempts", "tags"]

# JSON that PostgreSQL itself cannot read
NOT_JSON = {
    r'"\u0000"': pg.UntranslatableCharacter,
    r'{"\u0000": 1}': pg.UntranslatableCharacter,
    r'"\ud800"': pg.InvalidTextRepresentation,
    r'"\udc00\ud800"': pg.InvalidTextRepresentation,
    "": pg.InvalidTextRepresentation,
    "NaN": pg.InvalidTextRepresentation,
    "{'a': 1}": pg.InvalidTextRepresentation,
    '{"a": 1': pg.InvalidTextRepresentation,
    "1e131072": pg.NumericValueOutOfRange,
    "9" * 131_073: pg.NumericValueOutOfRange,
    "[" * 40_000 + "]" * 40_000: pg.StatementTooComplex,
}

# What is strange and allowed
ACCEPTED = {
    "run_at": ["'1970-01-01'", "'2024-02-29 23:59:59.999999+14'", "'2999-12-30'"],
    "priority": ["1000", "-1000"],
    "thread_demand": ["1024"],
    "max_attempts": ["1", "1000"],
    "timeout": ["'1 millisecond'", "'1 year'", "'366 days'", "'11 months 30 days'"],
    "queue": ["'default'", "'Q_1.a:b/c-d'", "repeat('q', 63)"],
    "type": [
        "' '",
        "''';--'",
        "'%s %(x)s {} \\'",
        r"U&'\202Egpj.exe\202C'",
        r"U&'a\200Bb\FEFF'",
        "repeat('😀', 128)",
        "'<script>alert(1)</script>'",
    ],
    "name": ["''", r"E'\x1b[31m\n'", "repeat('😀', 200)"],
    "idempotency_key": ["' '", r"E'\n'", "repeat('😀', 255)", r"U&'\202Ek'"],
    "tags": [
        "'[5:6]={a,b}'",
        """'{"","a,b","c\\"d","{}","NULL"}'""",
        "array_fill('a'::text, ARRAY[32])",
        "ARRAY[repeat('x', 2048)]",
        r"ARRAY[E'\n\x01', U&'\202E']",
    ],
}
PAYLOADS = {
    "null": "null",
    "empty": "{}",
    "empty text": '""',
    "zero": "-0",
    "twice the same key": '{"a": 1, "a": 2}',
    "empty key": '{"": {"": ""}}',
    "right to left": '{"\u202ea": "\u202e\u200b\ufeff"}',
    "escapes": r'"\ud83d\ude00\u2028\\u0000"',
    "depth 500": "[" * 500 + "]" * 500,
    "1e400": "1e400",
    "1e-16383": "1e-16383",
    "4000 digits": "9" * 4_000,
    "a key of 1 MB": json.dumps({"k" * (MIB - 20): 1}),
    "10000 keys": json.dumps({f"key {i}": i for i in range(10_000)}),
    "1 MiB": json.dumps("a" * (MIB - 2)),
    # Python cannot read these.
    "depth 2000": '{"a":' * 2_000 + "1" + "}" * 2_000,
    "depth 10000": "[" * 10_000 + "]" * 10_000,
    "5000 digits": '{"a": ' + "9" * 5_000 + "}",
    "131000 digits": "[-" + "1" * 131_000 + "]",
    "1e5000": "1e5000",
    "seven times 1e131071": json.dumps([0] * 7).replace("0", "1e131071"),
}
MAY_BE_UNREADABLE = list(PAYLOADS)[list(PAYLOADS).index("depth 2000") :]


# What is refused


async def test_rules_name_the_column(conn, dsn):
    async with connected_as("producer", dsn) as producer:
        for column, expressions in REFUSED.items():
            for expression in expressions:
                with pytest.raises(pg.CheckViolation) as caught:
                    await insert(producer, column, expression)
                assert_names(caught.value, column)
        if producer.info.server_version >= 170000:
            with pytest.raises(pg.CheckViolation, match="timeout must be"):
                await insert(producer, "timeout", "'infinity'")
        for column in NOT_NULL:
            for key in ("NULL", "'k'"):
                with pytest.raises(pg.NotNullViolation) as missing:
                    await insert(producer, column, "NULL", idempotency_key=key)
                assert missing.value.diag.column_name == column
    assert await statuses(conn) == {}
    assert await value(conn, "SELECT count(*) FROM pgqueue.idempotency_keys") == 0


async def insert(conn: psycopg.AsyncConnection, column: str, expression: str, **others: str) -> int:
    row = {"type": "'t'", column: expression} | others
    # Without parameters the % of an expression is only a %.
    cursor = await conn.execute(
        f"INSERT INTO pgqueue.jobs ({', '.join(row)}) VALUES ({', '.join(row.values())}) RETURNING id"
    )
    [(id,)] = await cursor.fetchall()
    return int(id)


def assert_names(error: psycopg.Error, column: str) -> None:
    diag = error.diag
    assert (diag.schema_name, diag.table_name, diag.column_name) == ("pgqueue", "jobs", column)
    assert (diag.message_primary or "").startswith(f"pgqueue.jobs: {column} must be ")


async def test_what_is_not_json_is_not_stored(conn, dsn):
    async with connected_as("producer", dsn) as producer:
        for text, error in NOT_JSON.items():
            with pytest.raises(error):
                await producer.execute("INSERT INTO pgqueue.jobs (type, payload) VALUES ('t', %s)", [text])
            with pytest.raises(InvalidJob):
                await enqueue.add_job(producer, NewJob(type="t", payload=text))
    assert await statuses(conn) == {}


async def test_copy_stores_all_or_nothing(conn, dsn):
    lines = [f't\t{{"i": {i}}}\t{i % 1000}\n' for i in range(1000)]
    bad = {
        "t\t{}\t1001\n": (pg.CheckViolation, "priority must be between"),
        "\t{}\t1\n": (pg.CheckViolation, "type must be"),
        't\t{"a": "\\\\u0000"}\t1\n': (pg.UntranslatableCharacter, "Unicode"),
        "t\t{}\n": (pg.BadCopyFileFormat, "missing data"),
        "t\t\\N\t1\n": (pg.NotNullViolation, "payload"),
    }
    async with connected_as("producer", dsn) as producer:
        for line, (error, text) in bad.items():
            with pytest.raises(error, match=text):
                await copy(producer, [*lines[:500], line, *lines[500:]])
            assert await statuses(conn) == {}
        await copy(producer, lines)
    assert await statuses(conn) == {"pending": 1000}


async def copy(conn: psycopg.AsyncConnection, lines: list[str]) -> None:
    async with conn.cursor().copy("COPY pgqueue.jobs (type, payload, priority) FROM STDIN") as copying:
        for line in lines:
            await copying.write(line)


async def test_no_payload_expands_after_it_was_measured(conn, dsn):
    """Values from a table may come compressed, at a size that says nothing."""
    smuggle = "INSERT INTO pgqueue.jobs (type, payload) SELECT 't', p FROM bag WHERE p IS NOT NULL"
    async with connected_as("producer", dsn) as producer:
        for method in await compressions(producer):
            await producer.execute(
                f"CREATE TEMP TABLE bag (p jsonb COMPRESSION {method}, q jsonb COMPRESSION {method})"
            )
            for contents in (
                f"jsonb_build_object('a', repeat('a', {2 * MIB - 100})), NULL",
                f"jsonb_build_object('a', repeat('a', {MIB})), NULL",
                # Small enough for any cheap test of the stored size, and 16 MB when it is read.
                "to_jsonb(array_fill(1e131071, ARRAY[128])), to_jsonb(array_fill(7, ARRAY[1000]))",
            ):
                await producer.execute(f"INSERT INTO bag VALUES ({contents})")
                stored = await value(producer, "SELECT pg_column_size(p) FROM bag")
                assert stored < 30_000, "it is compressed"
                with pytest.raises(pg.CheckViolation, match="payload must be at most 1 MiB"):
                    await producer.execute(smuggle)
                await producer.execute("DELETE FROM bag")
            await producer.execute(f"INSERT INTO bag SELECT jsonb_build_object('a', repeat('a', {MIB - 100}))")
            await producer.execute(smuggle)
            await producer.execute("DROP TABLE bag")
    worker = await MiniWorker(conn).register()
    for job in await worker.claim():
        assert len(json.loads(job.payload)["a"]) == MIB - 100


async def compressions(conn: psycopg.AsyncConnection) -> list[str]:
    allowed = await value(conn, "SELECT enumvals FROM pg_settings WHERE name = 'default_toast_compression'")
    return list(allowed)


async def test_settings_of_the_session_bend_no_rule(conn, dsn):
    async with connected_as("producer", dsn) as producer:
        for setting in (
            "DateStyle = 'SQL, DMY'",
            "IntervalStyle = 'sql_standard'",
            "TimeZone = 'Pacific/Kiritimati'",
            "extra_float_digits = -15",
            "bytea_output = 'escape'",
            "transform_null_equals = on",
            "default_transaction_isolation = 'serializable'",
            "plpgsql.extra_errors = 'all'",
            "client_encoding = 'LATIN1'",
            "lc_monetary = 'C'",
            "xmloption = 'document'",
        ):
            await producer.execute(f"SET {setting}")
        await insert(producer, "idempotency_key", "'k'")
        for column in REFUSED:
            with pytest.raises(pg.CheckViolation) as caught:
                await insert(producer, column, REFUSED[column][0])
            assert_names(caught.value, column)
        assert not await value(producer, "SELECT inserted FROM pgqueue.add_job('t', idempotency_key => 'k')")
    assert await statuses(conn) == {"pending": 1}


async def test_add_job_refuses_by_name(conn, dsn):
    async with connected_as("producer", dsn) as producer:
        for arguments, error, column in (
            ("'t', delay => '300000 years'", pg.CheckViolation, "delay"),
            ("'t', delay => '-300000 years'", pg.CheckViolation, "delay"),
            ("'t', delay => '1 s', run_at => now()", pg.CheckViolation, "delay"),
            ("'t', run_at => 'infinity'", pg.CheckViolation, "run_at"),
            ("'t', idempotency_key => ''", pg.CheckViolation, "idempotency_key"),
            ("'t', idempotency_key => repeat('k', 1000000)", pg.CheckViolation, "idempotency_key"),
            ("'t', idempotency_key => 'k', key_ttl => '1000 years'", pg.CheckViolation, "key_ttl"),
            ("'t', idempotency_key => 'k', key_ttl => '-1 s'", pg.CheckViolation, "key_ttl"),
            ("'t', idempotency_key => 'k', key_ttl => '1000000 mons -29999999 days'", pg.CheckViolation, "key_ttl"),
            ("'t', idempotency_key => 'k', key_ttl => NULL", pg.CheckViolation, "key_ttl"),
            ("NULL", pg.NotNullViolation, "type"),
            ("NULL, idempotency_key => 'k'", pg.NotNullViolation, "type"),
            ("'t', NULL, idempotency_key => 'k'", pg.NotNullViolation, "payload"),
            ("'t', priority => 5000, idempotency_key => 'k'", pg.CheckViolation, "priority"),
            ("'t', tags => NULL", pg.NotNullViolation, "tags"),
        ):
            with pytest.raises(error) as caught:
                await producer.execute(f"SELECT pgqueue.add_job({arguments})")
            assert caught.value.diag.column_name == column, arguments
        for text in ("\x00", "a\ud800"):
            for what in ({"type": text}, {"type": "t", "queue": text}, {"type": "t", "tags": [text]}):
                for call in (enqueue.add_job, lambda conn, job: enqueue.add_jobs(conn, [job])):
                    with pytest.raises(InvalidJob):
                        await call(producer, NewJob(**what))
    assert await statuses(conn) == {}
    assert await value(conn, "SELECT count(*) FROM pgqueue.idempotency_keys") == 0


async def test_edits_obey_the_same_rules(conn, dsn):
    ids = await add(conn, NewJob(type="t", priority=1), NewJob(type="t"))
    worker = await MiniWorker(conn).register()
    await worker.fail(await worker.claim(1), delay=None)
    assert await statuses(conn) == {"failed": 1, "pending": 1}
    async with connected_as("operator", dsn) as operator:
        for id in ids:
            for column, text in (
                ("run_at", "infinity"),
                ("run_at", "20000-01-01"),
                ("priority", 5000),
                ("queue", "a b"),
                ("timeout", "-1 s"),
                ("tags", [["a"], ["b"]]),
                ("tags", [None]),
                ("name", "n" * 201),
                ("thread_demand", 0),
                ("max_attempts", 0),
                ("payload", "a" * MIB),
            ):
                with pytest.raises(InvalidJob, match=f"pgqueue.jobs: {column} must be"):
                    await control.edit_job(operator, id, {column: text})
            for changes in ({"payload": "\x00"}, {"payload": "\ud800"}, {"id": 1}, {"run_at": "soon"}, {"queue": None}):
                with pytest.raises(InvalidJob):
                    await control.edit_job(operator, id, changes)
            for changes in ("[]", "1", "null"):
                with pytest.raises(pg.InvalidParameterValue):
                    await operator.execute("SELECT pgqueue.edit_job(%s, %s)", [id, changes])
            await control.edit_job(operator, id, {"payload": None, "timeout": None, "tags": ["a"]} | {"payload": 1})
    assert [json.loads(job.payload) for job in await read.list_jobs(conn)] == [1, 1]
    assert len(await read.list_failed(conn)) == 1


async def test_only_what_can_be_a_queue_is_paused(conn, dsn):
    async with connected_as("operator", dsn) as operator:
        for expression in ["NULL", *REFUSED["queue"]]:
            with pytest.raises(pg.CheckViolation, match="queue must be"):
                await operator.execute(f"SELECT pgqueue.pause_queue({expression})")
        for expression in ACCEPTED["queue"]:
            await operator.execute(f"SELECT pgqueue.pause_queue({expression})")
        for expression in ["NULL", *REFUSED["queue"], *ACCEPTED["queue"]]:
            await operator.execute(f"SELECT pgqueue.resume_queue({expression})")
    assert await value(conn, "SELECT count(*) FROM pgqueue.queues WHERE paused_at IS NULL") == len(ACCEPTED["queue"])


# What is let in


async def test_strange_jobs_harm_nobody(conn, dsn):
    strange: dict[int, str] = {}
    async with connected_as("producer", dsn) as producer:
        innocent = set(await add(producer, *[NewJob(type="t", payload=f'{{"i": {i}}}') for i in range(50)]))
        for column, expressions in ACCEPTED.items():
            for expression in expressions:
                strange[await insert(producer, column, expression)] = f"{column} {expression}"
        for name, text in PAYLOADS.items():
            cursor = await producer.execute(
                "INSERT INTO pgqueue.jobs (type, payload) VALUES ('t', %s) RETURNING id", [text]
            )
            strange[(await cursor.fetchall())[0][0]] = name
        innocent |= set(await add(producer, *[NewJob(type="t", payload=f'{{"i": {i}}}') for i in range(50)]))
    await all_can_be_read(conn, {*innocent, *strange})

    worker = await MiniWorker(conn).register()
    jobs = await worker.claim(1000)
    [scheduled] = {*innocent, *strange} - {job.id for job in jobs}
    assert strange.pop(scheduled) == "run_at '2999-12-30'"
    await all_can_be_read(conn, {*innocent, *strange})
    unreadable = [job for job in jobs if not is_readable(job)]
    assert {strange[job.id] for job in unreadable} <= set(MAY_BE_UNREADABLE)
    assert {"5000 digits", "131000 digits", "1e5000"} <= {strange[job.id] for job in unreadable}
    for job in unreadable:
        assert await worker.fail([job], delay=None, reason="undecodable") == {job.id: finish.Fate(False, None)}
    readable = [job for job in jobs if job not in unreadable]
    assert await worker.complete(readable) == {job.id for job in readable}
    await all_can_be_read(conn, {*innocent, *strange})
    assert await statuses(conn) == {"completed": len(readable), "failed": len(unreadable), "scheduled": 1}
    for id in innocent:
        assert (await read.get_job(conn, id)).status is Status.COMPLETED

    # And back: an operator edits, retries and cancels them.
    for job in unreadable:
        await control.edit_job(conn, job.id, {"name": "another try"})
        await control.retry_job(conn, job.id)
        await control.cancel_job(conn, job.id)
    assert await value(conn, "SELECT count(*) FROM pgqueue.audit") == 3 * len(unreadable)


def is_readable(job: Claimed) -> bool:
    assert isinstance(job.payload, str)
    assert len(job.payload.encode()) <= MIB
    try:
        json.loads(job.payload)
    except UNREADABLE:
        return False
    return True


async def all_can_be_read(conn: psycopg.AsyncConnection, ids: set[int]) -> None:
    listed = await read.list_jobs(conn, limit=10_000)
    assert ids <= {job.id for job in listed}
    await read.list_failed(conn, limit=10_000)
    for job in listed:
        assert await read.get_job(conn, job.id) == job
        assert isinstance(job, Job)
        assert await read.why(conn, job.id)
        await read.list_attempts(conn, job.id)
    for status in Status:
        await read.count_jobs(conn, status)
    for queue in {job.queue for job in listed}:
        await read.list_jobs(conn, queue=queue)
    for type in {job.type for job in listed}:
        await read.list_jobs(conn, type=type)
    for tag in {tag for job in listed for tag in job.tags}:
        assert await read.list_jobs(conn, tag=tag)
    for view in ("job_metrics", "failed_jobs", "leases", "queue_stats", "worker_stats", "failure_groups", "audit"):
        await conn.execute(f"SELECT sum(length(v::text)) FROM pgqueue.{view} v")


# Whatever Hypothesis thinks of

TEXTS = st.one_of(
    st.text(st.characters(codec=None), max_size=20),
    st.text("\x00\x01\n\x1b\x7f\x85\u200b\u202e\ufeff\ud800\udfff😀'\"\\%{}", max_size=8),
    st.text("aZ_.:/-0", max_size=70),
    st.integers(1, 400).map(lambda n: "x" * n),
)
INTEGERS = st.one_of(st.integers(-3, 3), st.integers(-1100, 1100), st.integers(-(2**31), 2**31 - 1))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=10,
)
PAYLOAD_TEXTS = st.one_of(
    JSON.map(json.dumps),
    JSON.map(lambda tree: json.dumps(tree, ensure_ascii=False)),
    st.sampled_from([*PAYLOADS.values(), *NOT_JSON]),
    st.integers(1, 140_000).map(lambda n: "7" * n),
    st.integers(1, 20_000).map(lambda n: "[" * n + "]" * n),
    st.tuples(st.integers(1, 40), st.integers(-17_000, 132_000)).map(lambda t: f"[{', '.join([f'1e{t[1]}'] * t[0])}]"),
    TEXTS,
)
TIMES = st.one_of(
    st.sampled_from(["infinity", "-infinity", "epoch", "now", "tomorrow", "9999-12-31", "0001-01-01 BC"]),
    st.tuples(st.integers(1, 300_000), st.integers(1, 12), st.sampled_from(["", " BC"])).map(
        lambda t: f"{t[0]:04}-{t[1]:02}-28{t[2]}"
    ),
)
INTERVALS = st.tuples(INTEGERS, INTEGERS, INTEGERS).map(lambda t: f"{t[0]} months {t[1]} days {t[2]} milliseconds")
COLUMNS: dict[str, st.SearchStrategy[Any]] = {
    "type": TEXTS,
    "payload": PAYLOAD_TEXTS,
    "queue": TEXTS,
    "name": TEXTS,
    "idempotency_key": TEXTS,
    "tags": st.lists(TEXTS | st.none(), max_size=40),
    "priority": INTEGERS,
    "thread_demand": INTEGERS,
    "max_attempts": INTEGERS,
    "run_at": TIMES,
    "timeout": INTERVALS,
}
# In a row of many hostile values the first one is refused, and the others are not even looked at.
ONE = st.sampled_from(list(COLUMNS)).flatmap(lambda name: COLUMNS[name].map(lambda value: {"type": "t", name: value}))
MANY = st.fixed_dictionaries({}, optional=COLUMNS).map(lambda row: {"type": "t"} | row)
REFUSALS = (
    pg.CheckViolation,
    pg.NotNullViolation,
    pg.UniqueViolation,
    pg.DataError,
    pg.StatementTooComplex,
    UnicodeEncodeError,
)


@pytest.mark.parametrize("rows", [ONE, MANY], ids=["one column", "many columns"])
def test_whatever_is_inserted(dsn, conn, runner, rows):
    worker = runner.run(MiniWorker(conn).register())

    @settings(max_examples=60, deadline=None, database=None)
    @given(row=rows)
    def check(row: dict[str, Any]) -> None:
        before = ids_of(producer)
        if (refusal := refused(producer, row)) is not None:
            assert ids_of(producer) == before
        if isinstance(refusal, pg.CheckViolation):
            assert refusal.diag.column_name in row
            assert_names(refusal, refusal.diag.column_name)
        producer.execute("INSERT INTO pgqueue.jobs (type) VALUES ('innocent')")
        runner.run(everything_ends(conn, worker, ids_of(producer) - before))

    with psycopg.connect(dsn_of("test_producer", dsn), autocommit=True) as producer:
        check()


def refused(conn: psycopg.Connection, row: dict[str, Any]) -> Exception | None:
    try:
        conn.execute(
            f"INSERT INTO pgqueue.jobs ({', '.join(row)}) VALUES ({', '.join(['%s'] * len(row))})", list(row.values())
        )
    except REFUSALS as error:
        return error
    return None


def ids_of(conn: psycopg.Connection) -> set[int]:
    return {id for (id,) in conn.execute("SELECT id FROM pgqueue.jobs")}


async def everything_ends(conn: psycopg.AsyncConnection, worker: MiniWorker, ids: set[int]) -> None:
    for id in ids:
        job = await read.get_job(conn, id)
        assert await read.why(conn, id)
        if job.status is Status.SCHEDULED:
            await control.retry_job(conn, id)
    jobs = await worker.claim()
    assert {job.id for job in jobs} == ids
    bad = [job for job in jobs if not is_readable(job)]
    good = [job for job in jobs if job not in bad]
    assert "innocent" in {job.type for job in good}
    assert len(await worker.complete(good)) == len(good)
    assert len(await worker.fail(bad, delay=None, reason="undecodable")) == len(bad)
    assert await finish.owned(conn, [Lease(id, worker.tokens[id]) for id in ids]) == set()


# What handlers return and raise

BAD_RESULTS = [
    r'"\u0000"',
    r'"\ud800"',
    '"\x00"',
    '"\ud800"',
    "not JSON",
    "",
    "NaN",
    "1e131072",
    "[" * 40_000 + "]" * 40_000,
]


async def test_a_result_that_cannot_be_stored_fails_its_own_job(conn):
    ids = await add(conn, *[NewJob(type="t") for _ in range(100)])
    worker = await MiniWorker(conn).register()
    assert len(await worker.claim()) == 100
    bad = dict(zip(ids[3::10], BAD_RESULTS, strict=False))
    now = time.monotonic()
    ends = [finish.Completed(id, worker.tokens[id], now, now, 1, bad.get(id, '{"ok": 1}')) for id in ids]
    assert await finish.complete(conn, ends) == set(ids), "all of them ended, none is a lost lease"
    assert await statuses(conn) == {"completed": 100 - len(BAD_RESULTS), "failed": len(BAD_RESULTS)}
    for id in bad:
        job = await read.get_job(conn, id)
        assert (job.status, job.reason, job.attempt) == (Status.FAILED, "bad_result", 1), "effects are not repeated"
        assert "the result cannot be stored" in job.error
        [attempt] = await read.list_attempts(conn, id)
        assert (attempt.outcome, attempt.reason) == ("failed", "bad_result")
    for id in ids:
        assert id in bad or (await read.get_job(conn, id)).result == '{"ok": 1}'
    assert await finish.complete(conn, ends) == set(), "the fence stands for them, too"


async def test_a_result_that_cannot_be_stored_in_the_callers_transaction(conn):
    [id] = await add(conn, NewJob(type="t"))
    worker = await MiniWorker(conn).register()
    [job] = await worker.claim()
    with pytest.raises(pg.UntranslatableCharacter):
        async with conn.transaction():
            await worker.complete([job], r'"\u0000"')
    assert (await read.get_job(conn, id)).status is Status.RUNNING
    assert await worker.complete([job]) == {id}


async def test_an_error_that_cannot_be_stored_ends_its_job_without_it(conn):
    ids = await add(conn, *[NewJob(type="t", max_attempts=2) for _ in range(60)])
    worker = await MiniWorker(conn).register()
    assert len(await worker.claim()) == 60
    texts = {ids[5]: "a\x00b", ids[20]: "a\ud800b", ids[21]: "\x00", ids[40]: "x" * 1_000_000}
    delays = {ids[1]: float("inf"), ids[2]: float("nan"), ids[3]: 1e300, ids[4]: -1e300, ids[5]: 60.0}
    now = time.monotonic()
    fates = await finish.fail(
        conn,
        [
            finish.Failed(id, worker.tokens[id], now, now, 1, delays.get(id, 60.0), "error", text, text, text)
            for id in ids
            for text in [texts.get(id, "no")]
        ],
    )
    assert fates.keys() == set(ids)
    assert all(fate.again for fate in fates.values())
    assert await statuses(conn) == {"scheduled": 60}
    for id in (ids[5], ids[20], ids[21]):
        assert "the error cannot be stored" in (await read.get_job(conn, id)).error
        assert "the error cannot be stored" in (await read.list_attempts(conn, id))[0].error
    assert (await read.get_job(conn, ids[0])).error == "no"
    for job in await read.list_jobs(conn, limit=100):
        assert job.run_at.year < 2100
    # Those that were to be tried at once are due.
    assert await promote.promote(conn, promote.DueFloor()) == 2


async def test_an_id_that_is_in_the_dead_letter_queue_already_holds_up_nobody(conn):
    """Ids repeat after a restore of the data alone, which does not set the sequences."""
    ids = await add(conn, *[NewJob(type="t") for _ in range(4)])
    worker = await MiniWorker(conn).register()
    jobs = await worker.claim()
    await conn.execute(
        "INSERT INTO pgqueue.jobs_failed (id, type, status, finished_at) VALUES (%s, 't', 'failed', now())", [ids[1]]
    )
    assert (await worker.fail(jobs, delay=None)).keys() == set(ids)
    assert await statuses(conn) == {"failed": 4, "cancelled": 1}, "with a twin, it has no place there"


async def test_poison_whose_id_is_in_the_dead_letter_queue_already_holds_up_nobody(conn):
    ids = await add(conn, *[NewJob(type="t") for _ in range(3)])
    assert len(await MiniWorker(conn).claim()) == 3
    await conn.execute("UPDATE pgqueue.jobs_live SET lost = 2, threads_used = 1 WHERE id <> %s", [ids[0]])
    await conn.execute(
        "INSERT INTO pgqueue.jobs_failed (id, type, status, finished_at) VALUES (%s, 't', 'failed', now())", [ids[1]]
    )
    assert await rescue.rescue(conn) == (3, 1)
    assert await statuses(conn) == {"pending": 1, "cancelled": 1, "failed": 2}
    error = "SELECT error FROM pgqueue.jobs_finished"
    assert await value(conn, error) == "3 workers died while they ran this job"


async def test_snoozed_for_ever_and_cancelled_with_a_bad_word(conn):
    ids = await add(conn, *[NewJob(type="t") for _ in range(6)])
    worker = await MiniWorker(conn).register()
    await worker.claim()
    now = time.monotonic()
    delays = [float("inf"), float("nan"), 1e300, -1.0]
    snoozes = [finish.Snoozed(id, worker.tokens[id], delay) for id, delay in zip(ids, delays, strict=False)]
    assert await finish.snooze(conn, snoozes) == set(ids[:4])
    cancels = [finish.Cancelled(id, worker.tokens[id], now, now, 1, "\x00") for id in ids[4:]]
    assert await finish.cancel(conn, cancels) == set(ids[4:])
    assert await statuses(conn) == {"scheduled": 4, "cancelled": 2}
    assert len(await read.list_jobs(conn)) == 6


# The limits of messages, transactions and numbers


@pytest.fixture(scope="module")
def two_phase_server(server: PostgresServer) -> Iterator[str]:
    """The servers of the other tests refuse PREPARE TRANSACTION, as PostgreSQL does unless it is told otherwise."""
    ram = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="pgqueue-", dir=ram) as directory:
        Path(directory).chmod(0o711)
        other = start_postgres(
            Path(directory), bin_dir=server.bin_dir, fast=True, settings={"max_prepared_transactions": "2"}
        )
        try:
            migrate.up(other.dsn)
            yield other.dsn
        finally:
            other.stop()


async def test_two_phase_commit(two_phase_server):
    async with await psycopg.AsyncConnection.connect(two_phase_server, autocommit=True) as conn:
        # Nobody sleeps, so nobody is woken.
        await prepare(conn, "one")
        sleeper = await MiniWorker(conn).register(listening=True)
        await workers.mark_idle(conn, sleeper.who.worker_id)
        with pytest.raises(pg.FeatureNotSupported, match=r"cannot PREPARE .* NOTIFY"):
            await prepare(conn, "two")
        await conn.execute("ROLLBACK")
        await conn.execute("UPDATE pgqueue.switches SET enabled = false WHERE name = 'wake'")
        await prepare(conn, "three")
        assert not await workers.may_sleep(conn), "the first one may have seen this worker busy"
        assert await sleeper.claim() == []
        await conn.execute("COMMIT PREPARED 'one'")
        await conn.execute("COMMIT PREPARED 'three'")
        assert await workers.may_sleep(conn)
        assert [job.type for job in await sleeper.claim()] == ["one", "three"]


async def prepare(conn: psycopg.AsyncConnection, name: str) -> None:
    await conn.execute("BEGIN")
    await conn.execute("INSERT INTO pgqueue.jobs (type) VALUES (%s)", [name])
    await conn.execute(f"PREPARE TRANSACTION '{name}'")


async def test_long_names_wake_sleepers(conn, dsn):
    """A NOTIFY holds 8000 bytes, and a channel 63: neither is ever filled from a row."""
    sleeper = await MiniWorker(conn).register(listening=True)
    await conn.execute(f'LISTEN "{workers.channel(sleeper.who.worker_id)}"')
    await workers.mark_idle(conn, sleeper.who.worker_id)
    async with connected_as("producer", dsn) as producer:
        await producer.execute(
            "INSERT INTO pgqueue.jobs (queue, type, payload, name)"
            " SELECT repeat(chr(97 + i), 63), repeat(chr(128512 + i), 128), to_jsonb(repeat('a', 1000000)),"
            " repeat('n', 200) FROM generate_series(1, 20) i"
        )
    [note] = [note async for note in conn.notifies(timeout=20, stop_after=1)]
    assert len(note.payload) < 10
    assert len(await sleeper.claim()) == 20


@pytest.mark.parametrize("last", [2**31 - 2, 2**63 - 2])
async def test_sequences_far_on(conn, last):
    cursor = await conn.execute("SELECT sequencename, data_type::text FROM pg_sequences WHERE schemaname = 'pgqueue'")
    sequences = await cursor.fetchall()
    assert {type for _, type in sequences} == {"bigint"}
    for name, _ in sequences:
        await conn.execute("SELECT setval(%s, %s)", [f"pgqueue.{name}", last])
    worker = await MiniWorker(conn).register()
    if last > 2**62:
        [id] = await add(conn, NewJob(type="t"))
        for call in (enqueue.add_job, lambda conn, job: enqueue.add_jobs(conn, [job])):
            with pytest.raises(InvalidJob, match="reached maximum value of sequence"):
                await call(conn, NewJob(type="t"))
        [job] = await worker.claim()
        assert job.id == id == job.seq == 2**63 - 1
        assert await worker.complete([job]) == {id}
        assert (await read.get_job(conn, id)).status is Status.COMPLETED
        return
    ids = await add(conn, *[NewJob(type="t", idempotency_key=f"k{i}" if i % 2 else None) for i in range(100)])
    jobs = await worker.claim()
    assert [job.id for job in jobs] == ids == list(range(last + 1, last + 101))
    await worker.fail(jobs[:10], delay=None)
    await worker.fail(jobs[10:20], delay=0.0)
    await finish.snooze(conn, [finish.Snoozed(job.id, worker.tokens[job.id], 0.0) for job in jobs[20:30]])
    await finish.release(conn, [Lease(job.id, worker.tokens[job.id]) for job in jobs[30:40]])
    await conn.execute(
        "UPDATE pgqueue.workers SET expires_at = now() - interval '1 s' WHERE id = %s", [worker.who.worker_id]
    )
    assert await rescue.rescue(conn) == rescue.Rescued(60, 0)
    assert await promote.promote(conn, promote.DueFloor()) == 20
    for job in jobs[:10]:
        await control.retry_job(conn, job.id)
    other = await MiniWorker(conn).register()
    assert len(await other.complete(await other.claim(200))) == 100
    assert await statuses(conn) == {"completed": 100}
    page = await read.list_jobs(conn, before=ids[50], limit=10)
    assert [job.id for job in page] == ids[49:39:-1]
    assert (await read.list_attempts(conn, ids[0]))[0].id > 2**31 - 2
    assert await value(conn, "SELECT min(id) FROM pgqueue.audit") == 2**31 - 1


async def test_an_attempt_count_at_its_end(conn):
    [id] = await add(conn, NewJob(type="t"))
    worker = await MiniWorker(conn).register()
    jobs = await worker.claim()
    await conn.execute("UPDATE pgqueue.jobs_live SET attempt = 2147483646 WHERE id = %s", [id])
    assert not (await worker.fail(jobs, delay=1.0))[id].again
    assert (await read.get_job(conn, id)).attempt == 2**31 - 1
    await control.retry_job(conn, id)
    assert (await read.get_job(conn, id)).attempt == 0


@pytest.mark.parametrize("column", ["attempt", "lost"])
async def test_a_count_beyond_its_end_harms_nobody_else(conn, column):
    """Only the owner of the tables can write such a number; then it must not stop finishing, nor rescue."""
    ids = await add(conn, *[NewJob(type="t")] * 3)
    await conn.execute(f"UPDATE pgqueue.jobs_live SET {column} = 2147483647 WHERE id = %s", [ids[1]])
    worker = await MiniWorker(conn).register()
    await worker.claim()
    await conn.execute("UPDATE pgqueue.workers SET expires_at = now() - interval '1 s'")
    assert (await rescue.rescue(conn)).jobs == 3
    again = await MiniWorker(conn).register()
    jobs = await again.claim()
    ended = await again.complete(jobs)
    assert {ids[0], ids[2]} <= ended


async def test_duplicates_use_up_nothing(conn, dsn):
    place = await value(conn, "SELECT last_value FROM pgqueue.ready")
    async with connected_as("producer", dsn) as producer:
        cursor = await producer.execute(
            "SELECT a.id, a.inserted FROM generate_series(1, 1000) i,"
            " LATERAL pgqueue.add_job('t', '{}', idempotency_key => 'k' || i % 2) a"
        )
        answers = await cursor.fetchall()
    assert sum(inserted for _, inserted in answers) == len({id for id, _ in answers}) == 2
    assert await statuses(conn) == {"pending": 2}
    assert await value(conn, "SELECT last_value FROM pgqueue.ready") - place <= 2
