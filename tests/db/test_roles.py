"""Who may do what: every role tries every statement, and gets exactly what the table says."""

import re
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import uuid4

import psycopg
import pytest
from psycopg import errors as pg
from psycopg import sql

from pgqueue import control, enqueue, finish, migrate, promote, prune, read, rescue, steps, workers
from pgqueue.errors import LeaseLost
from pgqueue.job import Lease, NewJob, Status
from tests.db.logins import LOGINS, PASSWORD, connected_as, dsn_of
from tests.db.queue import MiniWorker, add, statuses, value

ROLES = {role[0].upper(): role for role in LOGINS}

ALLOWED = {
    "type": "'t'",
    "payload": "'{}'",
    "queue": "'q'",
    "priority": "1",
    "run_at": "now()",
    "thread_demand": "2",
    "max_attempts": "3",
    "timeout": "'5 min'",
    "idempotency_key": "'key'",
    "tags": "'{a,b}'",
    "name": "'n'",
}
FORBIDDEN = """
    id status parked seq attempt lost created_at worker_id lease_token threads_used started_at cancel_requested_at
    progress finished_at result reason error_type error
"""
TABLES = """
    jobs jobs_live jobs_failed jobs_finished attempts workers drains queues idempotency_keys audit switches steps
    effects types totals series
"""
VIEWS = "job_metrics failed_jobs leases queue_stats worker_stats failure_groups"
ACCESS = "users refresh_tokens revoked_tokens http_answers"
"""The tables of the HTTP API alone: hashes, and answers with what they said."""
SEQUENCES = "job_ids ready attempt_ids audit_id_seq users_id_seq"
FORGED_TRIGGER = """CREATE TEMP TABLE t (id bigint, idempotency_key text, type text, payload jsonb);
             CREATE TRIGGER forge BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION pgqueue.keep_key()"""

# For whom these statements work. For all others each is refused for want of a privilege.
MATRIX = {
    "PW": [
        "INSERT INTO pgqueue.jobs (type, payload) VALUES ('t', '{}')",
        "INSERT INTO pgqueue.jobs (type, payload) VALUES ('t', '{}') RETURNING id",
        "INSERT INTO pgqueue.jobs (type, run_at) VALUES ('t', now() + interval '1 hour') RETURNING id",
        f"INSERT INTO pgqueue.jobs ({', '.join(ALLOWED)}) VALUES ({', '.join(ALLOWED.values())})",
        "INSERT INTO pgqueue.jobs (type, payload) SELECT 't', '{}' FROM generate_series(1, 3)",
        "COPY pgqueue.jobs (type, payload) FROM STDIN\nt\t{}\nt\t{}\n",
        "SELECT nextval('pgqueue.job_ids'), nextval('pgqueue.ready')",
        "SELECT pgqueue.add_job('t')",
        "SELECT * FROM pgqueue.add_job('t', '{}', idempotency_key => 'mine', delay => '1 h')",
        "SELECT pgqueue.assert_lease(:running, ':token')",
    ],
    "PWAO": [
        "SELECT id FROM pgqueue.jobs",
        "SELECT pgqueue.broken_rule('q', 't', 0, now(), 1, 5, NULL, NULL, NULL, '{}', '{}')",
    ],
    "W": [
        *[f"INSERT INTO pgqueue.jobs (type, {column}) VALUES ('t', DEFAULT)" for column in FORBIDDEN.split()],
        "INSERT INTO pgqueue.jobs (type, payload) VALUES ('t', '{}') RETURNING payload",
        "COPY pgqueue.jobs (type, status) FROM STDIN\nt\tpending\n",
        "INSERT INTO pgqueue.jobs_live (type) VALUES ('t')",
        "INSERT INTO pgqueue.jobs_failed (type, status) VALUES ('t', 'failed')",
        "INSERT INTO pgqueue.jobs_finished (type, status, finished_at) VALUES ('t', 'completed', now())",
        "INSERT INTO pgqueue.idempotency_keys (key, fingerprint, job_id, expires_at) VALUES ('f', 'f', 1, now())",
        "INSERT INTO pgqueue.attempts (job_id, attempt, outcome, reason) VALUES (1, 1, 'failed', 'error')",
        "INSERT INTO pgqueue.steps (job_id, name) VALUES (1, 'forged')",
        "INSERT INTO pgqueue.effects (key, job_id, expires_at) VALUES ('k', 1, now())",
        "INSERT INTO pgqueue.types (name, queue, schema) VALUES ('t', 'q', '{}')",
        "SELECT pgqueue.prune_access()",
        "INSERT INTO pgqueue.tallies (event, queue, type, jobs) VALUES ('completed', 'q', 't', 1)",
        "DELETE FROM pgqueue.series",
        "SELECT FROM pgqueue.series FOR UPDATE",
        "SELECT pgqueue.bucket(1.5)",
        "SELECT id FROM pgqueue.jobs FOR UPDATE",
        "UPDATE pgqueue.jobs SET priority = 5 WHERE id = :pending",
        "UPDATE pgqueue.workers SET draining = true",
        "DELETE FROM pgqueue.jobs WHERE id = :pending",
        "DELETE FROM pgqueue.idempotency_keys",
        "LOCK TABLE pgqueue.jobs IN SHARE MODE",
        "SELECT nextval('pgqueue.attempt_ids')",
        "SELECT pgqueue.wake('{default}', '{t}', '{1}')",
        "SELECT pgqueue.claim_jobs('{default}', '{0}', '{0}', NULL, 1, 5, ':token', ':token')",
        "SELECT pgqueue.complete_jobs('{:running}', '{:token}', NULL, '{1}', '{0}', '{0}')",
        "SELECT pgqueue.make_partitions(30)",
        "SELECT pgqueue.drop_partitions('30 days')",
    ],
    "WAO": [
        *[f"SELECT * FROM pgqueue.{table}" for table in TABLES.split()],
        "SELECT * FROM pgqueue.alembic_version",
        "SELECT payload FROM pgqueue.jobs",
        "SELECT lease_token FROM pgqueue.jobs",
        "COPY pgqueue.jobs_live (payload) TO STDOUT",
        "SELECT pgqueue.why(:pending)",
        "SELECT pgqueue.backlog('default')",
        "SELECT pgqueue.fold()",
        "SELECT pgqueue.bounds()",
        "SELECT pgqueue.snapshot_holders()",
    ],
    "AO": [f"SELECT * FROM pgqueue.{view}" for view in f"{VIEWS} chores".split()],
    "O": [
        "SELECT pgqueue.cancel_job(:pending, 'why')",
        "SELECT pgqueue.cancel_job(:running, 'why')",
        "SELECT pgqueue.retry_job(:failed)",
        """SELECT pgqueue.edit_job(:pending, '{"priority": 7}')""",
        """SELECT pgqueue.edit_job(:failed, '{"priority": 7}')""",
        "SELECT pgqueue.pause_queue('default', 'why')",
        "SELECT pgqueue.resume_queue('default')",
        "SELECT pgqueue.resolve_job(id, 'retry') FROM pgqueue.jobs WHERE reason = 'in_doubt'",
        "SELECT pgqueue.delete_job(:failed, 'why')",
        "SELECT pgqueue.act_on_jobs('{:failed}', 'retry')",
        "SELECT pgqueue.drain_worker((SELECT id FROM pgqueue.workers LIMIT 1), 'why')",
    ],
    "PWAOS": ["LISTEN pgqueue_anything", "NOTIFY pgqueue_anything", "SET LOCAL pgqueue.actor = 'ana'"],
    "": [
        *[f"TRUNCATE pgqueue.{table} CASCADE" for table in f"{TABLES} {ACCESS}".split()],
        *[f"SELECT * FROM pgqueue.{table}" for table in ACCESS.split()],
        *[f"DELETE FROM pgqueue.{table}" for table in ACCESS.split()],
        "SELECT pgqueue.revoke_token('jti', now())",
        "SELECT pgqueue.audit_access('add_user', '{}')",
        *[f"SELECT setval('pgqueue.{sequence}', 1000000)" for sequence in SEQUENCES.split()],
        *[f"ALTER SEQUENCE pgqueue.{sequence} RESTART" for sequence in SEQUENCES.split()],
        "SELECT nextval('pgqueue.audit_id_seq')",
        "INSERT INTO pgqueue.queues (name, paused_at) VALUES ('q', now())",
        "UPDATE pgqueue.queues SET paused_at = now()",
        "SELECT FROM pgqueue.chores FOR SHARE",
        "INSERT INTO pgqueue.drains SELECT id FROM pgqueue.workers",
        "DELETE FROM pgqueue.tallies",
        "UPDATE pgqueue.totals SET value = 0",
        "UPDATE pgqueue.switches SET enabled = false",
        "INSERT INTO pgqueue.audit (actor, action) VALUES ('boss', 'cancel')",
        "UPDATE pgqueue.audit SET actor = 'somebody else'",
        "DELETE FROM pgqueue.audit",
        "UPDATE pgqueue.alembic_version SET version_num = 'r9999'",
        "SELECT pgqueue.take_key('k', 'f', 1, '1 hour')",
        "SELECT pgqueue.fingerprint('t', '{}')",
        "SELECT pgqueue.write_audit('cancel', 1, 'q', 'forged')",
        "SELECT pgqueue.refuse_status(1, 'v', 'a')",
        "SELECT pgqueue.refuse_job()",
        "SELECT pgqueue.refuse('{a,b}')",
        "SELECT pgqueue.schedule_job()",
        "SELECT pgqueue.keep_key()",
        "SELECT pgqueue.tell_of_inserted()",
        FORGED_TRIGGER,
        "CREATE TABLE pgqueue.mine (id int)",
        "CREATE FUNCTION pgqueue.sha256(bytea) RETURNS bytea LANGUAGE sql AS 'SELECT $1'",
        "ALTER TABLE pgqueue.jobs_finished DETACH PARTITION pgqueue.jobs_finished_default",
        "ALTER TABLE pgqueue.jobs_live DISABLE TRIGGER ALL",
        "DROP TABLE pgqueue.jobs_finished_default",
        "DROP SCHEMA pgqueue CASCADE",
        "COMMENT ON TABLE pgqueue.jobs IS 'mine'",
    ],
}


async def some_jobs(conn: psycopg.AsyncConnection) -> dict[str, object]:
    await add(conn, *[NewJob(type="t", priority=priority) for priority in (3, 2, 1)])
    worker = await MiniWorker(conn).register()
    failed, running = await worker.claim(2)
    await worker.fail([failed], delay=None)
    return {
        "pending": await value(conn, "SELECT id FROM pgqueue.jobs WHERE status = 'pending'"),
        "failed": failed.id,
        "running": running.id,
        "token": worker.tokens[running.id],
    }


async def forget_tomorrow(conn: psycopg.AsyncConnection) -> None:
    tomorrow = await value(conn, "SELECT to_char(now() AT TIME ZONE 'UTC' + interval '1 day', 'YYYYMMDD')")
    await conn.execute(f"DROP TABLE pgqueue.jobs_finished_{tomorrow}")


# The table


@pytest.mark.parametrize("letter", ROLES, ids=ROLES.get)
@pytest.mark.usefixtures("logins")
async def test_matrix(conn, dsn, letter):
    jobs = await some_jobs(conn)
    wrong = []
    async with connected_as(ROLES[letter], dsn) as mine:
        for who, statements in MATRIX.items():
            expected = "allowed" if letter in who else "denied"
            for statement in statements:
                for name, id in jobs.items():
                    statement = statement.replace(f":{name}", str(id))
                if (answer := await tried(mine, statement)) != expected:
                    wrong.append(f"{statement}: should be {expected}, but: {answer}")
    assert not wrong, "\n".join(wrong)


async def tried(conn: psycopg.AsyncConnection, statement: str) -> str:
    try:
        async with conn.transaction(force_rollback=True):
            if statement.startswith("COPY"):
                command, _, data = statement.partition("\n")
                async with conn.cursor().copy(command) as copy:
                    if data:
                        await copy.write(data)
                    else:
                        assert [row async for row in copy]
            else:
                await conn.execute(statement)
    except pg.InsufficientPrivilege:
        return "denied"
    except psycopg.Error as error:
        return f"{error.sqlstate} {error}"
    return "allowed"


async def test_the_table_leaves_nothing_out(conn):
    """A table, function or column that is new in the schema needs its lines above."""
    tested = " ".join(statement for statements in MATRIX.values() for statement in statements)
    cursor = await conn.execute(
        """
        SELECT relname FROM pg_class WHERE relnamespace = 'pgqueue'::regnamespace AND relkind IN ('r', 'p', 'v', 'S')
            AND relname !~ '_(default|[0-9]{8})$'
        UNION ALL SELECT proname FROM pg_proc WHERE pronamespace = 'pgqueue'::regnamespace
        """
    )
    missing = [name for (name,) in await cursor.fetchall() if not re.search(rf"pgqueue\.{name}\b", tested)]
    assert not missing
    cursor = await conn.execute(
        "SELECT attname FROM pg_attribute WHERE attrelid = 'pgqueue.jobs'::regclass AND attnum > 0 AND NOT attisdropped"
    )
    assert {name for (name,) in await cursor.fetchall()} == {*ALLOWED, *FORBIDDEN.split()}


async def test_nobody_has_what_no_role_needs(conn):
    """TRUNCATE passes every rule, TRIGGER runs code as whoever writes, REFERENCES keeps rows from being deleted."""
    cursor = await conn.execute(
        """
        SELECT c.relname, a.grantee::regrole::text, a.privilege_type
        FROM pg_class c, aclexplode(coalesce(c.relacl, acldefault('r', c.relowner))) a
        WHERE c.relnamespace = 'pgqueue'::regnamespace AND c.relkind IN ('r', 'p', 'v') AND a.grantee <> c.relowner
          AND (a.grantee = 0 OR a.is_grantable OR a.privilege_type NOT IN ('SELECT', 'INSERT', 'UPDATE', 'DELETE'))
        """
    )
    assert await cursor.fetchall() == []
    to_public = """
        SELECT 'schema', nspname FROM pg_namespace n, aclexplode(n.nspacl) a WHERE nspname = 'pgqueue' AND a.grantee = 0
        UNION ALL
        SELECT 'sequence', relname FROM pg_class c, aclexplode(coalesce(c.relacl, acldefault('s', c.relowner))) a
        WHERE c.relnamespace = 'pgqueue'::regnamespace AND c.relkind = 'S' AND a.grantee = 0
    """
    assert await (await conn.execute(to_public)).fetchall() == []


async def test_functions_are_pinned_and_not_public(conn):
    cursor = await conn.execute(
        """
        SELECT p.proname, p.prosecdef, p.proconfig,
               EXISTS (SELECT FROM aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a WHERE a.grantee = 0)
        FROM pg_proc p WHERE p.pronamespace = 'pgqueue'::regnamespace
            -- The others were bound to what they name when they were made.
            AND (p.prosecdef OR p.prosqlbody IS NULL)
        """
    )
    functions = await cursor.fetchall()
    assert sum(definer for _, definer, _, _ in functions) > 10
    for name, _, settings, public in functions:
        assert "search_path=pg_catalog, pg_temp" in (settings or []), f"{name} looks where its caller says"
        assert public == (name == "broken_rule"), f"everybody may call {name}"


# What the roles are for


@pytest.mark.usefixtures("logins")
async def test_a_worker_needs_no_other_role(conn, dsn):
    async with connected_as("worker", dsn) as mine:
        await migrate.check_schema(mine)
        worker = await MiniWorker(mine, types=["t"], threads=4).register(listening=True)
        await mine.execute(sql.SQL("LISTEN {}").format(sql.Identifier(workers.channel(worker.who.worker_id))))
        pulse = {"threads_used": 0, "completed": 0, "failed": 0, "listening": True}
        assert await workers.heartbeat(mine, worker.worker, **pulse) is not None
        await workers.mark_idle(mine, worker.who.worker_id)
        assert await workers.may_sleep(mine)
        # Its handlers enqueue, too.
        [plain] = await add(mine, NewJob(type="t"))
        assert (await enqueue.add_job(mine, NewJob(type="t", idempotency_key="k"))).inserted
        await add(mine, *[NewJob(type="t") for _ in range(5)], NewJob(type="other"), NewJob(type="t", delay=0.01))
        await workers.mark_busy(mine, worker.who.worker_id)

        first, retried, fails, snoozed, released, cancelled, lost = await worker.claim()
        parked = await MiniWorker(mine, types=["other"]).register()
        [other] = await parked.claim()
        lease = Lease(first.id, worker.tokens[first.id])
        assert first.id == plain
        assert await finish.start(mine, lease, 1)
        assert await finish.progress(mine, lease, '{"done": 1}')
        await steps.save_step(mine, lease, "one", "1")
        assert await steps.load_steps(mine, first.id) == {"one": "1"}
        await mine.execute("SELECT pgqueue.assert_lease(%s, %s)", [lease.id, lease.lease_token])
        assert await finish.owned(mine, [lease]) == {first.id}
        assert await worker.complete([first], '{"ok": true}') == {first.id}
        assert await finish.ended(mine, [lease]) == {first.id}
        assert (await worker.fail([retried], delay=0.0))[retried.id].again
        assert not (await worker.fail([fails], delay=None))[fails.id].again
        snooze = finish.Snoozed(snoozed.id, worker.tokens[snoozed.id], 0.0)
        assert await finish.snooze(mine, [snooze]) == {snoozed.id}
        assert await finish.release(mine, [Lease(released.id, worker.tokens[released.id])]) == {released.id}
        await control.cancel_job(conn, cancelled.id)
        assert [one.id for one in await workers.cancellations(mine, worker.who.worker_id)] == [cancelled.id]
        now = time.monotonic()
        end = finish.Cancelled(cancelled.id, worker.tokens[cancelled.id], now, now, 1)
        assert await finish.cancel(mine, [end]) == {cancelled.id}
        assert {one.id for one in await workers.claimed_by(mine, worker.who.worker_id, 0.0)} == {lost.id}
        tick = await workers.tick(mine, worker.who.worker_id, promote.BEGINNING)
        assert tick.due_in is not None
        await parked.complete([other])

        await workers.retire(mine, worker.who.worker_id)
        assert await rescue.rescue(mine) == rescue.Rescued(1, 0)
        await conn.execute("UPDATE pgqueue.jobs_live SET run_at = now() - interval '1 s' WHERE status = 'scheduled'")
        assert await promote.promote(mine, promote.DueFloor()) == 3
        assert await promote.seconds_until_due(mine, promote.DueFloor()) is None
        rest = await MiniWorker(mine).register()
        jobs = await rest.claim()
        assert len(await rest.complete(jobs)) == len(jobs) == 5
        assert await statuses(conn) == {"completed": 7, "failed": 1, "cancelled": 1}

        await forget_tomorrow(conn)
        assert await prune.make_partitions(mine) == 1
        await conn.execute(
            "CREATE TABLE pgqueue.attempts_20200101 PARTITION OF pgqueue.attempts"
            " FOR VALUES FROM ('2020-01-01') TO ('2020-01-02')"
        )
        assert await prune.prune(mine, 30) == 1
        with pytest.raises(LeaseLost):
            await steps.save_step(mine, lease, "two", "2")


@pytest.mark.usefixtures("logins")
async def test_producers_auditors_and_operators_use_the_same_functions_as_all(conn, dsn):
    jobs = await some_jobs(conn)
    async with connected_as("producer", dsn) as mine:
        assert (await enqueue.add_job(mine, NewJob(type="t", delay=5, idempotency_key="k"))).inserted
        assert len(await enqueue.add_jobs(mine, [NewJob(type="t", tags=["a"], name="n", timeout=1.0)] * 3)) == 3
    async with connected_as("auditor", dsn) as mine:
        assert len(await read.list_jobs(mine)) == 7
        assert (await read.get_job(mine, jobs["failed"])).status is Status.FAILED
        assert len(await read.list_failed(mine)) == 1
        assert len(await read.list_attempts(mine, jobs["failed"])) == 1
        assert (await read.count_jobs(mine, Status.PENDING)).value == 4
        assert await read.why(mine, jobs["pending"])
    async with connected_as("operator", dsn) as mine:
        assert await control.retry_job(mine, jobs["failed"], actor="ana") is Status.PENDING
        await control.edit_job(mine, jobs["pending"], {"priority": 9}, actor="ana")
        assert await control.cancel_job(mine, jobs["pending"], actor="ana", reason="no more") is Status.CANCELLED
        await control.pause_queue(mine, "default", actor="ana")
        await control.resume_queue(mine, "default", actor="ana")
    cursor = await conn.execute("SELECT DISTINCT actor, db_user FROM pgqueue.audit")
    assert await cursor.fetchall() == [("ana", "test_operator")], "the database says who it really was"


@pytest.mark.usefixtures("logins")
async def test_auditors_see_days_that_came_later(conn, dsn):
    await conn.execute("SELECT pgqueue.make_partitions(20)")
    await conn.execute(
        "INSERT INTO pgqueue.jobs_finished (type, status, finished_at)"
        " VALUES ('t', 'completed', now() + interval '19 days')"
    )
    async with connected_as("auditor", dsn) as mine:
        assert await value(mine, "SELECT count(*) FROM pgqueue.jobs") == 1
        assert await value(mine, "SELECT count(*) FROM pgqueue.job_metrics") == 1


@pytest.mark.usefixtures("logins")
def test_psql_of_a_producer(server, dsn):
    script = r"""
        INSERT INTO pgqueue.jobs (type, payload) VALUES ('mail', '{"to": "a@x.org"}') RETURNING id;
        \copy pgqueue.jobs (type, payload, queue) FROM STDIN
mail	{"to": "b@x.org"}	mail
mail	{"to": "c@x.org"}	mail
\.
        COPY pgqueue.jobs (type, priority) FROM STDIN (FORMAT csv);
mail,5
\.
        BEGIN; INSERT INTO pgqueue.jobs (type) VALUES ('never'); ROLLBACK;
        SELECT id, inserted FROM pgqueue.add_job('report', '{"day": 1}', delay => '5 min', priority => 10);
    """
    psql = [server.bin_dir / "psql", "-X", "-qAt", "-v", "ON_ERROR_STOP=1", "-d", dsn_of("test_producer", dsn)]
    ran = subprocess.run(psql, input=script, text=True, capture_output=True)
    assert (ran.stdout, ran.stderr, ran.returncode) == ("1\n6|t\n", "", 0)
    with psycopg.connect(dsn) as conn:
        stored = conn.execute("SELECT type, queue, status::text FROM pgqueue.jobs ORDER BY id").fetchall()
    assert stored == [
        ("mail", "default", "pending"),
        ("mail", "mail", "pending"),
        ("mail", "mail", "pending"),
        ("mail", "default", "pending"),
        ("report", "default", "scheduled"),
    ]
    ran = subprocess.run([*psql, "-c", "UPDATE pgqueue.jobs SET priority = 9"], text=True, capture_output=True)
    assert "permission denied for table jobs" in ran.stderr


# Hijacking

TRAP = "$$ BEGIN RAISE EXCEPTION 'hijacked as %', current_user; END $$"
HOSTILE = {
    # What our functions call without naming its schema, as a stranger would shadow it.
    "now()": "timestamptz",
    "clock_timestamp()": "timestamptz",
    "statement_timestamp()": "timestamptz",
    "nextval(regclass)": "bigint",
    "pg_notify(text, text)": "void",
    "pg_notification_queue_usage()": "double precision",
    "sha256(bytea)": "bytea",
    "convert_to(text, name)": "bytea",
    "char_length(text)": "integer",
    "octet_length(text)": "integer",
    "array_position(anycompatiblearray, anycompatible)": "integer",
    "current_setting(text)": "text",
    "current_setting(text, boolean)": "text",
    "pg_advisory_xact_lock_shared(integer, integer)": "void",
    "pg_try_advisory_xact_lock(integer, integer)": "boolean",
    "jsonb_object_keys(jsonb)": "text",
    "jsonb_populate_record(anyelement, jsonb)": "anyelement",
    "to_jsonb(anyelement)": "jsonb",
    "date_trunc(text, timestamptz)": "timestamptz",
    "to_char(timestamptz, text)": "text",
    "to_regclass(text)": "regclass",
    "generate_series(date, date, interval)": "timestamptz",
}
SHADOWED = ("jobs", "jobs_live", "jobs_failed", "jobs_finished", "workers", "queues", "idempotency_keys", "audit")


async def make_hostile_schema(conn: psycopg.AsyncConnection) -> None:
    await conn.execute("CREATE SCHEMA evil; GRANT USAGE ON SCHEMA evil TO PUBLIC")
    for signature, returns in HOSTILE.items():
        await conn.execute(f"CREATE FUNCTION evil.{signature} RETURNS {returns} LANGUAGE plpgsql AS {TRAP}")
    for left, right in (("text", "text"), ("bigint", "bigint"), ("uuid", "uuid"), ("timestamptz", "timestamptz")):
        name = f"{left}_{right}"
        await conn.execute(f"CREATE FUNCTION evil.{name}({left}, {right}) RETURNS boolean LANGUAGE plpgsql AS {TRAP}")
        for operator in ("=", "<>", ">", "<="):
            await conn.execute(
                f"CREATE OPERATOR evil.{operator} (LEFTARG = {left}, RIGHTARG = {right}, FUNCTION = evil.{name})"
            )


async def is_woken_by(waker: psycopg.AsyncConnection, listener: psycopg.AsyncConnection) -> bool:
    async for note in listener.notifies(timeout=20):
        if note.pid == waker.info.backend_pid:
            return True
    return False


async def lie_in_wait(conn: psycopg.AsyncConnection) -> None:
    for table in SHADOWED:
        await conn.execute(f"CREATE TEMP TABLE {table} (id bigint, name text, key text, job_id bigint, status text)")
    await conn.execute(
        "CREATE TEMP TABLE inserted (queue text, type text, status text, thread_demand int, run_at date)"
    )
    await conn.execute("CREATE TEMP TABLE switches (name text, enabled boolean)")
    await conn.execute("CREATE TYPE pg_temp.status AS ENUM ('mine')")
    await conn.execute("SET search_path = evil, pg_temp, pgqueue, pg_catalog")
    for trap in ("SELECT now()", "SELECT 'a' = 'b'::text"):
        with pytest.raises(pg.RaiseException, match="hijacked"):
            await conn.execute(trap)


@pytest.mark.usefixtures("logins")
async def test_the_callers_search_path_does_not_matter(conn, dsn):
    await make_hostile_schema(conn)
    sleeper = await MiniWorker(conn).register(listening=True)
    await conn.execute(sql.SQL("LISTEN {}").format(sql.Identifier(workers.channel(sleeper.who.worker_id))))
    await workers.mark_idle(conn, sleeper.who.worker_id)
    async with connected_as("producer", dsn) as mine:
        await lie_in_wait(mine)
        await mine.execute("INSERT INTO pgqueue.jobs (type, idempotency_key, queue) VALUES ('t', 'k', 'q')")
        assert await is_woken_by(mine, conn)
        with pytest.raises(pg.CheckViolation, match="queue must be"):
            await mine.execute("INSERT INTO pgqueue.jobs (type, queue) VALUES ('t', 'no blanks')")
        with pytest.raises(pg.CheckViolation, match="tags must be"):
            await mine.execute("INSERT INTO pgqueue.jobs (type, tags) VALUES ('t', '{NULL}')")
        with pytest.raises(pg.UniqueViolation, match='"k" belongs to another job'):
            await mine.execute("INSERT INTO pgqueue.jobs (type, idempotency_key) VALUES ('t', 'k')")
        await mine.execute("INSERT INTO pgqueue.jobs (type, run_at) VALUES ('t', '2100-01-01')")
        adding = "SELECT inserted FROM pgqueue.add_job('t', idempotency_key => 'l')"
        assert [await value(mine, adding), await value(mine, adding)] == [True, False]
    assert await statuses(conn) == {"pending": 2, "scheduled": 1}
    assert await value(conn, "SELECT count(*) FROM pgqueue.idempotency_keys") == 2

    [job, _] = await sleeper.claim()
    async with connected_as("worker", dsn) as mine:
        await lie_in_wait(mine)
        await mine.execute("SELECT pgqueue.assert_lease(%s, %s)", [job.id, sleeper.tokens[job.id]])
        with pytest.raises(psycopg.Error, match="is lost"):
            await mine.execute("SELECT pgqueue.assert_lease(%s, %s)", [job.id, uuid4()])
        await mine.execute("SELECT pgqueue.make_partitions(9), pgqueue.drop_partitions('30 days')")
        await mine.execute("SELECT pgqueue.wake('{q}', '{t}', '{1}')")
        assert await is_woken_by(mine, conn)
    await sleeper.fail([job], delay=None)
    async with connected_as("operator", dsn) as mine:
        await lie_in_wait(mine)
        await mine.execute("SELECT pgqueue.edit_job(%s, %s)", [job.id, '{"priority": 3}'])
        await mine.execute("SELECT pgqueue.retry_job(%s)", [job.id])
        await mine.execute("SELECT pgqueue.why(%s)", [job.id])
        await mine.execute("SELECT pgqueue.cancel_job(%s)", [job.id])
        await mine.execute("SELECT pgqueue.pause_queue('q'), pgqueue.resume_queue('q')")
        assert await value(mine, "SELECT pgqueue.backlog('q')") == 0
    assert (await read.get_job(conn, job.id)).status is Status.CANCELLED
    assert await value(conn, "SELECT count(*) FROM pgqueue.audit WHERE db_user = 'test_operator'") == 5


# The roles and the migration


@asynccontextmanager
async def a_migrator(conn: psycopg.AsyncConnection, attributes: str) -> AsyncIterator[None]:
    """Owns the database, and is no superuser."""
    await conn.execute(f"CREATE ROLE migrator LOGIN {attributes} PASSWORD '{PASSWORD}'")
    try:
        await conn.execute(sql.SQL("ALTER DATABASE {} OWNER TO migrator").format(sql.Identifier(conn.info.dbname)))
        yield
    finally:
        await conn.execute(sql.SQL("ALTER DATABASE {} OWNER TO CURRENT_USER").format(sql.Identifier(conn.info.dbname)))
        await conn.execute("DROP OWNED BY migrator CASCADE; DROP ROLE migrator")


@asynccontextmanager
async def without_our_roles(conn: psycopg.AsyncConnection) -> AsyncIterator[None]:
    """They belong to the whole server and are in use, so they hide behind other names for a while."""
    ours = ["pgqueue_api", *[f"pgqueue_{role}" for role in ROLES.values() if role != "stranger"]]
    for role in ours:
        await conn.execute(f"ALTER ROLE {role} RENAME TO hidden_{role}")
    try:
        yield
    finally:
        for role in ours:
            if await value(conn, "SELECT true FROM pg_roles WHERE rolname = %s", role):
                await conn.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
            await conn.execute(f"ALTER ROLE hidden_{role} RENAME TO {role}")


@pytest.fixture
def empty(empty_dsn, runner):
    connection = runner.run(psycopg.AsyncConnection.connect(empty_dsn, autocommit=True))
    yield connection
    runner.run(connection.close())


@pytest.mark.usefixtures("logins")
async def test_a_migrator_who_may_not_create_roles_grants_to_those_there_are(empty, empty_dsn):
    async with a_migrator(empty, "NOCREATEROLE"):
        migrate.up(dsn_of("migrator", empty_dsn))
        assert migrate.status(empty_dsn).up_to_date
        async with connected_as("producer", empty_dsn) as mine:
            await add(mine, NewJob(type="t"))
            assert await tried(mine, "SELECT payload FROM pgqueue.jobs") == "denied"
        async with connected_as("worker", empty_dsn) as mine:
            worker = await MiniWorker(mine).register()
            await worker.complete(await worker.claim())
            await forget_tomorrow(empty)
            assert await prune.make_partitions(mine) == 1, "the partition is the migrator's, as the others are"
        assert await statuses(empty) == {"completed": 1}


async def test_a_migrator_who_may_not_create_roles_goes_on_without(empty, empty_dsn):
    async with a_migrator(empty, "NOCREATEROLE"), without_our_roles(empty):
        migrate.up(dsn_of("migrator", empty_dsn))
        assert migrate.status(empty_dsn).up_to_date
        assert await value(empty, "SELECT count(*) FROM pg_roles WHERE rolname ~ '^pgqueue_'") == 0
        owner = await psycopg.AsyncConnection.connect(dsn_of("migrator", empty_dsn), autocommit=True)
        async with owner:
            await add(owner, NewJob(type="t", idempotency_key="k"))
            worker = await MiniWorker(owner).register()
            assert len(await worker.complete(await worker.claim())) == 1
        migrate.down(dsn_of("migrator", empty_dsn), "base")


async def test_a_migrator_who_may_create_roles_does(empty, empty_dsn):
    async with a_migrator(empty, "CREATEROLE"), without_our_roles(empty):
        migrate.up(dsn_of("migrator", empty_dsn))
        cursor = await empty.execute("SELECT rolname, rolcanlogin FROM pg_roles WHERE rolname ~ '^pgqueue_' ORDER BY 1")
        assert await cursor.fetchall() == [
            (f"pgqueue_{role}", False) for role in ("api", "auditor", "operator", "producer", "worker")
        ]
        assert await value(empty, "SELECT has_table_privilege('pgqueue_auditor', 'pgqueue.jobs', 'SELECT')")
