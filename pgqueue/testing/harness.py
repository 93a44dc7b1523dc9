"""Harness: the questions a test asks about its jobs, and the time that passes for them."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import psycopg

from pgqueue.app import JobType, alive
from pgqueue.arguments import loads
from pgqueue.job import Job, Status
from pgqueue.outcome import Undecodable
from pgqueue.sql import SQL
from pgqueue.testing.drain import drain

WAITING = frozenset({Status.SCHEDULED, Status.PENDING})
ATTEMPTS = 10_000
"""More than any test means to run."""


class Harness:
    """The queue of one test. A job type is named by its handler or by its name."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        """The URL of the test's database."""

    def __enter__(self) -> Harness:
        for app in list(alive.values()):
            app.pools.redirect(self.dsn)
        return self

    def __exit__(self, *_: object) -> None:
        for app in list(alive.values()):
            app.pools.redirect(None)

    # Questions

    def jobs(self, job_type: JobType[..., Any] | str | None = None, status: Status | str | None = None) -> list[Job]:
        """The jobs of this type and status, in the order in which they were added."""
        wanted = {
            "type": None if job_type is None else _name(job_type),
            "statuses": None if status is None else [str(Status(status))],
            **dict.fromkeys(("queue", "tag", "before", "limit")),
        }
        with self._connect() as conn:
            return [Job(*row) for row in conn.execute(SQL.list_jobs, wanted).fetchall()][::-1]

    def get(self, job_type: JobType[..., Any] | str) -> Job:
        """The newest job of this type."""
        if not (jobs := self.jobs(job_type)):
            raise LookupError(f"there is no job of type {_name(job_type)}; {_listing(self.jobs())}")
        return jobs[-1]

    def assert_enqueued(self, job_type: JobType[..., Any] | str, /, **arguments: Any) -> Job:
        """That a job of this type with these arguments, and whatever others, waits to run. The newest such job."""
        __tracebackhide__ = True
        waiting = [job for job in self.jobs(job_type) if job.status in WAITING]
        found = [job for job in waiting if not _differences(job_type, job, arguments)]
        if found:
            return found[-1]
        lines = [f"no job {_call(job_type, arguments)} waits"]
        for job in waiting[-10:]:
            lines.append(f"  job {job.id} differs: {'; '.join(_differences(job_type, job, arguments))}")
        if not waiting:
            lines.append(f"  {_listing(self.jobs())}")
        raise AssertionError("\n".join(lines))

    def refute_enqueued(self, job_type: JobType[..., Any] | str, /, **arguments: Any) -> None:
        """That no job of this type with these arguments waits to run."""
        __tracebackhide__ = True
        waiting = [job for job in self.jobs(job_type) if job.status in WAITING]
        if found := [job for job in waiting if not _differences(job_type, job, arguments)]:
            shown = "\n".join(f"  job {job.id}: {job.payload}" for job in found[-10:])
            raise AssertionError(f"a job {_call(job_type, arguments)} waits\n{shown}")

    # Time

    def run(
        self,
        until: Literal["empty"] = "empty",
        *,
        advance: Literal["auto"] | None = None,
        raise_errors: bool = True,
        limit: int = ATTEMPTS,
    ) -> list[int]:
        """Runs the jobs that are due, and those that they add, one after the other in this thread, until none is due.
        The ids, one for each attempt.

        A handler's error is raised here; with raise_errors=False it only fails the attempt, as in a worker. With
        advance="auto" time passes whenever nothing is due, until nothing is scheduled either. Of two handlers of
        one type that of the newest PgQueue is used, and jobs whose type has none are left alone.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self._run(advance, raise_errors, limit, close=True))
        raise RuntimeError("in a coroutine, write: await pgqueue.run_async()")

    async def run_async(
        self,
        until: Literal["empty"] = "empty",
        *,
        advance: Literal["auto"] | None = None,
        raise_errors: bool = True,
        limit: int = ATTEMPTS,
    ) -> list[int]:
        """`run` for tests that are coroutines; async handlers run on the test's own loop."""
        return await self._run(advance, raise_errors, limit, close=False)

    async def _run(self, advance: Literal["auto"] | None, raise_errors: bool, limit: int, *, close: bool) -> list[int]:
        apps = list(alive.values())
        try:
            return await drain(self, apps, advance=advance == "auto", raise_errors=raise_errors, limit=limit)
        finally:
            if close:
                for app in alive.values():
                    await app.close()

    def advance(self, seconds: float) -> None:
        """Lets time pass: everything scheduled, and every idempotency key's end, comes so much nearer."""
        with self._connect() as conn:
            for statement in (
                "UPDATE pgqueue.jobs_live SET run_at = run_at - make_interval(secs => %s) WHERE status = 'scheduled'",
                "UPDATE pgqueue.idempotency_keys SET expires_at = expires_at - make_interval(secs => %s)",
            ):
                conn.execute(statement, [seconds])

    def _connect(self) -> psycopg.Connection:
        return psycopg.connect(self.dsn, autocommit=True, prepare_threshold=None, application_name="pgqueue-test")


def _name(job_type: JobType[..., Any] | str) -> str:
    return job_type if isinstance(job_type, str) else job_type.name


def _call(job_type: JobType[..., Any] | str, arguments: dict[str, Any]) -> str:
    return f"{_name(job_type)}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"


def _listing(jobs: list[Job]) -> str:
    counts: dict[str, int] = {}
    for job in jobs:
        counts[f"{job.type} ({job.status})"] = counts.get(f"{job.type} ({job.status})", 0) + 1
    return (
        "there are: " + ", ".join(f"{n} {what}" for what, n in counts.items()) if jobs else "there are no jobs at all"
    )


def _differences(job_type: JobType[..., Any] | str, job: Job, wanted: dict[str, Any]) -> list[str]:
    """How this job's arguments, its handler's defaults among them, differ from what is wanted."""
    try:
        if isinstance(job_type, str):
            given = loads(job.payload)
        else:
            given = job_type.arguments.defaults | job_type.decode(job.payload)[1]
    except Undecodable as error:
        return [str(error)]
    if not isinstance(given, dict):
        given = {"payload": given}
    return [
        f"{name} is {given[name]!r}, not {value!r}" if name in given else f"{name} is missing"
        for name, value in wanted.items()
        if name not in given or given[name] != value
    ]
