"""Totals for metrics, series for charts, and what keeps vacuum from its work."""

from pathlib import Path

from alembic import op

from pgqueue.migrations.script import run

revision = "r0005"
down_revision = "r0004"


def upgrade() -> None:
    run(Path(__file__).with_suffix(".sql"))


def downgrade() -> None:
    op.execute("DROP FUNCTION pgqueue.fold, pgqueue.snapshot_holders")
    op.execute("DROP TABLE pgqueue.series, pgqueue.totals")
