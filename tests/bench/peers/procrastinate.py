"""Procrastinate, https://procrastinate.readthedocs.io."""

from __future__ import annotations

from dataclasses import dataclass

from tests.bench.peers.peer import InPostgres, Python


@dataclass(frozen=True, kw_only=True)
class Procrastinate(Python):
    def _command(self, *arguments: str) -> list[str]:
        return [self.bin("procrastinate"), "--app", "with_procrastinate.app", *arguments]

    def setup(self) -> list[list[str]]:
        return [self._command("schema", "--apply")]

    def workers(self, processes: int) -> list[list[str]]:
        return [self._command("worker", "--concurrency", "20", "--fetch-job-polling-interval", "1")] * processes


PEERS = (
    Procrastinate(
        name="procrastinate",
        package="procrastinate==3.10.0",
        beside=("psycopg[binary,pool]",),
        settings="`procrastinate worker --concurrency 20`, 20 connections, LISTEN and a poll of 1 s;"
        " bulk by batch_defer of 1,000",
        hint=400,
        driver="with_procrastinate.py",
        store=InPostgres(
            fill="INSERT INTO procrastinate_jobs (queue_name, task_name, args)"
            " SELECT 'default', %(job)s, '{}' FROM generate_series(1, %(jobs)s)",
            tables="procrastinate_jobs, procrastinate_events, procrastinate_periodic_defers",
            empty="SELECT NOT EXISTS (SELECT FROM procrastinate_jobs WHERE status IN ('todo', 'doing'))",
            insert="SELECT procrastinate_defer_jobs_v1(ARRAY[ROW("
            "'default', 'noop', 0, NULL, NULL, '{}', NULL)::procrastinate_job_to_defer_v1])",
            claim="procrastinate_fetch_job",
            bare=True,
            backlog="INSERT INTO procrastinate_jobs (queue_name, task_name, args, scheduled_at)"
            " SELECT 'default', 'noop', '{}', now() + interval '1 day' FROM generate_series(1, %(jobs)s)",
        ),
        slots=20,
        lease="a periodic task that the user writes, as the documentation shows",
    ),
)
