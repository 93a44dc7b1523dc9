"""pgqueue, as its users run it: `pgqueue worker --app …`, with history, fencing and rescue."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.metadata import version

from tests.bench.peers.peer import Here, InPostgres

STORE = InPostgres(
    fill="INSERT INTO pgqueue.jobs (type) SELECT %(job)s FROM generate_series(1, %(jobs)s)",
    tables="pgqueue.jobs_live, pgqueue.jobs_finished",
    empty="SELECT NOT EXISTS (SELECT FROM pgqueue.jobs_live)",
    insert="INSERT INTO pgqueue.jobs (type) VALUES ('noop')",
    claim="pgqueue.claim_jobs",
    backlog="INSERT INTO pgqueue.jobs (type, run_at)"
    " SELECT 'noop', now() + interval '1 day' FROM generate_series(1, %(jobs)s)",
)


@dataclass(frozen=True, kw_only=True)
class Ours(Here):
    def setup(self) -> list[list[str]]:
        return [[sys.executable, "-m", "pgqueue", "migrate", "up"]]

    def workers(self, processes: int) -> list[list[str]]:
        command = [sys.executable, "-m", "pgqueue", "worker", "--log-level", "warning"]
        return [[*command, "--app", "tests.bench.peers.drivers.with_ours", "--processes", str(processes)]]


PEERS = (
    Ours(
        name="pgqueue",
        package=f"pgqueue=={version('pgqueue-server')}",
        settings="as shipped: `pgqueue worker --processes N`; history, fencing and rescue are on",
        hint=30_000,
        driver="with_ours",
        store=STORE,
        environ={"REDIS_URL": ""},
        slots=8,
        lease="PGQUEUE_LEASE_TIMEOUT 30 s + PGQUEUE_RESCUE_INTERVAL 5 s",
    ),
)
