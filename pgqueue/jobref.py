"""JobRef: a job that was added, for those who want to know what became of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pgqueue import control, read
from pgqueue.arguments import loads
from pgqueue.db import translated
from pgqueue.enqueue import Added
from pgqueue.errors import JobFailed, JobNotFound, JobWasCancelled, PgQueueError
from pgqueue.job import Job, Status
from pgqueue.outcome import Undecodable
from pgqueue.sql import SQL

if TYPE_CHECKING:
    from pgqueue.app import PgQueue
    from pgqueue.jobtype import JobType

R_co = TypeVar("R_co", covariant=True)

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0


class JobRef(Generic[R_co]):
    """A job that was added."""

    def __init__(self, app: PgQueue, added: Added, job_type: JobType[..., R_co] | None = None) -> None:
        self.app = app
        self.id = added.id
        self.inserted = added.inserted
        """False: the idempotency key was known, and this is the first job that had it."""
        self.job_type = job_type

    def __repr__(self) -> str:
        return f"<job {self.id}>"

    async def job(self) -> Job:
        """The job as it stands now."""
        async with self.app.pools.connection() as conn:
            with translated():
                return await read.get_job(conn, self.id)

    def job_sync(self) -> Job:
        with self.app.pools.connection_sync() as conn, translated():
            row = conn.execute(SQL.get_job, {"id": self.id}).fetchone()
        if row is None:
            raise JobNotFound(f"job {self.id} does not exist")
        return Job(*row)

    async def cancel(self, reason: str | None = None) -> Status:
        """CANCELLED, or RUNNING when the handler has been asked to stop."""
        async with self.app.pools.connection() as conn:
            return await control.cancel_job(conn, self.id, reason=reason)

    async def result(self, timeout: float | None = None) -> R_co:  # noqa: ASYNC109
        """What the handler returned, once it has. Raises JobFailed, JobWasCancelled or, after so many seconds,
        TimeoutError."""
        job = await self.job()
        pauses = _pauses(self.id, timeout)
        while job.finished_at is None:
            await asyncio.sleep(next(pauses))
            job = await self.job()
        return self._result(job)

    def result_sync(self, timeout: float | None = None) -> R_co:
        job = self.job_sync()
        pauses = _pauses(self.id, timeout)
        while job.finished_at is None:
            time.sleep(next(pauses))
            job = self.job_sync()
        return self._result(job)

    def _result(self, job: Job) -> R_co:
        if job.status is Status.CANCELLED:
            raise JobWasCancelled(job.id, job.reason, job.error)
        if job.status is Status.FAILED:
            raise JobFailed(job.id, job.reason, job.error)
        try:
            result: Any = None
            if job.result is not None:
                result = self.job_type.arguments.decode_result(job.result) if self.job_type else loads(job.result)
            return result  # type: ignore[no-any-return]
        except Undecodable as error:
            raise PgQueueError(f"job {job.id}: {error}") from error


def _pauses(id: int, timeout: float | None) -> Iterator[float]:
    deadline = None if timeout is None else time.monotonic() + timeout
    pause = FIRST_PAUSE
    while deadline is None or (left := deadline - time.monotonic()) > 0:
        yield pause if deadline is None else min(pause, left)
        pause = min(pause * 1.5, LONGEST_PAUSE)
    raise TimeoutError(f"job {id} has not ended within {timeout:g} s")
