"""graphile-worker, https://worker.graphile.org: as it comes, and with its local queue and batched completions."""

from __future__ import annotations

from tests.bench.peers.peer import InPostgres, Node

STORE = InPostgres(
    fill="SELECT count(*) FROM graphile_worker.add_jobs(ARRAY(SELECT"
    " (%(job)s, '{}', NULL, NULL, NULL, NULL, NULL, NULL)::graphile_worker.job_spec"
    " FROM generate_series(1, %(jobs)s)))",
    tables="graphile_worker._private_jobs",
    empty="SELECT NOT EXISTS (SELECT FROM graphile_worker._private_jobs)",
    insert="SELECT graphile_worker.add_job('noop')",
    claim="skip locked",
    backlog="SELECT count(*) FROM graphile_worker.add_jobs(ARRAY(SELECT ('noop', '{}', NULL, now() + interval '1 day',"
    " NULL, NULL, NULL, NULL)::graphile_worker.job_spec FROM generate_series(1, %(jobs)s)))",
)

PEERS = tuple(
    Node(
        name=name,
        variant="graphile",
        package="graphile-worker@0.18.0",
        settings=f"concurrentJobs 24, maxPoolSize 25, pollInterval 1 s{settings}; bulk by addJobs of 1,000",
        hint=hint,
        driver="with_graphile.mjs",
        environ={"BENCH_BATCHED": batched},
        store=STORE,
        slots=24,
        lease="jobs are unlocked after 4 hours; shorter is in its paid tier",
        alike=False,
    )
    for name, batched, hint, settings in (
        ("graphile", "0", 4_000, ""),
        (
            "graphile-batched",
            "1",
            30_000,
            ", localQueue of 500 (refetchDelay 10 ms), completeJobBatchDelay 0, failJobBatchDelay 0",
        ),
    )
)
