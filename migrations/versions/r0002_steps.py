"""Steps: what finished parts of a job returned."""

from pathlib import Path

from alembic import op

from pgqueue.migrations.script import run

revision = "r0002"
down_revision = "r0001"


def upgrade() -> None:
    run(Path(__file__).with_suffix(".sql"))


def downgrade() -> None:
    op.execute("DROP TABLE pgqueue.steps")
