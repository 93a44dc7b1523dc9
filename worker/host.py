"""What a worker does for its handlers: progress, child jobs, steps, transactions, chunks."""

from __future__ import annotations

import asyncio
import hashlib
import json
import pickle
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from typing import Any, TypeVar

import psycopg
from psycopg import errors as pg
from psycopg.rows import tuple_row
from psycopg_pool import AsyncConnectionPool

from pgqueue import enqueue, finish, steps
from pgqueue.app import BoundJob, JobRef
from pgqueue.context import Context
from pgqueue.db import CONNECT, Connection, is_outage, translated
from pgqueue.enqueue import Added
from pgqueue.errors import LeaseLost
from pgqueue.failpoints import failpoint
from pgqueue.job import Lease, NewJob
from pgqueue.outcome import BadResult, JobAbandoned, NoConnection, result_text
from pgqueue.pools import check
from pgqueue.worker import transactions
from pgqueue.worker.children import ChildDied, Children

T = TypeVar("T")
C = TypeVar("C")

PROGRESS_EVERY = 1.0
LOOK_EVERY = 0.2
"""Seconds, while chunks run: whether their job is to stop."""
LEFT_BEHIND = 1000
"""So many chunks in threads may go on after their jobs."""


async def cleaned(conn: Connection) -> None:
    """What a handler has set, locked or listened to on it is not for the next one."""
    conn.row_factory = tuple_row
    await conn.execute("DISCARD ALL")


class WorkerHost:
    def __init__(self, dsn: str, threads: int, name: str) -> None:
        self.dsn = dsn
        self.threads = threads
        self.name = name
        self.loop: asyncio.AbstractEventLoop | None = None
        self._pools: dict[str, AsyncConnectionPool[Connection]] = {}
        self._children = Children()
        self._chunk_room = asyncio.Semaphore(threads)
        # The slots are the limit: a chunk that does not end must not take the place of another job's.
        self._chunk_threads = ThreadPoolExecutor(threads + LEFT_BEHIND, thread_name_prefix="chunk")
        self._progress: dict[int, tuple[str, dict[str, Any]]] = {}
        self._flushing: asyncio.TimerHandle | None = None
        self._flushes: set[asyncio.Task[None]] = set()
        self._undisturbed: set[int] = set()
        """Jobs in transactions that could not complete them if somebody else wrote to their rows meanwhile."""

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """For a statement or two, from a small pool: handlers never take what claims and heartbeats need."""
        async with (await self._pool("short", 4)).connection() as conn:
            yield conn

    @asynccontextmanager
    async def held_connection(self) -> AsyncIterator[Connection]:
        """For a transaction, which a handler may hold for long: one for each slot. If they held all of the other
        pool, they would wait for themselves as soon as they want a second one."""
        handlers: dict[str, Any] = {"connection_class": transactions.HandlersConnection, "reset": cleaned}
        pool = await self._pool("held", self.threads, **handlers)
        try:
            conn = await pool.getconn()
        except psycopg.OperationalError as error:
            raise NoConnection(f"no connection for the handler's transaction: {error}") from error
        try:
            yield conn
        finally:
            await pool.putconn(conn)

    async def _pool(self, name: str, size: int, **options: Any) -> AsyncConnectionPool[Connection]:
        if name not in self._pools:
            self._pools[name] = AsyncConnectionPool(
                self.dsn,
                min_size=0,
                max_size=size,
                open=False,
                timeout=5,
                check=check,
                kwargs={
                    "autocommit": True,
                    "prepare_threshold": None,
                    "application_name": f"pgqueue-handlers {self.name}",
                    **CONNECT,
                },
                **options,
            )
        await self._pools[name].open()
        return self._pools[name]

    # Progress: the last word of each job, written once a second.

    def report_progress(self, ctx: Context, progress: dict[str, Any]) -> None:
        assert self.loop is not None
        self._progress[ctx.id] = (ctx.lease_token, progress)
        self.loop.call_soon_threadsafe(self._plan_flush)

    def _plan_flush(self) -> None:
        if self._flushing is None and self.loop is not None:
            self._flushing = self.loop.call_later(PROGRESS_EVERY, self._start_flush)

    def _start_flush(self) -> None:
        assert self.loop is not None
        self._flushing = None
        task = self.loop.create_task(self._flush())
        self._flushes.add(task)
        task.add_done_callback(self._flushes.discard)

    async def _flush(self) -> None:
        reported = {id: self._progress.pop(id) for id in set(self._progress) - self._undisturbed}
        if self._progress:
            self._plan_flush()
        try:
            async with self.connection() as conn:
                for id, (token, progress) in reported.items():
                    # One that cannot be stored, or whose row somebody holds, must not cost the others theirs.
                    with suppress(BadResult, pg.LockNotAvailable):
                        if (text := result_text(progress)) is not None:
                            await finish.progress(conn, Lease(id, token), text)
        except Exception:
            # Progress is a courtesy: an outage loses it, not the job.
            return

    # Jobs from handlers, only while the lease stands.

    async def add_job(self, ctx: Context, job: NewJob) -> Added:
        while True:
            with translated(), suppress(pg.LockNotAvailable):
                async with self.connection() as conn, conn.transaction():
                    await conn.execute("SET LOCAL lock_timeout = '500ms'")
                    await conn.execute("SELECT pgqueue.assert_lease(%s, %s)", [ctx.id, ctx.lease_token], prepare=False)
                    await conn.execute("SET LOCAL lock_timeout TO DEFAULT")
                    return await enqueue.add_job(conn, job)
            await asyncio.sleep(0.2)  # without the connection, which others need

    def add_job_sync(self, ctx: Context, job: NewJob) -> Added:
        return self._from_thread(self.add_job(ctx, job))

    async def enqueue(self, ctx: Context, job: BoundJob[T]) -> JobRef[T]:
        return job.ref(await self.add_job(ctx, job.new_job))

    def enqueue_sync(self, ctx: Context, job: BoundJob[T]) -> JobRef[T]:
        return job.ref(self.add_job_sync(ctx, job.new_job))

    # Steps

    async def load_step(self, ctx: Context, name: str) -> tuple[bool, str | None]:
        async with self.connection() as conn:
            kept = await steps.load_steps(conn, ctx.id)
        return name in kept, kept.get(name)

    def load_step_sync(self, ctx: Context, name: str) -> tuple[bool, str | None]:
        return self._from_thread(self.load_step(ctx, name))

    async def save_step(self, ctx: Context, name: str, result: str | None) -> None:
        """However long the database is away, or somebody holds the job's row: the step has run, and should not run
        again."""
        while True:
            try:
                async with self.connection() as conn:
                    return await steps.save_step(conn, Lease(ctx.id, ctx.lease_token), name, result)
            except (psycopg.Error, OSError) as error:
                if not is_outage(error) and not isinstance(error, pg.LockNotAvailable):
                    raise
                await asyncio.sleep(0.2)

    def save_step_sync(self, ctx: Context, name: str, result: str | None) -> None:
        self._from_thread(self.save_step(ctx, name, result))

    # Transactions that complete the job

    @asynccontextmanager
    async def transaction(self, ctx: Context, isolation: str | None) -> AsyncIterator[Connection]:
        begin = transactions.begin(isolation)
        with transactions.only_one(ctx), self._undisturbed_by_us(ctx, begin):
            await self._flushed(ctx)
            async with self.held_connection() as conn:
                await conn.execute(transactions.marked(begin, ctx))
                try:
                    failpoint("tx.begun")
                    yield conn
                    failpoint("tx.body_done")
                    await transactions.complete(conn, ctx)
                    failpoint("tx.completed")
                except BaseException:
                    if not await transactions.rolled_back(conn, ctx):
                        raise transactions.ended_by_sql(ctx) from None
                    raise
                await self._commit(conn, ctx)

    async def _commit(self, conn: Connection, ctx: Context) -> None:
        """Commits, whatever happens meanwhile: first the truth, then the cancellation."""
        commit = asyncio.ensure_future(self._decide(conn, ctx))
        cancelled: asyncio.CancelledError | None = None
        while not commit.done():
            try:
                await asyncio.wait([commit])
            except asyncio.CancelledError as error:
                cancelled = error
        broken = commit.exception()
        if broken is None:
            ctx._written = True
            failpoint("tx.committed")
        if (why := cancelled or broken) is not None:
            raise why

    async def _decide(self, conn: Connection, ctx: Context) -> None:
        """When it cannot be known whether the commit happened, the database is asked."""
        try:
            transactions.committed(await conn.execute("COMMIT"))
        except psycopg.Error as error:
            if not is_outage(error):
                raise
            await self._resolve(ctx)

    async def _resolve(self, ctx: Context) -> None:
        """The connection broke during COMMIT. A locking read waits until the server has decided; it never guesses."""
        lease = [Lease(ctx.id, ctx.lease_token)]
        while True:
            try:
                async with self.connection() as conn:
                    if await finish.owned(conn, lease):
                        raise JobAbandoned("the commit did not happen")
                    if await finish.ended(conn, lease):
                        return
                    raise LeaseLost(f"the lease on job {ctx.id} is lost")
            except (psycopg.Error, OSError):
                await asyncio.sleep(0.2)

    @contextmanager
    def _undisturbed_by_us(self, ctx: Context, begin: str) -> Iterator[None]:
        """Progress waits while the handler holds a snapshot that must not grow old."""
        if begin != transactions.BEGIN["read committed"]:
            self._undisturbed.add(ctx.id)
        try:
            yield
        finally:
            self._undisturbed.discard(ctx.id)

    async def _flushed(self, ctx: Context) -> None:
        if ctx.id in self._undisturbed and self._flushes:
            await asyncio.wait(self._flushes)

    @contextmanager
    def transaction_sync(self, ctx: Context, isolation: str | None) -> Iterator[psycopg.Connection[Any]]:
        begin = transactions.begin(isolation)
        with transactions.only_one(ctx), self._undisturbed_by_us(ctx, begin), closing(self._connected()) as conn:
            self._from_thread(self._flushed(ctx))
            conn.execute(transactions.marked(begin, ctx))
            try:
                failpoint("tx.begun")
                yield conn
                failpoint("tx.body_done")
                transactions.complete_sync(conn, ctx)
                failpoint("tx.completed")
            except BaseException:
                if not transactions.rolled_back_sync(conn, ctx):
                    raise transactions.ended_by_sql(ctx) from None
                raise
            try:
                transactions.committed(conn.execute("COMMIT"))
            except psycopg.Error as error:
                if not is_outage(error):
                    raise
                self._from_thread(self._resolve(ctx))
            ctx._written = True
            failpoint("tx.committed")

    def _connected(self) -> psycopg.Connection[Any]:
        try:
            return transactions.HandlersSyncConnection.connect(
                self.dsn, autocommit=True, prepare_threshold=None, **CONNECT
            )
        except psycopg.OperationalError as error:
            raise NoConnection(f"no connection for the handler's transaction: {error}") from error

    # Chunks

    async def map_chunks(
        self, ctx: Context, fn: Callable[[Sequence[C]], T], items: Sequence[C], executor: str
    ) -> list[T]:
        if executor not in ("process", "thread"):
            raise ValueError('map_chunks: executor is "process" or "thread"')
        count = max(1, min(ctx.threads, len(items)))
        bounds = [(i * len(items) // count, (i + 1) * len(items) // count) for i in range(count)]
        async with self.connection() as conn:
            kept = await steps.load_steps(conn, ctx.id)
        called = (fn.__module__, fn.__qualname__)
        turn = ctx._chunked[called] = ctx._chunked.get(called, 0) + 1
        chunks = [
            asyncio.ensure_future(self._chunk(ctx, fn, items[low:high], low, high, executor, kept, turn))
            for low, high in bounds
        ]
        try:
            # If one fails, the others end first: what they made is kept, and they do not run beside the next attempt.
            while (await asyncio.wait(chunks, timeout=LOOK_EVERY))[1]:
                ctx._go_on()  # whoever waits for them may be a thread, or a process that is dead by now
            return [each.result() for each in chunks]
        finally:
            for each in chunks:
                each.cancel()
            await asyncio.gather(*chunks, return_exceptions=True)

    def map_chunks_sync(
        self, ctx: Context, fn: Callable[[Sequence[C]], T], items: Sequence[C], executor: str
    ) -> list[T]:
        return self._from_thread(self.map_chunks(ctx, fn, items, executor))

    async def _chunk(
        self,
        ctx: Context,
        fn: Callable[[Sequence[C]], T],
        chunk: Sequence[C],
        low: int,
        high: int,
        executor: str,
        kept: dict[str, str | None],
        turn: int,
    ) -> T:
        # The digest keeps a result from being used for other items that stand at the same place.
        digest = hashlib.sha256(pickle.dumps(chunk)).hexdigest()[:16]
        name = f"chunk:{fn.__module__}.{fn.__qualname__}:{low}:{high}:{digest}"
        if turn > 1:
            name += f":{turn}"  # all lambdas of a function have one name
        if name not in kept:
            ctx._go_on()
            text = result_text(await self._run_chunk(fn, chunk, executor))
            await self.save_step(ctx, name, text)
            kept[name] = text
        text = kept[name]
        # Always as it was stored, so that a retry sees the same.
        result: T = None if text is None else json.loads(text)  # type: ignore[assignment]
        return result

    async def _run_chunk(self, fn: Callable[[Sequence[C]], T], chunk: Sequence[C], executor: str) -> T:
        loop = asyncio.get_running_loop()
        if executor == "thread":
            return await loop.run_in_executor(self._chunk_threads, fn, chunk)
        try:
            pickle.dumps(fn)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise BadResult(
                f"map_chunks: {fn.__qualname__} must be a function at the top of a module, or say executor='thread'"
            ) from error
        async with self._chunk_room:
            child = self._children.take()
            running = self._chunk_threads.submit(child.run_chunk, fn, chunk)
            try:
                answer: T = await asyncio.wrap_future(running)
                return answer
            except ChildDied as error:
                raise ChildDied(f"a process that ran a chunk died: {error}") from error
            finally:
                if running.done():
                    self._children.give_back(child)
                else:
                    # Its job has ended; its thread still waits for the process.
                    child.spoil()
                    running.add_done_callback(lambda _: loop.call_soon_threadsafe(self._children.give_back, child))

    def _from_thread(self, coroutine: Coroutine[Any, Any, T]) -> T:
        assert self.loop is not None
        assert threading.current_thread() is not threading.main_thread(), "the _sync methods are for def handlers"
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    async def close(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            with suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await self._flush()
        self._children.close()
        self._chunk_threads.shutdown(wait=False, cancel_futures=True)
        for pool in self._pools.values():
            await pool.close()
