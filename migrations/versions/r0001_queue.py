"""The queue itself."""

import re
from pathlib import Path

from alembic import op

revision = "r0001"
down_revision = None


def upgrade() -> None:
    for statement in statements(Path(__file__).with_suffix(".sql").read_text(encoding="utf-8")):
        op.execute(statement)


def downgrade() -> None:
    # Not the schema: Alembic's own table stands in it. Not the roles: they belong to the whole server.
    op.execute(
        "DROP TABLE pgqueue.jobs, pgqueue.attempts, pgqueue.workers, pgqueue.queues, pgqueue.idempotency_keys, "
        "pgqueue.audit, pgqueue.switches CASCADE"
    )
    op.execute(
        "DROP ROUTINE pgqueue.refuse_job, pgqueue.schedule_job, pgqueue.fingerprint, pgqueue.take_key, "
        "pgqueue.keep_key, pgqueue.wake, pgqueue.wake_for_inserted, pgqueue.add_job, pgqueue.write_audit, "
        "pgqueue.refuse_status, pgqueue.cancel_job, pgqueue.retry_job, pgqueue.edit_job, pgqueue.pause_queue, "
        "pgqueue.resume_queue, pgqueue.assert_lease, pgqueue.backlog, pgqueue.why, pgqueue.make_partitions, "
        "pgqueue.drop_partitions"
    )
    op.execute("DROP SEQUENCE pgqueue.job_ids, pgqueue.attempt_ids, pgqueue.ready")
    op.execute("DROP TYPE pgqueue.status")


def statements(script: str) -> list[str]:
    """A statement ends with a semicolon before an empty line."""
    # A colon would be a parameter to SQLAlchemy's text().
    return [part.replace(":", r"\:") for part in re.split(r";\s*\n(?=\n|\Z)", script) if part.strip()]
