"""The schema goes back a version while a worker runs, and forth again."""

import pytest

from pgqueue import migrate
from tests.worker.processes import Database, Fleet, wait

pytestmark = pytest.mark.parametrize("server", ["pg18"], indirect=True)


def test_it_says_so_runs_jobs_and_comes_back(db: Database, fleet: Fleet, dsn: str) -> None:
    worker = fleet.start("w")
    head = migrate.head()
    previous = f"r{int(head[1:]) - 1:04}"
    migrate.down(dsn, previous)
    wait(lambda: worker.events("schema.differs"), "it says so")
    # Due jobs are promoted by the same part of it that has nothing to prune and fold now.
    later = db.value("INSERT INTO pgqueue.jobs (type, run_at) VALUES ('nap', now() + interval '1 s') RETURNING id")
    db.wait_for(db.add("nap"), "completed")
    late = db.wait_for(later, "completed")
    assert (late["started_at"] - late["run_at"]).total_seconds() < 10
    migrate.up(dsn)
    wait(lambda: worker.events("schema.back"), "it notices")
    (said,) = worker.events("schema.differs")
    assert said["message"].startswith(
        f"the database's schema is at {previous}, this code needs {head}; run: pgqueue migrate up"
    )
    assert not worker.events("database.away")
