"""Looks at the database and the processes four times a second, on a connection of its own, while things go wrong."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import dict_row

EVERY = 0.25
SETTLING = 8.0
"""Seconds after an outage in which nobody can have rescued anything yet."""

# What no worker may ever do: jump over pending, change the owner of a running job, or end a job twice.
AUDIT = """
CREATE TABLE public.moves (job bigint, move text, at timestamptz DEFAULT clock_timestamp());
CREATE FUNCTION public.note_move() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO public.moves (job, move) VALUES (NEW.id, TG_ARGV[0]);
    RETURN NULL;
END $$;
CREATE TRIGGER illegal AFTER UPDATE ON pgqueue.jobs_live FOR EACH ROW WHEN (
    OLD.status = 'scheduled' AND NEW.status = 'running'
    OR OLD.status = 'running' AND NEW.status = 'running'
       AND (OLD.lease_token IS DISTINCT FROM NEW.lease_token OR OLD.worker_id IS DISTINCT FROM NEW.worker_id)
    OR NEW.status <> 'running' AND NEW.lease_token IS NOT NULL
    OR NEW.attempt < OLD.attempt AND NEW.status = 'running'
) EXECUTE FUNCTION public.note_move('illegal');
CREATE TRIGGER ended AFTER INSERT ON pgqueue.jobs_finished FOR EACH ROW EXECUTE FUNCTION public.note_move('ended');
CREATE TRIGGER ended AFTER INSERT ON pgqueue.jobs_failed FOR EACH ROW EXECUTE FUNCTION public.note_move('ended');
"""
SAMPLE = """
SELECT (SELECT array_agg(DISTINCT worker_id::text) FROM pgqueue.jobs_live WHERE status = 'running') AS owners,
       (SELECT extract(epoch FROM max(clock_timestamp() - coalesce(w.expires_at, j.started_at)))
        FROM pgqueue.jobs_live j LEFT JOIN pgqueue.workers w ON w.id = j.worker_id
        WHERE j.status = 'running' AND coalesce(w.expires_at < clock_timestamp(), true))::float AS overdue,
       (SELECT count(*) FROM (SELECT FROM pgqueue.jobs_live WHERE status = 'running'
        GROUP BY lease_token HAVING count(DISTINCT worker_id) > 1) t)::int AS shared_tokens,
       (SELECT max(age(backend_xmin)) FROM pg_stat_activity) AS xmin_age,
       pg_notification_queue_usage() AS notify,
       (SELECT count(*) FROM pg_stat_activity WHERE datname = current_database())::int AS connections,
       (SELECT extract(epoch FROM clock_timestamp() - pg_postmaster_start_time()))::float AS up
"""


class Monitor:
    def __init__(self, dsn: str, pids: Callable[[], Iterable[int]], *, lease: float, rescue: float) -> None:
        self.dsn = dsn
        self.pids = pids
        self.bound = lease + 2 * rescue
        self.samples: list[dict[str, Any]] = []
        """Each with at, connections, xmin_age, notify, overdue, rss and fds."""
        self.problems: set[str] = set()
        self.recovery: list[float] = []
        self.blind = 0
        """Looks that found no database."""
        self._dead: dict[str, float] = {}

    def died(self, worker: UUID) -> None:
        """From now until nothing runs in its name counts as recovery."""
        self._dead[str(worker)] = time.monotonic()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator["Monitor"]:
        task = asyncio.create_task(self._watch())
        try:
            yield self
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def highest(self, figure: str) -> float:
        return max((sample[figure] or 0 for sample in self.samples), default=0)

    async def _watch(self) -> None:
        while True:
            try:
                conn = await psycopg.AsyncConnection.connect(
                    self.dsn, autocommit=True, row_factory=dict_row, connect_timeout=5
                )
                async with conn:
                    while True:
                        await self._look(conn)
                        await asyncio.sleep(EVERY)
            except psycopg.Error:
                self.blind += 1
                await asyncio.sleep(EVERY)

    async def _look(self, conn: psycopg.AsyncConnection[dict[str, Any]]) -> None:
        sample = await (await conn.execute(SAMPLE.encode())).fetchone()
        assert sample is not None
        sample |= {"at": time.monotonic()} | usage(self.pids())
        self.samples.append(sample)
        if sample["shared_tokens"]:
            self.problems.add("a lease token has two owners")
        if (sample["overdue"] or 0) > self.bound + 5 and sample["up"] > self.bound + SETTLING:
            self.problems.add("a job ran in the name of a dead worker for longer than the bound")
        owners = set(sample["owners"] or ())
        for worker in [worker for worker in self._dead if worker not in owners]:
            self.recovery.append(time.monotonic() - self._dead.pop(worker))


def usage(pids: Iterable[int]) -> dict[str, int]:
    """Memory in KiB and open files, of all of them together."""
    memory = files = 0
    for pid in pids:
        with suppress(OSError, ValueError, IndexError):
            memory += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
            files += len(os.listdir(f"/proc/{pid}/fd"))
    return {"rss": memory, "fds": files}


async def illegal_moves(rows: Callable[..., Any]) -> list[str]:
    """What the triggers saw. Ending again is legal for a job that an operator retried."""
    problems = []
    if jobs := await rows("SELECT DISTINCT job FROM public.moves WHERE move = 'illegal'"):
        problems.append(f"illegal moves of {len(jobs)} jobs")
    twice = """
    SELECT job FROM public.moves WHERE move = 'ended' GROUP BY job HAVING count(*) > 1 + (
        SELECT count(*) FROM pgqueue.audit a WHERE a.job_id = job AND a.action IN ('retry', 'resolve')
    )
    """
    if jobs := await rows(twice):
        problems.append(f"{len(jobs)} jobs ended twice")
    return problems
