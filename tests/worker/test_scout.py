"""While somebody holds a snapshot, looking below the floors takes long; no claim waits behind it."""

import psycopg
import pytest

from tests.worker.processes import Database, Fleet, wait

pytestmark = pytest.mark.parametrize("server", ["pg18"], indirect=True)

DEAD = 100_000


def test_it_sweeps_while_that_is_not_cheap(db: Database, fleet: Fleet, dsn: str) -> None:
    db.run("INSERT INTO pgqueue.jobs (type) SELECT 'nap' FROM generate_series(1, %s)", DEAD)
    with psycopg.connect(dsn) as report:
        report.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        report.execute("SELECT count(*) FROM pgqueue.jobs_live")
        db.run("DELETE FROM pgqueue.jobs_live")
        worker = fleet.start("w")
        wait(lambda: db.sessions("scout"), "sweeps are left to a scout")
        with psycopg.connect(dsn) as late:
            (job,) = late.execute("INSERT INTO pgqueue.jobs (type) VALUES ('nap') RETURNING id").fetchone() or (0,)
            others = [id for _ in range(6) for id in db.add_many("nap", [{}] * 100)]
            db.wait_for_all(others, "completed")
        db.wait_for(job, "completed")
    db.run("VACUUM pgqueue.jobs_live")
    wait(lambda: not db.sessions("scout"), "sweeps are cheap again", 30)
    assert not worker.events("database.away")
