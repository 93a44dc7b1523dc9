"""Handlers that do, fail and misbehave as handlers do. Workers of the tests run them: `--app sample_app`.

What they did is in the table `effects`, which has no unique constraint: a job that ran twice left two rows.
"""

import asyncio
import ctypes
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import psycopg

from pgqueue import Context, GiveUp, JobAbandoned, JobCancelled, JobTimeout, PgQueue, Retry, RetryLater, Snooze

app = PgQueue()
fast = Retry(max_attempts=5, base=0.05, jitter=0.05)

EFFECT = "INSERT INTO effects (job_id, attempt, worker, pid, note) VALUES (%s, %s, %s, %s, %s)"


def values(ctx: Context, note: str) -> list[Any]:
    name = sys.argv[sys.argv.index("--name") + 1] if "--name" in sys.argv else "child"
    return [ctx.id, ctx.attempt, name, os.getpid(), note]


async def effect(ctx: Context, note: str = "") -> None:
    async with app.pools.connection() as conn:
        await conn.execute(EFFECT, values(ctx, note))


def effect_sync(ctx: Context, note: str = "") -> None:
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as conn:
        conn.execute(EFFECT, values(ctx, note))


@app.middleware
async def traced(ctx: Context, call_next: Callable[[], Awaitable[Any]]) -> Any:
    if not ctx.type.startswith("traced"):
        return await call_next()
    await effect(ctx, "outer: before")
    try:
        return await call_next()
    except Exception as error:
        await effect(ctx, f"outer: {type(error).__name__}")
        raise
    finally:
        await effect(ctx, "outer: after")


@app.middleware
async def traced_inside(ctx: Context, call_next: Callable[[], Awaitable[Any]]) -> Any:
    if not ctx.type.startswith("traced"):
        return await call_next()
    await effect(ctx, "inner: before")
    result = await call_next()
    await effect(ctx, "inner: after")
    return {"wrapped": result}


@app.middleware
async def meddling(ctx: Context, call_next: Callable[[], Awaitable[Any]]) -> Any:
    async with asyncio.timeout(0.3 if ctx.type.startswith("impatient") else None):
        result = await call_next()
    if ctx.type == "followed":
        await effect(ctx, "followed")
        while True:
            ctx.check()
            await asyncio.sleep(0.02)
    return result


# Work


@app.job
async def work(ctx: Context, seconds: float = 0, path: str | None = None) -> dict[str, Any]:
    """Leaves its effect at its end."""
    await asyncio.sleep(seconds)
    await told(path)
    await effect(ctx)
    return {"seconds": seconds}


@app.job
async def begin(ctx: Context, seconds: float = 0) -> None:
    """Leaves its effect at its beginning."""
    await effect(ctx)
    await asyncio.sleep(seconds)


async def told(path: str | None) -> None:
    """When the test says so, if it wants to."""
    while path is not None and not told_to_end(path):  # noqa: ASYNC110
        await asyncio.sleep(0.02)


@app.job
async def nap(ctx: Context, seconds: float = 0, path: str | None = None) -> None:
    """Without an effect: for when the database is away, or the time matters."""
    await asyncio.sleep(seconds)
    await told(path)


@app.job
async def note(ctx: Context, path: str, seconds: float, fails: bool = False) -> None:
    """Leaves a line in a file: for when the database is away."""
    await asyncio.sleep(seconds)
    with open(path, "a") as file:  # noqa: ASYNC230
        file.write(f"{ctx.id}\n")
    if fails:
        raise ValueError("no")


@app.job
def nap_in_thread(ctx: Context, seconds: float = 0) -> None:
    time.sleep(seconds)


@app.job(executor="process", retry=fast)
def nap_in_process(ctx: Context, seconds: float = 0) -> int:
    time.sleep(seconds)
    return os.getpid()


@app.job(executor="process", retry=Retry(1))
def id_in_process(ctx: Context, seconds: float = 0) -> int:
    time.sleep(seconds)
    return ctx.id


@app.job(executor="process", retry=Retry(1))
def impatient(ctx: Context) -> str:
    """A middleware does not wait for it."""
    time.sleep(2)
    return "too late"


end_of_threads = threading.Event()


@app.job(retry=Retry(1))
def impatient_in_thread(ctx: Context) -> None:
    end_of_threads.wait(60)


@app.job
async def end_threads(ctx: Context) -> None:
    """Those that nobody waits for any more."""
    end_of_threads.set()


turn, spoken = threading.Event(), threading.Event()
answers: list[str] = []


@app.job(executor="process", retry=Retry(1))
def leave_a_thread(ctx: Context) -> int:
    """It speaks when the next job of the same process runs."""

    def speak() -> None:
        turn.wait(60)
        for ask in (lambda: ctx.step_sync("pay", lambda: "not mine"), lambda: ctx.enqueue_sync(child.bind(of=ctx.id))):
            try:
                ask()
                answers.append("granted")
            except Exception as error:
                answers.append(type(error).__name__)
        spoken.set()

    threading.Thread(target=speak, daemon=True).start()
    return os.getpid()


@app.job(executor="process", retry=Retry(1))
def follow_a_thread(ctx: Context) -> list[Any]:
    turn.set()
    spoken.wait(10)
    return [os.getpid(), *answers, ctx.step_sync("pay", lambda: "mine")]


@app.job(executor="process", retry=Retry(1))
def measure(ctx: Context, text: str) -> int:
    return len(text)


@app.job(executor="process")
def followed(ctx: Context) -> None:
    """A middleware goes on after it, until it is told to stop."""
    effect_sync(ctx)


@app.job
async def block_the_loop(ctx: Context, path: str) -> None:
    while not told_to_end(path):
        time.sleep(0.02)  # noqa: ASYNC251 - it is what many handlers do
    await effect(ctx)


@app.job
async def block_for_ever(ctx: Context) -> None:
    time.sleep(1000)  # noqa: ASYNC251


@app.job(timeout=1)
async def flood_the_log(ctx: Context) -> None:
    while True:
        ctx.log("x" * 2000)


@app.job(timeout=1)
async def block_past_the_timeout(ctx: Context) -> None:
    time.sleep(1000)  # noqa: ASYNC251


@app.job(timeout=1, at_most_once=True)
async def block_in_its_effect(ctx: Context) -> None:
    try:
        time.sleep(1000)  # noqa: ASYNC251
    except JobTimeout:
        raise ValueError("the server did not answer") from None


@app.job(timeout=1)
async def block_in_a_subtask(ctx: Context) -> None:
    async def sleep() -> None:
        time.sleep(1000)  # noqa: ASYNC251

    await asyncio.gather(sleep())


@app.job(timeout=1)
async def block_and_ignore(ctx: Context) -> None:
    while True:
        with suppress(Exception):
            time.sleep(1000)  # noqa: ASYNC251


# Failing


@app.job(retry=Retry(max_attempts=5))
async def fail(ctx: Context, text: str = "no") -> None:
    raise ValueError(text)


@app.job(retry=fast)
async def fail_fast(ctx: Context, text: str = "no") -> None:
    await effect(ctx)
    raise ValueError(text)


@app.job(retry=fast)
async def fail_once(ctx: Context) -> int:
    await effect(ctx)
    if ctx.attempt == 1:
        raise ValueError("the first time")
    return ctx.attempt


class Unreadable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Rude(Exception):
    def __str__(self) -> str:
        raise SystemExit(1)


class Forgetful(RetryLater):
    def __init__(self, why: str) -> None:
        Exception.__init__(self, why)


RAISED: dict[str, Callable[[], BaseException]] = {
    "nul": lambda: ValueError("a NUL \0 and half a \ud800 pair"),
    "long": lambda: ValueError("x" * 10_000_000),
    "unreadable": Unreadable,
    "rude": Rude,
    "exit": lambda: SystemExit(3),
    "interrupt": KeyboardInterrupt,
    "stop_iteration": lambda: StopIteration("empty"),
    "generator_exit": GeneratorExit,
    "cancelled": asyncio.CancelledError,
    "timeout": TimeoutError,
    "group": lambda: ExceptionGroup("several", [ValueError("a"), KeyError("b")]),
}


@app.job(retry=Retry(1))
async def throw(ctx: Context, what: str) -> None:
    raise RAISED[what]()


@app.job(retry=Retry(1))
def throw_in_thread(ctx: Context, what: str) -> None:
    raise RAISED[what]()


@app.job(retry=Retry(1), executor="process")
def throw_in_process(ctx: Context, what: str) -> None:
    raise RAISED[what]()


@app.job(retry=Retry(1))
async def cancel_itself(ctx: Context) -> None:
    this_task().cancel()
    await asyncio.sleep(1)


@app.job
async def cancel_quietly(ctx: Context) -> int:
    """As libraries did before Python 3.11: cancel, catch, say nothing."""
    before = this_task().cancelling()
    asyncio.get_running_loop().call_later(0.3, this_task().cancel)
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(1)
    return before


@app.job
async def cancel_later(ctx: Context) -> None:
    """When its task has no job, or another one."""

    def cancel(task: asyncio.Task[Any]) -> None:
        task.cancel()
        ctx.log("cancelled")

    asyncio.get_running_loop().call_later(0.3, cancel, this_task())


@app.job
async def end_a_part(ctx: Context) -> None:
    """Of its worker, for good."""
    if await starts(ctx) == 1:
        for task in asyncio.all_tasks():
            if task.get_name() == "housekeeping":
                task.cancel()


def this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


@app.job(retry=Retry(1))
async def exit_in_a_subtask(ctx: Context) -> None:
    async def exits() -> None:
        sys.exit(3)

    await asyncio.gather(exits())


@app.job(retry=Retry(1))
async def forget_super(ctx: Context) -> None:
    raise Forgetful("no super().__init__")


class TwoWords(Exception):
    """It can be pickled, and not be unpickled: so are many exceptions."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)


@app.job(retry=Retry(1), executor="process")
def log_in_riddles(ctx: Context) -> int:
    ctx.log("the first try failed", error=TwoWords(7, "no"))
    return ctx.id


@app.job(retry=Retry(1), executor="process")
def ask_in_riddles(ctx: Context) -> None:
    ctx.map_chunks_sync(add_up, [TwoWords(7, "no")])  # type: ignore[arg-type, list-item]


class Opaque:
    def __reduce__(self) -> Any:
        raise TypeError("it stays here")


RETURNED: dict[str, Callable[[], Any]] = {
    "object": Opaque,
    "nan": lambda: float("nan"),
    "nul": lambda: {"text": "a\0b"},
    "surrogate": lambda: "\ud800",
    "huge": lambda: "x" * 2_000_000,
    "endless": lambda: (loop := [], loop.append(loop))[0],
    "big_number": lambda: 10**5000,
    "nothing": lambda: None,
}


@app.job(retry=fast)
async def give(ctx: Context, what: str) -> Any:
    return RETURNED[what]()


@app.job(retry=fast)
def give_in_thread(ctx: Context, what: str) -> Any:
    return RETURNED[what]()


@app.job(retry=fast, executor="process")
def give_in_process(ctx: Context, what: str) -> Any:
    return RETURNED[what]()


@app.job(retry=fast)
async def give_up(ctx: Context) -> None:
    raise GiveUp("it makes no sense")


@app.job(retry=fast)
async def later(ctx: Context, seconds: float) -> int:
    if ctx.attempt == 1:
        raise RetryLater(seconds, "not yet")
    return ctx.attempt


@app.job
async def snooze(ctx: Context, seconds: float, times: int) -> dict[str, int] | Snooze:
    await effect(ctx)
    async with app.pools.connection() as conn:
        cursor = await conn.execute("SELECT count(*) FROM effects WHERE job_id = %s", [ctx.id])
        (before,) = await cursor.fetchone() or (0,)
    return {"attempt": ctx.attempt, "runs": before} if before > times else Snooze(seconds)


# Dying


@app.job(executor="process", retry=fast)
def abort_in_process(ctx: Context) -> None:
    effect_sync(ctx)
    os.abort()


@app.job(executor="process", retry=fast)
def exit_in_process(ctx: Context) -> None:
    os._exit(0)


@app.job(executor="process")
def keep_the_interpreter(ctx: Context) -> None:
    """No other thread of its process runs meanwhile."""
    effect_sync(ctx, "started")
    ctypes.PyDLL(None).sleep(60)


def nap_in_fork(ready: Any) -> None:
    ready.set()
    time.sleep(20)


@app.job(retry=Retry(1))
def end_helpers_in_thread(ctx: Context) -> list[int | None]:
    """Starts processes of its own and ends them."""
    forking = multiprocessing.get_context("fork")
    ready = forking.Event()
    fork, command = forking.Process(target=nap_in_fork, args=(ready,)), subprocess.Popen(["sleep", "20"])
    fork.start()
    ready.wait(10)
    fork.terminate()
    fork.join(10)
    command.terminate()
    return [fork.exitcode, command.wait(10)]


@app.job(retry=Retry(1), executor="process")
def end_helpers_in_process(ctx: Context) -> list[int | None]:
    return end_helpers_in_thread.fn(ctx)


@app.job(retry=Retry(1), executor="process", timeout=0.3)
def fork_and_hang(ctx: Context, path: str) -> None:
    if os.fork() == 0:
        until = time.monotonic() + 30
        while not told_to_end(path) and time.monotonic() < until:
            time.sleep(0.05)
        os._exit(0)
    time.sleep(60)


@app.job
async def poison(ctx: Context) -> None:
    """Takes its worker along."""
    await effect(ctx)
    os.kill(os.getpid(), 9)


async def starts(ctx: Context) -> int:
    """How often this job was started, this time included."""
    await effect(ctx, "started")
    async with app.pools.connection() as conn:
        cursor = await conn.execute("SELECT count(*) FROM effects WHERE job_id = %s AND note = 'started'", [ctx.id])
        (times,) = await cursor.fetchone() or (0,)
    return int(times)


def starts_sync(ctx: Context) -> int:
    effect_sync(ctx, "started")
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as conn:
        row = conn.execute("SELECT count(*) FROM effects WHERE job_id = %s AND note = 'started'", [ctx.id]).fetchone()
    return row[0] if row else 0


@app.job
async def stuck_once(ctx: Context) -> None:
    """Started a second time it ends at once."""
    if await starts(ctx) == 1:
        await asyncio.sleep(60)
    await effect(ctx, "done")


@app.job(retry=fast)
async def zombie(ctx: Context, what: str, path: str | None = None) -> Any:
    """Its first attempt waits, and then does something that needs the lease."""
    if await starts(ctx) == 1:
        await told(path)
        await effect(ctx, "late")
        match what:
            case "complete":
                return "from the dead"
            case "fail":
                raise ValueError("from the dead")
            case "give_up":
                raise GiveUp("from the dead")
            case "snooze":
                return Snooze(100)
            case "enqueue":
                await ctx.enqueue(child.bind(of=ctx.id))
            case "progress":
                ctx.progress(1, 1, "from the dead")
                await asyncio.sleep(1.5)
            case "chunks":
                return await ctx.map_chunks(add_up, [1, 2, 3], executor="thread")
    await effect(ctx, "done")
    return "alive"


# Cancellation and time


@app.job
async def wait_async(ctx: Context, seconds: float = 60) -> None:
    await effect(ctx, "started")
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        await effect(ctx, "told")
        raise


@app.job
def wait_in_thread(ctx: Context, seconds: float = 60) -> None:
    effect_sync(ctx, "started")
    watch(ctx, seconds)


@app.job(executor="process")
def wait_in_process(ctx: Context, seconds: float = 60) -> None:
    effect_sync(ctx, "started")
    watch(ctx, seconds)


def watch(ctx: Context, seconds: float, path: str = "") -> None:
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until and not told_to_end(path):
            ctx.check()
            time.sleep(0.02)
    except (JobCancelled, JobAbandoned):
        effect_sync(ctx, "told")
        raise


def told_to_end(path: str) -> bool:
    return os.path.exists(path)


@app.job
async def short_async(ctx: Context, path: str) -> None:
    """Ends a moment after the file is there, or when it is told to; a second time at once."""
    if await starts(ctx) == 1:
        while not told_to_end(path):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.7)


@app.job
def short_thread(ctx: Context, path: str) -> None:
    if starts_sync(ctx) == 1:
        watch(ctx, 60, path)
        watch(ctx, 0.7)


@app.job(executor="process")
def short_process(ctx: Context, path: str) -> None:
    if starts_sync(ctx) == 1:
        watch(ctx, 60, path)
        watch(ctx, 0.7)


@app.job
async def long_async(ctx: Context, path: str) -> None:
    if await starts(ctx) == 1:
        await asyncio.sleep(60)


@app.job
def long_thread(ctx: Context, path: str) -> None:
    if starts_sync(ctx) == 1:
        watch(ctx, 60)


@app.job(executor="process")
def long_process(ctx: Context, path: str) -> None:
    if starts_sync(ctx) == 1:
        watch(ctx, 60)


@app.job
async def deaf_async(ctx: Context, path: str) -> None:
    """Does not take no for an answer."""
    if await starts(ctx) == 1:
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60)


@app.job
def deaf_thread(ctx: Context, path: str) -> None:
    if starts_sync(ctx) == 1:
        time.sleep(60)


@app.job(executor="process")
def deaf_process(ctx: Context, path: str) -> None:
    if starts_sync(ctx) == 1:
        time.sleep(60)


@app.job(timeout=0.2)
async def short_of_time(ctx: Context) -> None:
    await asyncio.sleep(60)


@app.job(retry=fast)
async def stubborn(ctx: Context) -> None:
    """Fails when it is cancelled."""
    await effect(ctx, "started")
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        raise ValueError("never") from None


@app.job
async def ignore_async(ctx: Context) -> None:
    """Does not take no for an answer, and ends when it pleases."""
    await effect(ctx, "started")
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        await effect(ctx, "ignored")
        await asyncio.sleep(0.5)


@app.job(executor="process")
def ignore_in_process(ctx: Context, seconds: float = 60) -> None:
    effect_sync(ctx, "started")
    time.sleep(seconds)


# What the context offers


@app.job
async def child(ctx: Context, of: int) -> int:
    await effect(ctx, f"child of {of}")
    return of


@app.job
async def parent(ctx: Context) -> int:
    return (await ctx.enqueue(child.bind(of=ctx.id))).id


@app.job
def parent_in_thread(ctx: Context) -> int:
    return ctx.enqueue_sync(child.bind(of=ctx.id)).id


@app.job(executor="process")
def parent_in_process(ctx: Context) -> int:
    return ctx.enqueue_sync(child.bind(of=ctx.id)).id


@app.job
async def report(ctx: Context, message: str = "half way", seconds: float = 60) -> None:
    ctx.progress(1, 2, message)
    ctx.log("reporting", step=1)
    await asyncio.sleep(seconds)


@app.job
async def report_badly(ctx: Context) -> None:
    ctx.progress(float("nan"), 2, "a NUL \0")
    await asyncio.sleep(60)


@app.job(executor="process")
def report_in_process(ctx: Context, seconds: float = 60) -> None:
    ctx.progress(1, 2, "in a process")
    watch(ctx, seconds)


@app.job
async def about(ctx: Context) -> dict[str, Any]:
    return {
        "id": ctx.id,
        "type": ctx.type,
        "queue": ctx.queue,
        "attempt": ctx.attempt,
        "max_attempts": ctx.max_attempts,
        "last": ctx.is_last_attempt,
        "timeout": ctx.timeout,
        "key": ctx.idempotency_key,
        "threads": ctx.threads,
        "remaining": ctx.remaining(),
    }


def add_up(numbers: Sequence[int]) -> int:
    return sum(numbers)


MEET = "INSERT INTO effects (job_id, pid, note) VALUES (0, %s, 'a chunk waits')"
MET = "SELECT count(*) FROM effects WHERE note = 'a chunk waits'"


def meet(numbers: Sequence[int]) -> int:
    """Ends when four chunks run at the same time."""
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as conn:
        conn.execute(MEET, [os.getpid()])
        until = time.monotonic() + 15
        while conn.execute(MET).fetchone() != (4,) and time.monotonic() < until:
            time.sleep(0.05)
    return os.getpid()


@app.job
async def sum_a_million(ctx: Context) -> int:
    return sum(await ctx.map_chunks(add_up, range(1_000_000), executor="thread"))


@app.job
async def chunks_of_two_lambdas(ctx: Context) -> list[list[int]]:
    total = await ctx.map_chunks(lambda numbers: sum(numbers), [1, 2, 3], executor="thread")
    return [total, await ctx.map_chunks(lambda numbers: max(numbers), [1, 2, 3], executor="thread")]


@app.job
async def chunks_that_meet(ctx: Context) -> list[int]:
    return await ctx.map_chunks(meet, range(8))


@app.job
async def chunks_in_processes(ctx: Context) -> int:
    return sum(await ctx.map_chunks(add_up, range(8)))


@app.job(executor="process")
def chunks_from_process(ctx: Context) -> int:
    return sum(ctx.map_chunks_sync(add_up, range(100), executor="thread"))


CHUNKS = "INSERT INTO effects (job_id, note) VALUES (0, %s)"


def fragile(numbers: Sequence[int]) -> int:
    """The chunk with the last number fails until it has been tried once."""
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as conn:
        tried = conn.execute("SELECT count(*) FROM effects WHERE note = %s", [f"chunk {numbers[0]}"]).fetchone()
        conn.execute(CHUNKS, [f"chunk {numbers[0]}"])
    if tried == (0,) and numbers[-1] == 99:
        raise ValueError("a chunk failed")
    time.sleep(0.3)
    return sum(numbers)


@app.job(retry=fast)
def sum_fragile(ctx: Context) -> int:
    return sum(ctx.map_chunks_sync(fragile, range(100), executor="thread"))


def die(numbers: Sequence[int]) -> int:
    os._exit(1)


def hang(numbers: Sequence[int]) -> int:
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as conn:
        conn.execute(MEET.replace("a chunk waits", "a chunk hangs"), [os.getpid()])
    time.sleep(1000)
    return 0


@app.job
async def hanging_chunks(ctx: Context) -> list[int]:
    return await ctx.map_chunks(hang, range(2))


@app.job
def hanging_chunks_of_a_thread(ctx: Context) -> list[int]:
    return ctx.map_chunks_sync(hang, range(2))


@app.job(executor="process")
def hanging_chunks_of_a_process(ctx: Context) -> list[int]:
    return ctx.map_chunks_sync(hang, range(2))


def hang_in_thread(numbers: Sequence[int]) -> int:
    end_of_threads.wait(60)
    return 0


@app.job(timeout=0.3)
async def hanging_chunks_in_threads(ctx: Context) -> list[int]:
    return await ctx.map_chunks(hang_in_thread, range(8), executor="thread")


@app.job(retry=Retry(1))
async def dying_chunks(ctx: Context) -> list[int]:
    return await ctx.map_chunks(die, range(4))


in_use = 0


@app.job
async def hold(ctx: Context, seconds: float = 0, path: str | None = None) -> dict[str, int]:
    """Holds its slots, and looks at how many are held."""
    global in_use
    in_use += ctx.threads
    held = in_use
    try:
        await asyncio.sleep(seconds)
        await told(path)
    finally:
        in_use -= ctx.threads
    return {"threads": ctx.threads, "held": held}


@app.job
async def traced_well(ctx: Context) -> str:
    await effect(ctx, "handler")
    return "fine"


@app.job(retry=Retry(1))
def traced_badly(ctx: Context) -> str:
    effect_sync(ctx, "handler")
    raise ValueError("no")
