"""Child processes and the worker's end of their pipes, without a queue."""

import asyncio
import os
import signal
import threading
import time
from typing import Any

import psycopg
import pytest

from pgqueue import Context, JobCancelled, PgQueue, Retry
from pgqueue.worker import executors
from pgqueue.worker.children import Child, Children
from tests.db.queue import value
from tests.once.inside import worker_inside

app = PgQueue("postgresql://nowhere")
turn, spoken = threading.Event(), threading.Event()


@app.job(executor="process")
def checks(ctx: Context) -> None:
    while True:
        ctx.check()
        time.sleep(0.01)


@app.job(executor="process", retry=Retry(1))
def quick() -> str:
    return "done"


@app.job(executor="process")
def leaves_a_thread(ctx: Context) -> None:
    def speak() -> None:
        turn.wait(60)
        ctx.progress(1)
        spoken.set()

    threading.Thread(target=speak, daemon=True).start()


@app.job(executor="process")
def follows(ctx: Context) -> None:
    turn.set()
    spoken.wait(60)
    ctx.progress(2)


def context(id: int) -> Context:
    about: dict[str, Any] = {"type": "t", "queue": "q", "idempotency_key": "k", "lease_token": f"token {id}"}
    limits: dict[str, Any] = {"attempt": 1, "max_attempts": 5, "timeout": None, "threads": 1}
    return Context(None, id=id, payload={}, started=time.monotonic(), **about, **limits)  # type: ignore[arg-type]


class Progress:
    """A worker that only listens."""

    def __init__(self) -> None:
        self.reported: list[tuple[int, float]] = []

    def report_progress(self, ctx: Context, progress: dict[str, Any]) -> None:
        self.reported.append((ctx.id, progress["done"]))


def test_progress_of_a_thread_that_outlived_its_job_is_not_the_next_ones() -> None:
    children, host = Children(), Progress()
    child = children.take()
    try:
        for id, handler in ((1, leaves_a_thread), (2, follows)):
            child.run(handler, context(id), {}, host, lambda: None)
    finally:
        children.close()
    assert host.reported == [(2, 2)]


def test_a_process_that_was_told_to_stop_is_never_used_again() -> None:
    """However soon it heeded that: somewhere there is a timer that will kill it."""
    children, started = Children(), threading.Event()
    child, ctx, why = children.take(), context(1), JobCancelled("somebody cancelled the job")
    ended: list[BaseException] = []

    def run(child: Child) -> None:
        try:
            child.run(checks, ctx, {}, None, started.set)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run, args=[child])
    thread.start()
    try:
        assert started.wait(60)
        ctx._stop = why
        child.stop(why)
        thread.join(60)
        assert ended == [why]
        pid = child.process.pid
        children.give_back(child)
        other = children.take()
        assert other.process.pid != pid
        assert other.run(quick, context(2), {}, None, lambda: None) == "done"
    finally:
        children.close()


@pytest.mark.parametrize("server", ["pg18"], indirect=True)
async def test_a_process_that_does_not_come_to_its_handler_is_killed(
    conn: psycopg.AsyncConnection, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import that hangs looks no different."""
    monkeypatch.setattr(executors, "START_WITHIN", 0.3)
    async with worker_inside(app, dsn) as runtime:
        children = runtime.executors.children
        child = children.take()
        assert child.process.pid is not None
        os.kill(child.process.pid, signal.SIGSTOP)
        children.give_back(child)
        await conn.execute("INSERT INTO pgqueue.jobs (type, max_attempts) VALUES ('quick', 1)")
        async with asyncio.timeout(20):
            while not await value(conn, "SELECT count(*) FROM pgqueue.jobs WHERE status = 'failed'"):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    assert "SIGKILL" in await value(conn, "SELECT error FROM pgqueue.jobs")
