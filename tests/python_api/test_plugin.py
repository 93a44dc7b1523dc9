"""The pytest plugin, as a project of somebody else uses it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from pgqueue.embedded import PostgresServer

on_pg18 = pytest.mark.parametrize("server", ["pg18"], indirect=True)

SHOP = """
from pgqueue import Context, GiveUp, PgQueue, RetryLater, Snooze

app = PgQueue()
ran = []


@app.middleware
async def note(ctx, call_next):
    ran.append(ctx.type)
    return await call_next()


@app.job
async def send_email(ctx: Context, to: str, subject: str = "hi") -> dict[str, str]:
    if to == "nobody":
        raise GiveUp("there is nobody")
    if to == "bad":
        raise ValueError("a bad address")
    if to == "third" and ctx.attempt < 3:
        raise RetryLater(3600, "not yet")
    return {"to": to}


@app.job(thread_demand=4)
def order(ctx: Context, n: int) -> int:
    ctx.progress(1, 2)
    ctx.enqueue_sync(send_email.bind(f"{n}@x.org"))
    send_email.using(priority=5, delay=60).enqueue_sync("later@x.org")
    return sum(ctx.map_chunks_sync(sum, list(range(n))))


@app.job
async def nap(ctx: Context, naps: int) -> int | Snooze:
    ref = await send_email.enqueue("child@x.org")
    return Snooze(86_400) if len(ran) < naps else ref.id


@app.job
async def again() -> None:
    await again.enqueue()
"""
TESTS = """
import asyncio

import psycopg
import pytest
from pgqueue import JobFailed, JobNotFound, PgQueue
from shop import again, app, nap, order, ran, send_email


@pytest.fixture(autouse=True)
def nothing_ran():
    ran.clear()


def test_a_story(pgqueue):
    order.enqueue_sync(5)
    pgqueue.assert_enqueued(order, n=5)
    pgqueue.refute_enqueued(order, n=6)
    pgqueue.refute_enqueued(send_email)
    first, second = pgqueue.run(until="empty")
    assert ran == ["order", "send_email"]
    assert pgqueue.get(order).id == first
    assert (pgqueue.get(order).status, pgqueue.get(order).result) == ("completed", "10")
    assert [job.status for job in pgqueue.jobs(send_email)] == ["completed", "scheduled"]
    pgqueue.refute_enqueued(send_email, to="5@x.org")
    assert pgqueue.assert_enqueued(send_email, to="later@x.org", subject="hi").priority == 5
    pgqueue.advance(30)
    assert pgqueue.run() == []
    pgqueue.advance(30)
    assert len(pgqueue.run()) == 1
    assert {job.status for job in pgqueue.jobs()} == {"completed"}
    assert pgqueue.jobs(status="scheduled") == []


def test_every_test_has_its_own_database(pgqueue):
    assert pgqueue.jobs() == []
    with pytest.raises(LookupError, match="no job of type send_email; there are no jobs at all"):
        pgqueue.get(send_email)


def test_errors_are_raised(pgqueue):
    send_email.enqueue_sync("bad")
    with pytest.raises(ValueError, match="a bad address"):
        pgqueue.run()
    assert pgqueue.get(send_email).status == "scheduled"
    assert len(pgqueue.run(advance="auto", raise_errors=False)) == 4
    assert (pgqueue.get(send_email).status, pgqueue.get(send_email).attempt) == ("failed", 5)
    app.enqueue_sync("send_email", {"too": "x"})
    with pytest.raises(JobFailed, match="undecodable.*to: is missing; too: is unexpected"):
        pgqueue.run()


def test_time_passes(pgqueue):
    send_email.enqueue_sync("third")
    assert pgqueue.run(raise_errors=False) == [1]
    assert pgqueue.run() == []
    assert pgqueue.run(advance="auto", raise_errors=False) == [1, 1]
    assert (pgqueue.get(send_email).status, pgqueue.get(send_email).attempt) == ("completed", 3)
    send_email.enqueue_sync("nobody")
    pgqueue.run(raise_errors=False)
    assert pgqueue.get(send_email).reason == "gave_up"


def test_keys_end(pgqueue):
    using = send_email.using(idempotency_key="k")
    assert [using.enqueue_sync("a").inserted for _ in range(2)] == [True, False]
    pgqueue.run()
    assert not using.enqueue_sync("a").inserted
    pgqueue.advance(86_401)
    assert using.enqueue_sync("a").inserted


def test_coroutines(pgqueue):
    async def story():
        await nap.enqueue(naps=4)
        with pytest.raises(RuntimeError, match="await pgqueue.run_async"):
            pgqueue.run()
        await pgqueue.run_async(advance="auto")
        assert ran == ["nap", "send_email"] * 3
        assert pgqueue.get(nap).status == "completed"
        assert pgqueue.get(nap).attempt == 1

    asyncio.run(story())


def test_jobs_without_end(pgqueue):
    again.enqueue_sync()
    with pytest.raises(RuntimeError, match="after 20 attempts there is still a job to run"):
        pgqueue.run(limit=20)


def test_types_of_others_are_left_alone(pgqueue):
    app.enqueue_sync("elsewhere", {"a": 1})
    assert pgqueue.run() == []
    pgqueue.assert_enqueued("elsewhere", a=1)
    pgqueue.refute_enqueued("elsewhere", a=2)


def test_the_newest_handler_is_used(pgqueue):
    new = PgQueue()

    @new.job("send_email")
    def other(to: str) -> str:
        return f"new {to}"

    send_email.enqueue_sync("a")
    pgqueue.run()
    assert pgqueue.get(other).result == '"new a"'


def test_the_callers_transaction(pgqueue):
    with psycopg.connect(pgqueue.dsn) as conn:
        send_email.using(conn=conn).enqueue_sync("a")
        pgqueue.refute_enqueued(send_email)
    pgqueue.assert_enqueued(send_email, to="a")
"""
MISSES = """
from shop import order, send_email


def test_another_argument(pgqueue):
    send_email.enqueue_sync("a", subject="x")
    pgqueue.assert_enqueued(send_email, to="b", subject="x")


def test_another_type(pgqueue):
    order.enqueue_sync(3)
    pgqueue.assert_enqueued(send_email, to="b")


def test_refuted(pgqueue):
    send_email.enqueue_sync("a")
    pgqueue.refute_enqueued(send_email)
"""
INERT = """
import sys


def test_nothing_is_imported():
    assert "pgqueue.testing" in sys.modules
    heavy = {"psycopg", "pydantic", "pgqueue.app", "pgqueue.embedded", "sqlalchemy", "redis"}
    assert not heavy & set(sys.modules)
"""
OWN = """
import os

import pytest
from shop import send_email


@pytest.fixture
def pgqueue_db():
    return os.environ["MY_DATABASE"]


def test_a_database_of_the_project(pgqueue):
    assert os.environ["DATABASE_URL"] == pgqueue.dsn == os.environ["MY_DATABASE"]
    send_email.enqueue_sync("mine")
"""


def run(tmp_path: Path, tests: str, *options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "test_shop.py").write_text(tests)
    clean = {name: text for name, text in os.environ.items() if not name.startswith(("PYTEST_", "PGQUEUE_"))}
    clean.pop("DATABASE_URL", None)
    command = [sys.executable, "-W", "error", "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", *options]
    return subprocess.run(
        command, cwd=tmp_path, env=clean | environ, capture_output=True, text=True, timeout=120, check=False
    )


@on_pg18
def test_a_project(server: PostgresServer, tmp_path: Path) -> None:
    done = run(tmp_path, TESTS + MISSES, DATABASE_URL=server.dsn)
    assert "3 failed, 10 passed" in done.stdout, done.stdout + done.stderr
    output = re.sub(r"^E +", "", done.stdout, flags=re.M)
    assert "AssertionError: no job send_email(to='b', subject='x') waits\njob 1 differs: to is 'a', not 'b'\n" in output
    assert "AssertionError: no job send_email(to='b') waits\nthere are: 1 order (pending)\n" in output
    assert 'AssertionError: a job send_email() waits\njob 1: {"to": "a"}\n' in output
    # They point at the test, and not into our code.
    assert "harness.py" not in output
    with psycopg.connect(server.dsn) as conn:
        assert conn.execute("SELECT datname FROM pg_database WHERE datname ~ '^pgqueue_t.*_\\d'").fetchall() == []


def test_the_embedded_server(tmp_path: Path) -> None:
    done = run(tmp_path, TESTS, "-k", "story or own_database")
    assert "2 passed" in done.stdout, done.stdout + done.stderr
    assert not list(tmp_path.glob("**/postgres"))


@on_pg18
def test_a_database_of_the_project(dsn: str, tmp_path: Path) -> None:
    done = run(tmp_path, OWN, MY_DATABASE=dsn)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    with psycopg.connect(dsn) as conn:
        assert conn.execute("SELECT payload->>'to' FROM pgqueue.jobs").fetchall() == [("mine",)]


def test_the_plugin_does_nothing_unless_asked(tmp_path: Path) -> None:
    done = run(tmp_path, INERT)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
