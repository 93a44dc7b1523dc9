"""Effects: which one was begun or done under which key."""

from pathlib import Path

from alembic import op

from pgqueue.migrations.script import run

revision = "r0003"
down_revision = "r0002"


def upgrade() -> None:
    run(Path(__file__).with_suffix(".sql"))


def downgrade() -> None:
    op.execute("DROP FUNCTION pgqueue.resolve_job")
    op.execute("DROP TABLE pgqueue.effects")
