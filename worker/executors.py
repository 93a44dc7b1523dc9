"""Where handlers run: `async def` on the loop, `def` in a thread, executor="process" in a child process.

A coroutine is cancelled at its timeout. A child process is killed at its timeout. A thread cannot be stopped from
outside: its handler learns of a timeout or a cancellation at its next ctx.check().
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from pgqueue.app import JobType
from pgqueue.worker.children import Children

if TYPE_CHECKING:
    from pgqueue.worker.attempt import Attempt
    from pgqueue.worker.host import WorkerHost
    from pgqueue.worker.once import Once

START_WITHIN = 120.0
"""Seconds that a process has to come to its handler: an import that hangs has no timeout of its own."""
LEFT_BEHIND = 1000
"""So many threads may be left behind by middlewares that stopped waiting for them."""


class Executors:
    def __init__(self, threads: int, host: WorkerHost, once: Once) -> None:
        self.host = host
        self.once = once
        # The slots are the limit. A thread that nobody waits for any more must not take the place of the next job's.
        self.threads = ThreadPoolExecutor(threads + LEFT_BEHIND, thread_name_prefix="job")
        self.children = Children()
        self.ending = False
        """Whether a cancellation is meant for the worker."""

    def call(
        self, handler: JobType[..., Any], attempt: Attempt, arguments: dict[str, Any]
    ) -> Callable[[], Awaitable[Any]]:
        """The handler, ready to be awaited."""
        fn, ctx = handler.fn, attempt.ctx
        if handler.executor == "async":
            if handler.takes_context:
                return lambda: fn(ctx, **arguments)
            return lambda: fn(**arguments)
        loop = asyncio.get_running_loop()
        if handler.executor == "thread":
            attempt.on_stop = lambda why: None  # ctx.check() sees it
            call = (lambda: fn(ctx, **arguments)) if handler.takes_context else (lambda: fn(**arguments))
            return lambda: loop.run_in_executor(self.threads, as_in_coroutine, call)
        return lambda: self._in_child(handler, attempt, arguments)

    async def _in_child(self, handler: JobType[..., Any], attempt: Attempt, arguments: dict[str, Any]) -> Any:
        loop = asyncio.get_running_loop()
        child = self.children.take()
        attempt.on_stop = child.stop
        timers: list[asyncio.TimerHandle] = []

        def start_timer() -> None:
            # From when the handler starts: the time that a new process needs is not the job's.
            late.cancel()
            if attempt.ctx.timeout is not None:
                timers.append(loop.call_later(attempt.ctx.timeout, child.time_out))

        def started() -> None:
            loop.call_soon_threadsafe(start_timer)

        late = loop.call_later(START_WITHIN, child.kill)
        timers.append(late)
        call = partial(child.run, handler, attempt.ctx, arguments, self.host, started)
        running = self.threads.submit(as_in_coroutine, call)
        try:
            return await asyncio.wrap_future(running)
        finally:
            attempt.on_stop = lambda why: None  # the process may run another job by then
            for timer in timers:
                timer.cancel()
            if running.done():
                self.children.give_back(child)
            else:
                # A middleware does not wait any more; its thread still does.
                child.spoil()
                running.add_done_callback(lambda _: loop.call_soon_threadsafe(self.children.give_back, child))

    def close(self) -> None:
        self.children.close()
        self.threads.shutdown(wait=False, cancel_futures=True)


def as_in_coroutine(call: Callable[[], Any]) -> Any:
    """A future cannot carry these two: one would never be done, the other would close who waits for it."""
    try:
        return call()
    except (StopIteration, GeneratorExit) as error:
        raise RuntimeError(f"the handler raised {type(error).__name__}") from error
