"""Adding jobs over the app's own connections, and what becomes of them."""

import asyncio
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgqueue import (
    DatabaseUnavailable,
    InvalidJob,
    InvalidSettings,
    JobFailed,
    JobNotFound,
    JobWasCancelled,
    KeyReused,
    PgQueue,
    PgQueueError,
    Settings,
)
from pgqueue.db import Connection
from pgqueue.embedded import start_postgres
from pgqueue.enqueue import Added
from pgqueue.jobref import JobRef
from tests.db.queue import MiniWorker, value
from tests.once.proxy import When, proxied

on_pg18 = pytest.mark.parametrize("server", ["pg18"], indirect=True)


class Types:
    """A few job types on one app."""

    def __init__(self, app: PgQueue) -> None:
        @app.job(queue="mail", priority=3)
        async def send(to: str, n: int = 1) -> dict[int, str]: ...  # type: ignore[empty-body]

        @app.job
        def touch() -> None: ...

        self.send, self.touch = send, touch


async def test_enqueue(dsn: str, conn: Connection) -> None:
    async with PgQueue(dsn) as app:
        types = Types(app)
        ref = await types.send.enqueue("a", n=2)
        assert ref.inserted
        job = await ref.job()
        assert (job.id, job.type, job.queue, job.priority, job.payload) == (
            ref.id,
            "send",
            "mail",
            3,
            '{"n": 2, "to": "a"}',
        )
        later = await types.send.using(delay=60, idempotency_key="k").enqueue("a")
        assert (await later.job()).status == "scheduled"
        again = await types.send.using(idempotency_key="k").enqueue("a")
        assert (again.id, again.inserted) == (later.id, False)
        with pytest.raises(KeyReused, match='"k" belongs to job'):
            await types.send.using(idempotency_key="k").enqueue("b")
        with pytest.raises(InvalidJob, match="priority must be between"):
            await types.send.using(priority=5000).enqueue("b")
        with pytest.raises(InvalidJob, match="payload must be at most 1 MiB"):
            await types.send.enqueue("b" * 2_000_000)
        other = await app.enqueue("elsewhere", {"x": 1}, queue="q", tags=["a"])
        job = await other.job()
        assert (job.type, job.payload, job.queue, job.tags) == ("elsewhere", '{"x": 1}', "q", ["a"])
        with pytest.raises(InvalidJob, match="elsewhere: the payload cannot be stored as JSON"):
            await app.enqueue("elsewhere", object())
    assert await value(conn, "SELECT count(*) FROM pgqueue.jobs") == 3


def test_enqueue_sync(dsn: str) -> None:
    with PgQueue(dsn) as app:
        types = Types(app)
        ref = types.send.enqueue_sync("a", n=2)
        assert ref.job_sync().payload == '{"n": 2, "to": "a"}'
        again = [types.send.using(idempotency_key="k").enqueue_sync("a") for _ in range(2)]
        assert [each.inserted for each in again] == [True, False]
        with pytest.raises(KeyReused, match='"k" belongs to job'):
            types.send.using(idempotency_key="k").enqueue_sync("b")
        with pytest.raises(InvalidJob, match="priority must be between"):
            types.send.using(priority=5000).enqueue_sync("b")
        assert app.enqueue_sync("elsewhere", [1]).job_sync().payload == "[1]"
        with pytest.raises(JobNotFound, match="job 999999 does not exist"):
            JobRef[Any](app, Added(999999, True)).job_sync()


async def test_many_keep_their_order(dsn: str, conn: Connection) -> None:
    async with PgQueue(dsn) as app:
        types = Types(app)
        refs = await types.send.enqueue_many({"to": str(n)} for n in range(12_001))
        assert await types.send.enqueue_many([]) == []
        cursor = await conn.execute("SELECT id, payload->>'to' FROM pgqueue.jobs ORDER BY seq")
        assert await cursor.fetchall() == [(ref.id, str(n)) for n, ref in enumerate(refs)]
        refs = await types.send.using(delay=60, queue="late").enqueue_many([{"to": "x", "n": 3}] * 3)
        assert [(await ref.job()).queue for ref in refs] == ["late"] * 3


@on_pg18
async def test_many_or_none(dsn: str, conn: Connection) -> None:
    async with PgQueue(dsn) as app:
        types = Types(app)
        calls = [{"to": "a"}] * 5_000
        with pytest.raises(InvalidJob, match="call 5000: send: to: input should be a valid string"):
            await types.send.enqueue_many([*calls, {"to": 3}])
        with pytest.raises(InvalidJob, match="call 5000: send: missing a required argument: 'to'"):
            types.send.enqueue_many_sync([*calls, {}])
        # Only the database finds this one, and the first statement was good.
        with pytest.raises(InvalidJob, match="payload must be at most 1 MiB"):
            await types.send.enqueue_many([*calls, {"to": "x" * 2_000_000}])
        with app, pytest.raises(InvalidJob, match="payload must be at most 1 MiB"):
            types.send.enqueue_many_sync([*calls, {"to": "x" * 2_000_000}])
        with pytest.raises(InvalidJob, match="send: one idempotency_key cannot name many jobs"):
            await types.send.using(idempotency_key="k").enqueue_many(calls)
    assert await value(conn, "SELECT count(*) FROM pgqueue.jobs") == 0


@on_pg18
def test_many_sync(dsn: str) -> None:
    with PgQueue(dsn) as app:
        refs = Types(app).send.enqueue_many_sync({"to": str(n)} for n in range(6_000))
        assert [refs[n].job_sync().payload for n in (0, 4_999, 5_000, 5_999)] == [
            f'{{"to": "{n}"}}' for n in (0, 4_999, 5_000, 5_999)
        ]


async def test_results(dsn: str, conn: Connection) -> None:
    worker = await MiniWorker(conn).register()
    async with PgQueue(dsn) as app:
        types = Types(app)
        good, bad, none, cancelled = (
            await types.send.enqueue("good"),
            await types.send.using(max_attempts=1).enqueue("bad"),
            await types.touch.enqueue(),
            await types.touch.using(delay=60).enqueue(),
        )
        waiting = asyncio.create_task(good.result(timeout=20))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        jobs = {job.id: job for job in await worker.claim()}
        await worker.complete([jobs[good.id]], '{"1": "x"}')
        await worker.complete([jobs[none.id]])
        await worker.fail([jobs[bad.id]], error="it went wrong")
        assert await waiting == {1: "x"}
        assert await none.result() is None
        assert await JobRef[Any](app, Added(good.id, True)).result() == {"1": "x"}
        with pytest.raises(JobFailed, match=rf"job {bad.id} failed \(max_attempts\): it went wrong") as caught:
            await bad.result()
        assert (caught.value.job_id, caught.value.reason, caught.value.error) == (
            bad.id,
            "max_attempts",
            "it went wrong",
        )
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
        with pytest.raises(TimeoutError, match=rf"job {cancelled.id} has not ended within 0.05 s"):
            await cancelled.result(timeout=0.05)
        assert await cancelled.cancel("no longer wanted") == "cancelled"
        with pytest.raises(JobWasCancelled, match=f"job {cancelled.id} was cancelled"):
            await cancelled.result()
        with pytest.raises(JobNotFound, match="job 999999 does not exist"):
            await JobRef[Any](app, Added(999999, True)).result()
        wrong = await types.send.enqueue("wrong")
        await worker.complete(await worker.claim(), '"no dict"')
        with pytest.raises(PgQueueError, match=f"job {wrong.id}: the result of send is not what its annotation says"):
            await wrong.result()


@on_pg18
def test_results_sync(dsn: str, conn: Connection, runner: asyncio.Runner) -> None:
    worker = runner.run(MiniWorker(conn).register())
    with PgQueue(dsn) as app:
        types = Types(app)
        ref = types.send.enqueue_sync("good")
        with pytest.raises(TimeoutError, match=r"has not ended within 0\.05 s"):
            ref.result_sync(timeout=0.05)
        runner.run(worker.complete(runner.run(worker.claim()), '{"1": "x"}'))
        assert ref.result_sync() == {1: "x"}


# Connections


@on_pg18
async def test_connections_are_few_and_shared(dsn: str, conn: Connection) -> None:
    async with PgQueue(dsn) as app:
        types = Types(app)
        await asyncio.gather(*(types.send.enqueue(str(n)) for n in range(50)))
        producers = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pgqueue-producer'"
        producers += " AND datname = current_database()"
        assert 1 <= await value(conn, producers) <= 4
    assert await value(conn, "SELECT count(*) FROM pgqueue.jobs") == 50


@on_pg18
def test_loops_and_threads_have_connections_of_their_own(dsn: str) -> None:
    app = PgQueue(dsn)
    types = Types(app)

    async def enqueue() -> int:
        async with app:
            return (await types.send.enqueue("a")).id

    ids = [asyncio.run(enqueue()) for _ in range(2)]
    threads = [threading.Thread(target=lambda: ids.append(asyncio.run(enqueue()))) for _ in range(3)]
    threads += [threading.Thread(target=lambda: ids.append(types.send.enqueue_sync("a").id)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    app.close_sync()
    assert len(set(ids)) == 8


@on_pg18
async def test_a_server_that_was_away_is_found_again(dsn: str, conn: Connection) -> None:
    producers = "FROM pg_stat_activity WHERE application_name = 'pgqueue-producer' AND datname = current_database()"
    kill = f"SELECT pg_terminate_backend(pid, 5000) {producers}"
    async with PgQueue(dsn) as app:
        types = Types(app)
        with app:
            for _ in range(3):
                await types.send.enqueue("a")
                types.send.enqueue_sync("a")
                await conn.execute(kill)
    assert await value(conn, "SELECT count(*) FROM pgqueue.jobs") == 6


async def test_no_server() -> None:
    app = PgQueue("postgresql://nobody@127.0.0.1:1/nothing")
    with pytest.raises(DatabaseUnavailable, match="Connection refused"):
        await app.enqueue("x")
    with pytest.raises(DatabaseUnavailable, match="Connection refused"):
        app.enqueue_sync("x")


def test_a_url_that_cannot_be_read() -> None:
    with pytest.raises(InvalidSettings, match=r"DATABASE_URL=mysql://me:\*\*\*@host: PostgreSQL cannot read") as caught:
        PgQueue("mysql://me:secret@host").enqueue_sync("x")
    assert "secret" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_no_database_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("POSTGRES_", "PGQUEUE_", "DATABASE_URL"))]:
        monkeypatch.delenv(name)
    with pytest.raises(PgQueueError, match=r"(?s)DATABASE_URL is not set, and no embedded server.*pgqueue up.*export"):
        PgQueue().enqueue_sync("x")
    monkeypatch.setenv("DATABASE_URL", "postgresql://nobody@127.0.0.1:1/nothing")
    with pytest.raises(DatabaseUnavailable):
        PgQueue().enqueue_sync("x")
    settings = Settings(database_url="postgresql://somebody@127.0.0.1:1/nothing")
    assert PgQueue(settings=settings).pools.database_url == settings.database_url


@on_pg18
@pytest.mark.parametrize(("when", "added"), [("before", 0), ("after", 3)])
async def test_many_of_which_nobody_knows_whether_they_were_added(
    conn: Connection, dsn: str, when: When, added: int
) -> None:
    """An error of ours, as for one; all of them are there or none."""
    async with proxied(dsn) as proxy, PgQueue(proxy.dsn()) as app:
        proxy.cut("COMMIT", when)
        with pytest.raises(DatabaseUnavailable):
            await app.job(name="one")(one).enqueue_many([{"number": number} for number in range(3)])
    assert await value(conn, "SELECT count(*) FROM pgqueue.jobs") == added


async def one(number: int) -> None: ...


def test_the_embedded_server_is_found_where_it_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PGQUEUE_DIR", str(tmp_path / "here"))
    monkeypatch.delenv("DATABASE_URL", raising=False)
    server = start_postgres(tmp_path / "here", fast=True)
    try:
        assert PgQueue().pools.database_url == server.dsn
    finally:
        server.stop()
    with pytest.raises(PgQueueError, match="no embedded server runs in"):
        PgQueue().enqueue_sync("x")


SCRIPT = """
import asyncio, sys
from pgqueue import PgQueue
app = PgQueue(sys.argv[1])
@app.job
async def send(to: str) -> None: ...
async def main() -> None:
    await send.enqueue("a")
send.enqueue_sync("b")
asyncio.run(main())
asyncio.run(main())
send.enqueue_sync("c")
"""


FORK = """
import os, sys
from pgqueue import PgQueue
app = PgQueue(sys.argv[1])
first = app.enqueue_sync("parent").id
if (child := os.fork()) == 0:
    app.enqueue_sync("child")
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
assert app.enqueue_sync("parent").id == first + 2
"""


@on_pg18
@pytest.mark.parametrize(("script", "jobs"), [(SCRIPT, 4), (FORK, 3)], ids=["plain", "fork"])
def test_a_script_that_simply_ends(dsn: str, script: str, jobs: int) -> None:
    # Newer Pythons warn of any fork in a process with threads.
    options = ["-X", "dev", "-W", "error", *(["-W", "ignore::DeprecationWarning"] if script == FORK else [])]
    command = [sys.executable, *options, "-c", script, dsn]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    with psycopg.connect(dsn) as conn:
        assert conn.execute("SELECT count(*) FROM pgqueue.jobs").fetchone() == (jobs,)
