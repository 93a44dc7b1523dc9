"""Accounts, revoked tokens, answers to repeated requests, described types, and what operators do from afar."""

from pathlib import Path

from alembic import op

from pgqueue.migrations.script import run

revision = "r0004"
down_revision = "r0003"


def upgrade() -> None:
    run(Path(__file__).with_suffix(".sql"))


def downgrade() -> None:
    for function in ("prune_access", "audit_access", "revoke_token", "drain_worker", "act_on_jobs", "delete_job"):
        op.execute(f"DROP FUNCTION pgqueue.{function}")
    for table in ("http_answers", "revoked_tokens", "refresh_tokens", "users", "types"):
        op.execute(f"DROP TABLE pgqueue.{table}")
    # The role belongs to the whole server and stays; what it may do here goes.
    op.execute("""
        DO $$ BEGIN
            IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'pgqueue_api') THEN
                REVOKE ALL ON ALL TABLES IN SCHEMA pgqueue FROM pgqueue_api;
                REVOKE ALL ON ALL SEQUENCES IN SCHEMA pgqueue FROM pgqueue_api;
                REVOKE ALL ON ALL FUNCTIONS IN SCHEMA pgqueue FROM pgqueue_api;
                REVOKE ALL ON SCHEMA pgqueue FROM pgqueue_api;
            END IF;
        END $$""")
