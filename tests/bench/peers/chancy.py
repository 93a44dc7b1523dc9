"""Chancy, https://tkte.ch/chancy."""

from __future__ import annotations

from dataclasses import dataclass

from tests.bench.peers.peer import InPostgres, Python

ADD = "INSERT INTO chancy_jobs (id, queue, func, kwargs, limits, meta, priority, max_attempts, scheduled_at)"
NOOP = "gen_random_uuid(), 'default', 'with_chancy.noop', '{}', '[]', '{}', 0, 1, now()"
NOTIFY = """SELECT pg_notify('chancy_events', '{"t": "queue.pushed", "q": "default"}')"""
MANY = "FROM generate_series(1, %(jobs)s)"


@dataclass(frozen=True, kw_only=True)
class Chancy(Python):
    def workers(self, processes: int) -> list[list[str]]:
        return [self.produce("worker")] * processes


PEERS = (
    Chancy(
        name="chancy",
        package="chancy==0.26.0",
        beside=("psycopg[binary,pool]", "uvloop"),
        settings="async executor, concurrency 500, eager_polling, notifications, uvloop; bulk by push_many (1,000)",
        hint=1_500,
        driver="with_chancy.py",
        store=InPostgres(
            fill=f"WITH added AS ({ADD} SELECT gen_random_uuid(), 'default', 'with_chancy.' || %(job)s,"
            f" '{{}}', '[]', '{{}}', 0, 1, now() {MANY}) {NOTIFY}",
            tables="chancy_jobs",
            empty="SELECT NOT EXISTS (SELECT FROM chancy_jobs WHERE state NOT IN ('succeeded', 'failed'))",
            insert=f"WITH added AS ({ADD} VALUES ({NOOP})) {NOTIFY}",
            claim="SKIP LOCKED",
            backlog=f"{ADD} SELECT {NOOP} + interval '1 day' {MANY}",
        ),
        slots=500,
        lease="heartbeat_timeout 90 s + Recovery every 60 s; alike: 30 s and 5 s",
    ),
)
