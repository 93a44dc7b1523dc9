"""Child processes that run handlers one at a time; one that hangs or dies takes only its own job along."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from pgqueue.app import BoundJob, JobRef, JobType
from pgqueue.context import Context
from pgqueue.errors import LeaseLost
from pgqueue.outcome import JobAbandoned, JobCancelled, JobTimeout, Snooze, said

PR_SET_PDEATHSIG = 1
STOP_GRACE = 1.0
"""Seconds that a handler has to end after it was asked to, before its process is killed."""

# A forked child would share the worker's connections and locks.
spawning = multiprocessing.get_context("spawn")


class ChildDied(Exception):
    """The process that ran the handler is gone."""


class RemoteError(Exception):
    """An error of a handler that could not be sent back as it was."""


class Child:
    def __init__(self) -> None:
        self.pipe, far = spawning.Pipe()
        self.process = spawning.Process(target=serve, args=(far,), name="pgqueue-child")
        self.process.start()
        far.close()
        self.busy = False
        self.spoilt = False
        self.told = False
        """Whether it was ever asked to stop."""
        self._runs = 0
        self._killed_for: BaseException | None = None
        self._sending = threading.Lock()

    def run(
        self,
        handler: JobType[..., Any],
        ctx: Context,
        arguments: dict[str, Any],
        host: Any,
        started: Callable[[], None],
    ) -> Any:
        """In a thread of the worker: sends the job, serves the child's wishes, returns what the handler returned."""
        about = {
            "id": ctx.id,
            "type": ctx.type,
            "queue": ctx.queue,
            "attempt": ctx.attempt,
            "max_attempts": ctx.max_attempts,
            "timeout": ctx.timeout,
            "idempotency_key": ctx.idempotency_key,
            "lease_token": ctx.lease_token,
            "payload": ctx.payload,
            "threads": ctx.threads,
        }
        kind, value = self._talk(("run", handler, about, arguments), host, ctx, started)
        if kind == "stopped" and ctx._stop is not None:
            raise ctx._stop
        if kind != "returned":
            raise value
        return value

    def run_chunk(self, fn: Callable[[Any], Any], chunk: Any) -> Any:
        """The same for a part of a job, which has no wishes."""
        kind, value = self._talk(("chunk", fn, chunk), None, None, lambda: None)
        if kind != "returned":
            raise value
        return value

    def _talk(self, job: Any, host: Any, ctx: Context | None, started: Callable[[], None]) -> tuple[str, Any]:
        self._runs += 1
        over = False
        try:
            self._send(job)
            while True:
                kind, value = self._receive()
                if kind in ("returned", "raised", "stopped"):
                    over = True
                    return kind, value
                if kind == "started":
                    started()
                    continue
                self._serve(host, ctx, kind, value)
        except (EOFError, OSError) as error:
            self._wait_for_end(5)
            if self._killed_for is not None:
                raise self._killed_for from None
            raise ChildDied(f"the process that ran the job ended with {ending(self.process.exitcode)}") from error
        finally:
            if not over:
                # Whatever it still has to say is about this job: nobody else may take it for an answer.
                self.spoil()

    def _serve(self, host: Any, ctx: Context | None, kind: str, value: Any) -> None:
        if kind == "log":
            with contextlib.suppress(Exception):  # a field that cannot be read is not worth the job, either
                record = logging.makeLogRecord(pickle.loads(value))
                logging.getLogger(record.name).handle(record)
            return
        whose, method, arguments = value
        ours = ctx is not None and whose == (ctx.id, ctx.lease_token)
        if method == "report_progress":
            if ours:
                host.report_progress(ctx, *arguments)
            return
        try:
            if not ours:
                # A thread that an earlier job left behind speaks for that one, not for this.
                raise LeaseLost(f"job {whose[0]} has ended")
            self._send(("answer", True, getattr(host, method)(ctx, *arguments)))
        except Exception as error:
            self._send(("answer", False, sendable(error)))

    def stop(self, why: JobCancelled | JobAbandoned) -> None:
        """The handler is told at its next ctx.check(), and killed if it does not end soon."""
        self._end(why)

    def time_out(self) -> None:
        self._killed_for = JobTimeout("the attempt ran over its timeout and its process was killed")
        self.kill()

    def _end(self, why: BaseException) -> None:
        self.told = True
        # Not here, in the thread of the loop: a process that does not read keeps whoever writes to it.
        threading.Thread(target=self._tell, args=[why], daemon=True).start()
        timer = threading.Timer(STOP_GRACE, self._kill_for, [why, self._runs])
        timer.daemon = True
        timer.start()

    def _tell(self, why: BaseException) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._send(("stop", why))

    def _kill_for(self, why: BaseException, run: int) -> None:
        # By now the process may run the next job, which nobody wants to stop.
        if self.busy and self._runs == run:
            # Not `why` itself, which is what ctx.check() raises: who was killed has said nothing.
            self._killed_for = type(why)(f"{why}, and its process was killed")
            self.kill()

    def kill(self) -> None:
        with contextlib.suppress(ValueError):  # it is closed already
            self.process.kill()

    def spoil(self) -> None:
        """It runs no other job."""
        self.spoilt = True
        self.kill()

    def _receive(self) -> Any:
        # A process that the handler started may hold the other end as well: it counts for nothing when ours is gone.
        while not self.pipe.poll(0.5):
            if not self.process.is_alive() and not self.pipe.poll(0):
                raise EOFError
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            raise
        except Exception as error:
            # Not the handler's own error: it goes on, and nobody knows how far it has come.
            raise ChildDied(f"the process that ran the job said what cannot be read: {error}") from error

    def _wait_for_end(self, seconds: float) -> None:
        """Not join, which waits for all who inherited the child's end of a pipe."""
        deadline = time.monotonic() + seconds
        while self.process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.005)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.pipe.close()
        self._wait_for_end(1)
        if self.process.is_alive():
            self.process.kill()
            self._wait_for_end(5)
        self.process.close()

    def _send(self, message: Any) -> None:
        with self._sending:
            self.pipe.send(message)


class Children:
    """The child processes of a worker: idle ones are used again."""

    def __init__(self) -> None:
        self.idle: list[Child] = []
        self.all: set[Child] = set()

    def take(self) -> Child:
        while self.idle:
            child = self.idle.pop()
            if child.process.is_alive():
                child.busy = True
                return child
            self._drop(child)
        child = Child()
        child.busy = True
        self.all.add(child)
        return child

    def give_back(self, child: Child) -> None:
        child.busy = False
        # One that was told to stop may still be told so by a timer, or may be half dead.
        if child.process.is_alive() and not child.told and child._killed_for is None and not child.spoilt:
            self.idle.append(child)
        else:
            child.kill()
            self._drop(child)

    def _drop(self, child: Child) -> None:
        self.all.discard(child)
        child.close()

    def close(self) -> None:
        for child in list(self.all):
            child.kill()
            self._drop(child)
        self.idle.clear()


class ChildHost:
    """The worker, as the handler in the child process sees it."""

    def __init__(self, pipe: Connection, answers: Any) -> None:
        self.pipe = pipe
        self.answers = answers
        self.sending = threading.Lock()
        self.asking = threading.Lock()

    def send(self, kind: str, value: Any) -> None:
        with self.sending:
            self.pipe.send((kind, value))

    def report_progress(self, ctx: Context, progress: dict[str, Any]) -> None:
        self.send("call", ((ctx.id, ctx.lease_token), "report_progress", (progress,)))

    def _ask(self, ctx: Context, method: str, *arguments: Any) -> Any:
        with self.asking:
            self.send("call", ((ctx.id, ctx.lease_token), method, arguments))
            fine, value = self.answers.get()
        if not fine:
            raise value
        return value

    def enqueue_sync(self, ctx: Context, job: BoundJob[Any]) -> JobRef[Any]:
        return job.ref(self._ask(ctx, "add_job_sync", job.new_job))

    def map_chunks_sync(
        self, ctx: Context, fn: Callable[[Sequence[Any]], Any], items: Sequence[Any], executor: str
    ) -> list[Any]:
        answer: list[Any] = self._ask(ctx, "map_chunks_sync", fn, items, executor)
        return answer

    def load_step_sync(self, ctx: Context, name: str) -> tuple[bool, str | None]:
        answer: tuple[bool, str | None] = self._ask(ctx, "load_step_sync", name)
        return answer

    def save_step_sync(self, ctx: Context, name: str, result: str | None) -> None:
        self._ask(ctx, "save_step_sync", name, result)

    def transaction_sync(self, ctx: Context, isolation: str | None) -> NoReturn:
        raise TypeError('ctx.transaction_sync is for handlers in threads: leave out executor="process"')

    # The rest is for coroutines, which do not run here.

    async def load_step(self, ctx: Context, name: str) -> tuple[bool, str | None]:
        return self.load_step_sync(ctx, name)

    async def save_step(self, ctx: Context, name: str, result: str | None) -> None:
        self.save_step_sync(ctx, name, result)

    def transaction(self, ctx: Context, isolation: str | None) -> NoReturn:
        self.transaction_sync(ctx, isolation)

    async def enqueue(self, ctx: Context, job: BoundJob[Any]) -> JobRef[Any]:
        return self.enqueue_sync(ctx, job)

    async def map_chunks(
        self, ctx: Context, fn: Callable[[Sequence[Any]], Any], items: Sequence[Any], executor: str
    ) -> list[Any]:
        return self.map_chunks_sync(ctx, fn, items, executor)


class LogToWorker(logging.Handler):
    def __init__(self, host: ChildHost) -> None:
        super().__init__()
        self.host = host

    def emit(self, record: logging.LogRecord) -> None:
        told = {key: value for key, value in vars(record).items() if key not in ("args", "exc_info", "exc_text")}
        with contextlib.suppress(Exception):  # a field that cannot be sent is not worth the job
            self.host.send("log", pickle.dumps(told | {"msg": record.getMessage(), "args": ()}))


def serve(pipe: Connection) -> None:
    """The child's main loop: ends when the worker does, however that ends."""
    die_with_parent()
    ignore_signals()
    # What a handler forks must not keep the worker from seeing that this process has ended.
    os.register_at_fork(after_in_child=pipe.close)
    jobs: queue.Queue[Any] = queue.Queue()
    answers: queue.Queue[Any] = queue.Queue()
    host = ChildHost(pipe, answers)
    root = logging.getLogger("pgqueue")
    root.addHandler(LogToWorker(host))
    root.setLevel(logging.INFO)
    current: list[Context] = []

    def listen() -> None:
        while True:
            try:
                message = pipe.recv()
            except (EOFError, OSError):
                os._exit(0)
            except Exception as error:  # the handler's module could not be imported, or an argument not be read
                host.send("raised", sendable(error))
                continue
            if message[0] in ("run", "chunk"):
                jobs.put(message[1:])
            elif message[0] == "answer":
                answers.put(message[1:])
            elif current:
                current[0]._stop = message[1]

    threading.Thread(target=listen, daemon=True).start()
    with contextlib.suppress(OSError):  # the worker is gone
        run_jobs(jobs, host, current)


def run_jobs(jobs: queue.Queue[Any], host: ChildHost, current: list[Context]) -> None:
    while True:
        handler, about, *rest = jobs.get()
        if not rest:
            run_chunk(handler, about, host)
            continue
        (arguments,) = rest
        ctx = Context(host, started=time.monotonic(), **about)
        current[:] = [ctx]
        host.send("started", None)
        try:
            result = handler.fn(ctx, **arguments) if handler.takes_context else handler.fn(**arguments)
            if not isinstance(result, Snooze):
                # What cannot be stored is refused here, before it is sent.
                text = handler.encode_result(result)
                result = None if text is None else json.loads(text)
        except BaseException as error:
            current.clear()
            host.send("stopped" if error is ctx._stop else "raised", sendable(error))
        else:
            current.clear()
            try:
                host.send("returned", result)
            except OSError:
                raise
            except Exception as error:
                host.send("raised", sendable(error))


def run_chunk(fn: Callable[[Any], Any], chunk: Any, host: ChildHost) -> None:
    try:
        kind, value = "returned", fn(chunk)
    except BaseException as error:
        kind, value = "raised", sendable(error)
    try:
        host.send(kind, value)
    except OSError:
        raise
    except Exception as error:
        host.send("raised", sendable(error))


def die_with_parent() -> None:
    """Where the kernel can do it: who keeps Python's lock, or hangs in an import, hears of no closed pipe."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            parent = multiprocessing.parent_process()
            if parent is not None and os.getppid() != parent.pid:
                os._exit(0)


def ignore_signals() -> None:
    """Signals may reach the whole group; the worker decides what they mean for its children. But the processes that a
    handler starts must heed them: SIG_IGN would be inherited, and terminate() would not end them."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)
    os.register_at_fork(after_in_child=heed_signals)


def heed_signals() -> None:
    """In a forked process: signals are its own again."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def sendable(error: BaseException) -> BaseException:
    """The error itself where it survives the way, with its traceback as a note; else its words."""
    lines = "".join(traceback.format_exception(error))
    try:
        error.add_note("in the child process:\n" + lines)
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RemoteError(f"{type(error).__name__}: {said(error)}\n{lines}")
    return error


def ending(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
