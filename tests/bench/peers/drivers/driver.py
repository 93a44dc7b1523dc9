"""What every driver shares: the producer's side of a measure, and what the handlers note down.

A driver runs in the environment of its peer, with nothing of ours. `python with_x.py add 1000` and so on; what it found
it prints as JSON. The handlers append to the files that BENCH_STAMPS and BENCH_COUNTS name.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

DSN = os.environ.get("DATABASE_URL", "")
REDIS = os.environ.get("REDIS_URL", "")
PART = int(os.environ.get("BENCH_PART", "20000"))
LEASE = os.environ.get("BENCH_LEASE")
"""Seconds after which a dead worker's jobs should be taken over; None: as the peer ships."""
HELD = 3600
SENDERS = int(os.environ.get("BENCH_SENDERS", "8"))

_counter = itertools.count(1)


class NoSuchCall(Exception):
    """The peer has no call for many."""


class Producer(Protocol):
    """Its methods are coroutines, or plain functions that threads may call."""

    def open(self) -> Any: ...

    def add(self, job: str, number: int) -> Any:
        """One job; when it returns the job is committed."""

    def add_many(self, job: str, jobs: int) -> Any:
        """By the best call that the peer has for many; NoSuchCall: it has none."""

    def add_at(self, job: str, number: int, at: float) -> Any: ...

    def close(self) -> Any: ...


def stamp(number: int) -> None:
    """When the handler started, and where."""
    _append("BENCH_STAMPS", f"{number} {time.time():.6f} {os.getpid()}\n")


def count() -> None:
    """When another part of the jobs had started."""
    if (done := next(_counter)) % PART == 0:
        _append("BENCH_COUNTS", f"{done} {time.time():.6f} {os.getpid()}\n")


def _append(variable: str, line: str) -> None:
    with open(os.environ[variable], "a") as file:
        file.write(line)


def main(producer: Producer) -> None:
    asyncio.run(_main(producer, sys.argv[1:]))


async def _main(producer: Producer, arguments: list[str]) -> None:
    what, *numbers = arguments
    await _maybe(producer.open())
    try:
        found = await MEASURES[what](producer, *(float(number) for number in numbers))
    finally:
        await _maybe(producer.close())
    print(json.dumps(found), flush=True)


async def add(producer: Producer, jobs: float) -> dict[str, float]:
    """One at a time, each when the one before is committed."""
    await _maybe(producer.add("noop", 0))  # connections are open
    started = time.perf_counter()
    if inspect.iscoroutinefunction(producer.add):
        for number in range(int(jobs)):
            await producer.add("noop", number)
    else:
        for number in range(int(jobs)):
            producer.add("noop", number)
    return {"seconds": time.perf_counter() - started}


async def add_many(producer: Producer, jobs: float) -> dict[str, float]:
    await _maybe(producer.add("noop", 0))
    started = time.perf_counter()
    try:
        await _maybe(producer.add_many("noop", int(jobs)))
    except NoSuchCall:
        return {}
    return {"seconds": time.perf_counter() - started}


async def stamps(producer: Producer, jobs: float, first: float, rate: float) -> dict[str, Any]:
    """Jobs that note their start. Rate 0: one, then a pause of 10 to 30 ms; else so many a second, come what may."""
    sent: list[tuple[int, float, float]] = []
    numbers = range(int(first), int(first + jobs))

    async def send(number: int, call: Callable[[str, int], Awaitable[Any]]) -> None:
        before = time.time()
        await call("stamp", number)
        sent.append((number, before, time.time()))

    with _calls(producer.add) as call:
        if not rate:
            for number in numbers:
                await send(number, call)
                await asyncio.sleep(random.uniform(0.01, 0.03))
        else:
            await _at_rate([(lambda n=n: send(n, call)) for n in numbers], rate)
    return {"sent": sent}


async def _at_rate(sends: list[Callable[[], Awaitable[None]]], rate: float) -> None:
    """Each begins at its time; who finds all senders busy waits for one."""
    free = asyncio.Semaphore(SENDERS)

    async def one(send: Callable[[], Awaitable[None]]) -> None:
        async with free:
            await send()

    started, tasks = time.perf_counter(), []
    for number, send in enumerate(sends):
        await asyncio.sleep(max(0, started + number / rate - time.perf_counter()))
        tasks.append(asyncio.create_task(one(send)))
    await asyncio.gather(*tasks)


async def schedule(producer: Producer, jobs: float, first: float, seconds: float) -> dict[str, Any]:
    """Jobs that note their start, due at random moments of the `seconds` that begin in two."""
    due = {}
    for number in range(int(first), int(first + jobs)):
        at = time.time() + 2 + random.random() * seconds
        await _maybe(producer.add_at("stamp", number, at))
        due[number] = at
    return {"due": due}


async def hold(producer: Producer, jobs: float, first: float) -> dict[str, Any]:
    for number in range(int(first), int(first + jobs)):
        await _maybe(producer.add("hold", number))
    return {}


async def hidden(producer: Any, jobs: float) -> dict[str, Any]:
    """No-op jobs where no worker sees them, for those who live in Redis."""
    await _maybe(producer.add_hidden(int(jobs)))
    return {}


async def setup(producer: Producer) -> dict[str, Any]:
    return {}


MEASURES: dict[str, Callable[..., Awaitable[dict[str, Any]]]] = {
    "setup": setup,
    "add": add,
    "add_many": add_many,
    "stamps": stamps,
    "schedule": schedule,
    "hold": hold,
    "hidden": hidden,
}


class _calls:
    """A function as a coroutine: as it is, or in threads."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.threads = None if inspect.iscoroutinefunction(function) else ThreadPoolExecutor(SENDERS)

    def __enter__(self) -> Callable[..., Awaitable[Any]]:
        if self.threads is None:
            return self.function
        threads, loop = self.threads, asyncio.get_running_loop()
        return lambda *arguments: loop.run_in_executor(threads, self.function, *arguments)

    def __exit__(self, *_: object) -> None:
        if self.threads is not None:
            self.threads.shutdown()


async def _maybe(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def chunks(jobs: int, size: int) -> Iterator[int]:
    """How many in each of the calls that add many."""
    for start in range(0, jobs, size):
        yield min(size, jobs - start)
