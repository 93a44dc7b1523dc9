"""pg-boss, https://pgboss.com. The newest version whose dependencies npm can resolve."""

from __future__ import annotations

from tests.bench.peers.peer import InPostgres, Node

CHANNEL = "('pgboss_' || left(encode(sha224('pgboss'::bytea), 'hex'), 24))"

PEERS = (
    Node(
        name="pgboss",
        package="pg-boss@12.35.0",
        settings="batchSize 1,000, burstWhenBatchFull, LISTEN/NOTIFY on (useListenNotify and notify), polls of 0.5 s;"
        " bulk by insert of 1,000",
        hint=20_000,
        driver="with_pgboss.mjs",
        store=InPostgres(
            fill="WITH added AS (INSERT INTO pgboss.job (name, policy) SELECT %(job)s, 'standard'"
            f" FROM generate_series(1, %(jobs)s)) SELECT pg_notify({CHANNEL}, %(job)s)",
            tables="pgboss.job_common",
            empty="SELECT NOT EXISTS (SELECT FROM pgboss.job_common WHERE state < 'completed')",
            insert="WITH added AS (INSERT INTO pgboss.job (name, policy) VALUES ('noop', 'standard'))"
            f" SELECT pg_notify({CHANNEL}, 'noop')",
            claim="SKIP LOCKED",
            backlog="INSERT INTO pgboss.job (name, policy, start_after)"
            " SELECT 'noop', 'standard', now() + interval '1 day' FROM generate_series(1, %(jobs)s)",
        ),
        lease="expireInSeconds 900 as shipped; alike: heartbeatSeconds 30, supervised every 5 s",
    ),
)
