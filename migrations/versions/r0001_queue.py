"""The queue itself."""

from pathlib import Path

from alembic import op

from pgqueue.migrations.script import run

revision = "r0001"
down_revision = None


def upgrade() -> None:
    run(Path(__file__).with_suffix(".sql"))


def downgrade() -> None:
    # Not the schema: Alembic's own table stands in it. Not the roles: they belong to the whole server.
    op.execute(
        "DROP TABLE pgqueue.jobs, pgqueue.attempts, pgqueue.workers, pgqueue.drains, pgqueue.queues, "
        "pgqueue.idempotency_keys, pgqueue.audit, pgqueue.switches, pgqueue.chores, pgqueue.tallies CASCADE"
    )
    op.execute(
        "DROP ROUTINE pgqueue.broken_rule, pgqueue.refuse, pgqueue.refuse_job, pgqueue.schedule_job, "
        "pgqueue.fingerprint, pgqueue.take_key, "
        "pgqueue.keep_key, pgqueue.wake, pgqueue.tell_of_inserted, pgqueue.add_job, pgqueue.write_audit, "
        "pgqueue.refuse_status, pgqueue.cancel_job, pgqueue.retry_job, pgqueue.edit_job, pgqueue.pause_queue, "
        "pgqueue.resume_queue, pgqueue.assert_lease, pgqueue.claim_jobs, pgqueue.complete_jobs, "
        "pgqueue.backlog, pgqueue.why, pgqueue.make_partitions, pgqueue.drop_partitions, pgqueue.bucket, "
        "pgqueue.bounds"
    )
    op.execute("DROP SEQUENCE pgqueue.job_ids, pgqueue.attempt_ids, pgqueue.ready")
    op.execute("DROP TYPE pgqueue.status")
