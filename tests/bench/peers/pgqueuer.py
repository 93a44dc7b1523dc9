"""PgQueuer, https://pgqueuer.readthedocs.io: over asyncpg and over psycopg."""

from __future__ import annotations

from dataclasses import dataclass

from tests.bench.peers.peer import InPostgres, Python

BATCH = 100

STORE = InPostgres(
    fill="WITH added AS (INSERT INTO pgqueuer (priority, entrypoint, status)"
    " SELECT 0, %(job)s, 'queued' FROM generate_series(1, %(jobs)s) RETURNING id, entrypoint)"
    " INSERT INTO pgqueuer_log (job_id, status, entrypoint, priority) SELECT id, 'queued', entrypoint, 0 FROM added",
    tables="pgqueuer, pgqueuer_log, pgqueuer_statistics",
    empty="SELECT NOT EXISTS (SELECT FROM pgqueuer)",
    insert="WITH added AS (INSERT INTO pgqueuer (priority, entrypoint, status) VALUES (0, 'noop', 'queued')"
    " RETURNING id) INSERT INTO pgqueuer_log (job_id, status, entrypoint, priority)"
    " SELECT id, 'queued', 'noop', 0 FROM added",
    claim="log_pick",
    backlog="INSERT INTO pgqueuer (priority, entrypoint, status, execute_after)"
    " SELECT 0, 'noop', 'queued', now() + interval '1 day' FROM generate_series(1, %(jobs)s)",
)


@dataclass(frozen=True, kw_only=True)
class PgQueuer(Python):
    def setup(self) -> list[list[str]]:
        return [[self.bin("pgq"), "install"], [self.bin("pgq"), "autovac"]]

    def workers(self, processes: int) -> list[list[str]]:
        return [self.produce("worker")] * processes


PEERS = tuple(
    PgQueuer(
        name=f"pgqueuer-{driver}",
        variant="pgqueuer",
        package="pgqueuer[asyncpg,psycopg]==1.6.0",
        beside=("psycopg[binary,pool]", "uvloop"),
        settings=f"{driver}, uvloop; batch_size {BATCH}, dequeue_timeout 1 s, `pgq autovac`, durable;"
        " bulk by enqueue of 1,000",
        hint=hint,
        driver="with_pgqueuer.py",
        environ={"BENCH_DRIVER": driver, "BENCH_BATCH": str(BATCH)},
        store=STORE,
        lease="heartbeat-timeout 30 s",
    )
    for driver, hint in (("asyncpg", 12_000), ("psycopg", 7_000))
)
