"""The worker process: puts the parts together, and stops them in order.

Stopping: no more claims; waiting jobs are given back at once; running ones get their grace, then are told to end and
given back, uncharged; what ended is written; the worker's row is retired.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from types import FrameType
from typing import Any, NoReturn
from uuid import uuid4

import psycopg

from pgqueue import finish, migrate, prune, workers
from pgqueue.app import JobType, PgQueue
from pgqueue.claim import Claimant, Claimed
from pgqueue.errors import DatabaseUnavailable, PgQueueError
from pgqueue.idempotency import L1
from pgqueue.job import Lease
from pgqueue.listen import Listener
from pgqueue.log import say
from pgqueue.outcome import JobAbandoned, JobCancelled
from pgqueue.settings import Settings
from pgqueue.worker import attempt
from pgqueue.worker.attempt import Attempt
from pgqueue.worker.children import heed_signals
from pgqueue.worker.claimer import Claimer
from pgqueue.worker.executors import Executors
from pgqueue.worker.finisher import Finisher
from pgqueue.worker.heartbeat import Heartbeat, Vitals
from pgqueue.worker.host import WorkerHost
from pgqueue.worker.janitor import Janitor
from pgqueue.worker.link import Link
from pgqueue.worker.once import Once
from pgqueue.worker.scout import Scout
from pgqueue.worker.slots import Slots
from pgqueue.worker.watchdog import Watchdog
from pgqueue.workers import Pulse, Worker

logger = logging.getLogger("pgqueue.worker")

MARGIN = 2.0
"""Of the grace, for giving back and writing."""
STALE_AFTER = 1.0
"""Claimed jobs that wait while no slot gets free are given back after this many seconds: somebody else may be idle."""


class Runtime:
    def __init__(
        self,
        app: PgQueue,
        dsn: str,
        settings: Settings,
        *,
        threads: int,
        queues: list[str] | None = None,
        name: str | None = None,
        parent: int | None = None,
    ) -> None:
        self.app = app
        self.settings = settings
        self.dsn = dsn
        self.types: dict[str, JobType[..., Any]] = dict(app.types)
        self.worker = Worker(
            id=uuid4(),
            name=name or f"{socket.gethostname()}-{os.getpid()}",
            host=socket.gethostname(),
            pid=os.getpid(),
            version=installed_version(),
            queues=queues,
            types=sorted(self.types),
            threads=threads,
            listening=False,
            lease_timeout=settings.lease_timeout,
        )
        self.slots = Slots(threads)
        self.held: dict[int, tuple[Claimed, str]] = {}
        """The jobs that have slots, with their tokens: those that run, and those that are about to."""
        self.running: dict[int, Attempt] = {}
        self.host = WorkerHost(dsn, threads, self.worker.name)
        self.once = Once(self.host, L1(settings.redis_url) if settings.redis_url else None)
        self.executors = Executors(threads, self.host, self.once)
        self.parent = parent
        """The supervisor's process id: without its supervisor a worker ends, or there would soon be too many."""
        self.stopping = False
        self.told: float | None = None
        """When the first signal came; the loop may hear of it later."""
        self._signals = 0
        self._stop = asyncio.Event()
        self._hurry = False

    # The life of the process

    async def run(self) -> None:
        """Until stop() is called, or a signal has the same effect."""
        self.loop = self.host.loop = asyncio.get_running_loop()
        self._assemble()
        if not await self._start():
            return
        self.heartbeat.start()
        say(
            logger,
            logging.INFO,
            "worker.started",
            f"started with {self.worker.threads} threads, queues {', '.join(self.worker.queues or ['all'])},"
            f" types {', '.join(self.worker.types or [])}",
            id=str(self.worker.id),
            threads=self.worker.threads,
        )
        broken: asyncio.Task[Any] | None = None
        tasks = [asyncio.create_task(part, name=name) for name, part in self._parts()]
        stopped = asyncio.create_task(self._stop.wait())
        try:
            done, _ = await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
            if stopped not in done:
                broken = next(task for task in tasks if task.done())
                say(
                    logger,
                    logging.CRITICAL,
                    "worker.broken",
                    f"{broken.get_name()} ended unexpectedly; the worker stops",
                )
        finally:
            stopped.cancel()
            await self._shut_down(tasks)
        for task in tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error
        if broken is not None:
            raise RuntimeError(f"{broken.get_name()} ended unexpectedly")  # no orderly end: it is to be started again

    def _assemble(self) -> None:
        name = self.worker.name
        self.who = Claimant(self.worker.id, self.worker.queues, self.worker.types, self.worker.threads)
        self.janitor = Janitor(
            Link(self.dsn, f"pgqueue-janitor {name}"),
            self.worker.id,
            poll_interval=self.settings.poll_interval,
            rescue_interval=self.settings.rescue_interval,
            retention_days=self.settings.retention_days,
            known=self._known,
            cancel=self._cancel,
            ready=self._ready,
            running=self._leases,
            lost=self._lost,
        )
        self.finisher = Finisher(Link(self.dsn, f"pgqueue-finish {name}"), self.janitor.due_in, self.once.remember)
        self.claimer = Claimer(
            Link(self.dsn, f"pgqueue-claim {name}"),
            self.who,
            self.slots,
            self.finisher,
            self.settings.poll_interval,
            partial(self.janitor.reconcile, age=0),
            lambda: self.heartbeat.lease_stands(time.monotonic()),
        )
        self.scout = Scout(Link(self.dsn, f"pgqueue-scout {name}"), self.claimer)
        self.listener = Listener(
            self.settings.listen_url or self.dsn, workers.channel(self.worker.id), self._heard, f"pgqueue-listen {name}"
        )
        self.heartbeat = Heartbeat(
            self.dsn, self.worker, self.settings.heartbeat_interval, self._vitals, self._beat_from_thread
        )
        self.listener.changed = self.heartbeat.now

    def _parts(self) -> Iterable[tuple[str, Any]]:
        yield "claimer", self.claimer.run()
        yield "scout", self.scout.run()
        yield "finisher", self.finisher.run()
        yield "janitor", self.janitor.run()
        yield "listener", self.listener.run()
        yield "housekeeping", self._keep_house()
        for number in range(self.worker.threads):
            yield f"runner {number}", self._runner()

    async def _start(self) -> bool:
        """Whether it is registered; not if it was stopped while it waited for the database."""

        async def start() -> None:
            await self._wait_for_schema()
            # When nobody has worked for a week, there is none for today, and what is claimed now might end before the
            # janitor has come to it. Should this fail, the janitor tells.
            with suppress(psycopg.Error, OSError):
                await prune.make_partitions(await self.claimer.link.get())
            await self._register()

        starting, stopped = asyncio.create_task(start()), asyncio.create_task(self._stop.wait())
        await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if starting.done():
            starting.result()
            return True
        starting.cancel()
        await asyncio.wait([starting], timeout=1)
        await self.claimer.link.close()
        return False

    async def _wait_for_schema(self) -> None:
        """The database may come up after the worker; a schema that this code does not know is not waited for."""
        link = self.claimer.link
        while True:
            conn = await link.get()
            try:
                await migrate.check_schema(conn)
                return
            except (psycopg.Error, OSError, DatabaseUnavailable) as error:
                await link.failed(error, "waiting for the database")

    async def _register(self) -> None:
        while True:
            try:
                conn = await self.claimer.link.get()
                await workers.describe_types(
                    conn, [(each.name, each.queue, _schema(each)) for each in self.types.values()]
                )
                await workers.register(conn, self.worker)
                self.heartbeat.confirmed = time.monotonic()
                return
            except (psycopg.Error, OSError) as error:
                await self.claimer.link.failed(error, "registering when the database is back")

    def stop(self) -> None:
        """The first call lets running jobs finish within the grace; the second cancels them."""
        self._signals += 1
        if self._signals == 1:
            self.stopping = True
            self.claimer.stop()
            self._stop.set()
            count = len(self.running)
            if count:
                jobs = ", ".join(f"{one.job.id} {one.job.type}" for one in list(self.running.values())[:5])
                text = f"stopping: waiting up to {self.grace():.0f} s for {count} running jobs"
                text += f" ({jobs}{', …' if count > 5 else ''}); once more to cancel them"
            else:
                text = "stopping"
            say(logger, logging.INFO, "worker.stopping", text, running=count)
        else:
            self._hurry = True

    def grace(self) -> float:
        return max(0.0, self.settings.shutdown_grace - min(MARGIN, self.settings.shutdown_grace / 2))

    async def _shut_down(self, tasks: list[asyncio.Task[Any]]) -> None:
        since = self.told or time.monotonic()
        deadline = since + self.grace()
        end = since + max(self.settings.shutdown_grace, 1.0)
        self.stopping = True
        self.claimer.stop()
        claimer = next(task for task in tasks if task.get_name() == "claimer")
        # A claim that is under way ends first: its jobs are given back, not left to a rescue.
        await asyncio.wait([claimer], timeout=min(2.0, self.grace() / 2))
        self._give_back_waiting()
        while self.held and time.monotonic() < deadline and not self._hurry:
            await asyncio.sleep(0.01)
            self._give_back_waiting()
        for one in list(self.running.values()):
            one.stop(JobAbandoned("the worker stops"))
        # Coroutines end at once, processes within a second; a thread that does not look is left behind, fenced off.
        patience = time.monotonic() + min(1.5, max(0.2, self.settings.shutdown_grace / 4))
        while self.held and time.monotonic() < patience:  # noqa: ASYNC110 - it is threads that we wait for
            await asyncio.sleep(0.01)
        for job, lease_token in self.held.values():
            self.finisher.put(Lease(job.id, lease_token), job)
        finisher = next(task for task in tasks if task.get_name() == "finisher")
        self.finisher.stop()
        await asyncio.wait([finisher], timeout=max(0.5, end - 1.0 - time.monotonic()))
        if len(self.finisher):
            text = f"{len(self.finisher)} outcomes could not be written: their jobs will be rescued"
            say(logger, logging.ERROR, "worker.unwritten", text)
        self.heartbeat.stop()
        self.executors.ending = True
        for task in tasks:
            task.cancel()
        # A coroutine that ignores its cancellation is left behind, too.
        await asyncio.wait(tasks, timeout=0.2)
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.2, end - 0.2 - time.monotonic())):
                await self._retire()
                await self.once.close()
                await self.host.close()
                for link in (self.claimer.link, self.scout.link, self.finisher.link, self.janitor.link):
                    await link.close()
        self.executors.close()
        say(
            logger,
            logging.INFO,
            "worker.stopped",
            "stopped",
            completed=self.finisher.completed,
            failed=self.finisher.failed,
        )

    async def _retire(self) -> None:
        try:
            conn = await self.finisher.link.get()
            await workers.retire(conn, self.worker.id, completed=self.finisher.completed, failed=self.finisher.failed)
        except (psycopg.Error, OSError):
            return  # its lease runs out by itself

    # Jobs

    async def _runner(self) -> None:
        """One job after the other. There are as many runners as slots, so no task is made for a job."""
        slots, claimer = self.slots, self.claimer
        task = asyncio.current_task()
        assert task is not None
        in_a_row = 0
        while True:
            entry = None if self.stopping else slots.take()
            if entry is None:
                in_a_row = 0
                try:
                    await slots.something_to_do()
                except asyncio.CancelledError:
                    if self.executors.ending:
                        raise
                    await attempt.forget_cancellation(task)
                continue
            job, lease_token, threads = entry
            started = slots.moved = time.monotonic()
            held = self.held[job.id] = (job, lease_token)
            try:
                await self._run(job, lease_token, threads, started, task)
            except asyncio.CancelledError:
                if self.executors.ending:
                    raise
                # By something that the handler of an earlier job left behind.
                self.finisher.put(Lease(job.id, lease_token), job)
                await attempt.forget_cancellation(task)
            finally:
                # After a lost lease this worker may have claimed the same job again.
                if self.held.get(job.id) is held:
                    del self.held[job.id]
                slots.give_back(job, threads)
                claimer.ran(time.monotonic() - started)
            in_a_row += 1
            if in_a_row % 50 == 0:
                # Handlers that never wait would keep everybody else from the loop.
                await asyncio.sleep(0)

    async def _run(self, job: Claimed, lease_token: str, threads: int, started: float, task: asyncio.Task[Any]) -> None:
        if not self.heartbeat.lease_stands(started):
            # We were away for so long that others may have taken it: asking costs nothing, running twice may.
            self.finisher.put(Lease(job.id, lease_token), job)
            return
        if logger.isEnabledFor(logging.INFO):
            fields = {"job": job.id, "type": job.type, "queue": job.queue, "attempt": job.attempt + 1}
            say(logger, logging.INFO, "job.started", f"processing job {job.id} {job.type}", **fields)
        if job.suspect and not await self._announce(job, lease_token, threads):
            return
        handler = self.types[job.type]
        outcome, effect = await attempt.run(
            job, lease_token, threads, handler, self.app.middlewares, self.executors, self.running, task
        )
        self.finisher.put(outcome, job, effect)
        if job.suspect:
            # The next suspect runs when this one is no longer to blame for the worker's death.
            await self.finisher.written(job.id)

    async def _announce(self, job: Claimed, lease_token: str, threads: int) -> bool:
        """A job that was lost with two workers says that it runs: only it is charged if this worker dies, too."""
        try:
            async with self.host.connection() as conn:
                return await finish.start(conn, Lease(job.id, lease_token), threads)
        except (psycopg.Error, OSError):
            self.finisher.put(Lease(job.id, lease_token), job)
            return False

    def _give_back_waiting(self, *, big: bool = True) -> None:
        for job, lease_token in self.slots.clear(big=big):
            self.finisher.put(Lease(job.id, lease_token), job)

    async def _keep_house(self) -> None:
        """Jobs that wait behind slow ones go back, so that an idle worker can have them. Who looks at the worker's row
        sees soon whether it is busy."""
        shown_busy = False
        while True:
            await asyncio.sleep(STALE_AFTER / 2)
            busy = not self.slots.free
            since = time.monotonic() - self.slots.moved
            if since > STALE_AFTER and self.slots.small:
                self.claimer.mean_run = since
                self._give_back_waiting(big=False)
            elif self.slots.suspects_wait() > STALE_AFTER:
                for job, lease_token in self.slots.remove({entry[0].id for entry in self.slots.suspects}):
                    self.finisher.put(Lease(job.id, lease_token), job)
            self.claimer.look_for_room()
            if self.parent is not None and os.getppid() != self.parent and not self.stopping:
                say(logger, logging.WARNING, "supervisor.died", "the supervisor is gone")
                self.stop()
            if busy != shown_busy:
                shown_busy = busy
                self.heartbeat.now()

    def _known(self) -> set[int]:
        return set(self.held) | self.slots.waiting_ids() | self.finisher.ids()

    def _cancel(self, ids: Iterable[int]) -> None:
        why = JobCancelled("somebody cancelled the job")
        for id in ids:
            if (one := self.running.get(id)) is not None:
                one.stop(why)
        now = time.monotonic()
        for job, lease_token in self.slots.remove(set(ids)):
            self.finisher.put(finish.Cancelled(job.id, lease_token, now, now, 0, str(why)), job)

    def _leases(self) -> list[Lease]:
        return [Lease(one.job.id, one.ctx.lease_token) for one in self.running.values() if not one.ctx._written]

    def _lost(self, leases: list[Lease]) -> None:
        for lease in leases:
            one = self.running.get(lease.id)
            if one is None or one.ctx.lease_token != lease.lease_token:
                continue
            # The handler's own transaction ends the lease, too, or is refused.
            if not one.ctx._written and not one.ctx._in_transaction:
                one.stop(JobAbandoned("the lease is lost"))

    # Messages

    def _ready(self) -> None:
        self.claimer.look_closer = True
        self.claimer.wake.set()

    def _heard(self, payload: str) -> None:
        if payload != "cancel":
            self.claimer.wake.set()
        self.janitor.wake.set()

    def _vitals(self) -> Vitals:
        vitals = Vitals()
        vitals.threads_used = self.slots.used
        vitals.completed = self.finisher.completed
        vitals.failed = self.finisher.failed
        vitals.listening = self.listener.hears
        return vitals

    def _beat_from_thread(self, pulse: Pulse) -> None:
        self.loop.call_soon_threadsafe(self._beat, pulse)

    def _beat(self, pulse: Pulse) -> None:
        if pulse.notify_queue > 0.5:
            text = f"PostgreSQL's notification queue is {pulse.notify_queue:.0%} full: some listener does not read"
            say(logger, logging.WARNING, "notify.filling", text)
        if self.claimer.idle and not pulse.idle:
            # It was silent for so long that others took the mark away, and nobody would wake it.
            self.claimer.idle = False
            self.claimer.wake.set()
        if pulse.draining and not self.stopping:
            say(logger, logging.INFO, "worker.draining", "an operator asked this worker to drain")
            self.stop()


def _schema(job_type: JobType[..., Any]) -> str:
    try:
        return json.dumps(job_type.json_schema())
    except Exception:
        # A type of the handler's own that has no JSON Schema; its jobs run all the same.
        return "{}"


def installed_version() -> str:
    try:
        return version("pgqueue-server")
    except PackageNotFoundError:
        return "unknown"


def run(runtime: Runtime) -> int:
    """Runs it in this process until a signal stops it; answers with the exit code. The loop is left as it is: a handler
    that does not end must not keep the process, so whoever calls this ends it with exit_now."""

    def told(number: int, frame: FrameType | None) -> None:
        # By signal.signal, not by the loop, which may stand still.
        if runtime.told is None:
            runtime.told = time.monotonic()
            watchdog.stop_by = runtime.told + runtime.grace()
            watchdog.end_by = runtime.told + runtime.settings.shutdown_grace
        else:
            watchdog.stop_by = time.monotonic()
        loop.call_soon_threadsafe(runtime.stop)

    async def main() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, told)
        watchdog.start()
        await runtime.run()

    try:
        import uvloop
    except ImportError:
        loop = asyncio.new_event_loop()
    else:
        loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    # What is here now stays; of what comes, almost nothing is a cycle. A fifth of a short job's time is saved.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    os.register_at_fork(after_in_child=heed_signals)
    watchdog = Watchdog(loop, runtime.running)
    task = loop.create_task(main())
    try:
        while not task.done():
            try:
                loop.run_until_complete(task)
            except (SystemExit, KeyboardInterrupt):
                # Of a task that a handler made: whoever waits for that one is told, and nobody else is concerned.
                if task.done():
                    raise
    except PgQueueError:
        raise
    except BaseException:
        logging.getLogger("pgqueue.worker").exception("the worker ended with an error")
        return 1
    finally:
        watchdog.stop()
    return 0


def exit_now(code: int) -> NoReturn:
    # Not even a thread that does not end keeps the process: its lease is given back, its result refused.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
