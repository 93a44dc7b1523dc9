"""What mypy and pyright say about calls: each wrong one is reported, and no right one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SAMPLE = """
from datetime import timedelta
from typing import Any, assert_type

from pgqueue import Context, GiveUp, InvalidJob, Job, JobFailed, JobRef, PgQueue, Retry, RetryLater, Snooze, Status

app = PgQueue()


@app.job
async def send(ctx: Context, to: str, subject: str = "hi") -> dict[str, int]:
    ref = await ctx.enqueue(plain.bind(to))
    assert_type(ref, JobRef[int])
    await ctx.enqueue(plain.bind(3))  # wrong
    return {}


@app.job(queue="mail", retry=Retry(max_attempts=3, give_up_on=(ValueError,)), timeout=timedelta(seconds=3), tags=["a"])
async def plain(to: str, *, urgent: bool = False) -> int:
    return 1


@app.job("in_a_thread", executor="thread", thread_demand=2, retry=7, timeout=1.5)
def in_a_thread(ctx: Context, n: int) -> str | Snooze:
    return Snooze(3)


@app.job()
def no_context(n: int) -> None: ...


@app.job
async def no_arguments(ctx: Context) -> float:
    return 1.0


@app.job
def whole(payload: dict[str, Any]) -> list[int]:
    return []


@app.job
def anything(payload: Any) -> int:
    return 1


@app.job(executor="auto")
async def something(payload: object, more: int = 1) -> int:
    return 1


@app.middleware
async def timed(ctx: Context, call_next: Any) -> Any:
    return await call_next()


async def right(conn: Any) -> None:
    ref = await send.enqueue(to="a")
    assert_type(ref, JobRef[dict[str, int]])
    assert_type(await ref.result(), dict[str, int])
    assert_type(await ref.job(), Job)
    assert_type(await ref.cancel(), Status)
    assert_type((await plain.using(delay=3, conn=conn).enqueue("a", urgent=True)).result_sync(timeout=3), int)
    in_a_thread.enqueue_sync(3)
    in_a_thread.enqueue_sync(n=3)
    no_context.using(delay=timedelta(1), priority=1, timeout=5, tags=("a",)).enqueue_sync(3)
    await no_arguments.enqueue()
    assert_type(whole.enqueue_sync({"a": 1}).result_sync(), list[int])
    whole.enqueue_sync(payload={})
    anything.enqueue_sync("x")
    anything.enqueue_sync(payload=3)
    await something.enqueue([], more=2)
    assert_type(await send.enqueue_many([{"to": "a"}], conn=conn), list[JobRef[dict[str, int]]])
    await app.enqueue("elsewhere", [1], queue="q", idempotency_key="k")
    async with app:
        pass


async def wrong() -> None:
    await send.enqueue(1)  # wrong
    await send.enqueue(too="a")  # wrong
    await send.enqueue()  # wrong
    await send.enqueue("a", "b", "c")  # wrong
    await send.using(delay=3).enqueue(to=b"a")  # wrong
    plain.enqueue_sync("a", True)  # wrong
    plain.bind(None)  # wrong
    plain.using(delai=3)  # wrong
    plain.using(priority="high")  # wrong
    plain.using(delay=3).enqueue_sync(to=3)  # wrong
    in_a_thread.enqueue_sync("x")  # wrong
    no_context.bind()  # wrong
    no_context.using(run_at="tomorrow")  # wrong
    text: str = plain.enqueue_sync("a").result_sync()  # wrong
    number: int = await plain.enqueue("a")  # wrong
    await no_arguments.enqueue(1)  # wrong
    whole.enqueue_sync("text")  # wrong
    await app.enqueue("elsewhere", queu="q")  # wrong
    app.enqueue_sync(send)  # wrong


app.job(quue="x")  # wrong
app.job(executor="fiber")  # wrong
app.job(retry="often")  # wrong
PgQueue(3)  # wrong
"""
MARKED = {number for number, line in enumerate(SAMPLE.splitlines(), 1) if line.endswith("# wrong")}


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    path = tmp_path / "sample.py"
    path.write_text(SAMPLE)
    return path


def run(command: list[str], cwd: Path) -> str:
    environ = os.environ | {"MYPYPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=300, check=False
    ).stdout


def test_the_sample_runs(sample: Path) -> None:
    code = SAMPLE.partition("async def right")[0]
    exec(compile(code, str(sample), "exec"), {"__name__": "sample"})


def test_mypy(sample: Path, request: pytest.FixtureRequest) -> None:
    assert request.config.cache is not None
    options = ["--strict", "--no-error-summary", "--config-file=", f"--cache-dir={request.config.cache.mkdir('mypy')}"]
    output = run([sys.executable, "-m", "mypy", *options, str(sample)], sample.parent)
    assert {int(found[1]) for found in re.finditer(r"^[^:]*sample.py:(\d+): error:", output, re.M)} == MARKED, output
    assert ": error:" not in re.sub(r"^[^:]*sample.py:.*$", "", output, flags=re.M)


def test_pyright(sample: Path) -> None:
    settings = {"include": [sample.name], "extraPaths": [str(ROOT)], "typeCheckingMode": "strict"}
    # What is not about our types: the sample uses a few names only to be wrong.
    settings |= {"reportUnusedVariable": False, "reportUnusedImport": False, "reportUnusedCallResult": False}
    (sample.parent / "pyrightconfig.json").write_text(json.dumps(settings))
    output = run([sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson"], sample.parent)
    found = [each for each in json.loads(output)["generalDiagnostics"] if each["severity"] == "error"]
    assert {each["range"]["start"]["line"] + 1 for each in found} == MARKED, found
