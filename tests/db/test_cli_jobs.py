"""`pgqueue jobs`, as an operator uses it."""

import json
import os
import subprocess
import sys

import psycopg
import pytest

pytestmark = pytest.mark.parametrize("server", ["pg18"], indirect=True)


def jobs(dsn: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "pgqueue", "jobs", *arguments],
        env=os.environ | {"DATABASE_URL": dsn},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_looking_and_acting(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("INSERT INTO pgqueue.jobs (type, name) VALUES ('mail', E'red\\x1b[31m'), ('other', NULL)")
        listed = jobs(dsn, "ls", "--type", "mail")
        assert [line.split()[:4] for line in listed.stdout.splitlines()[1:]] == [["1", "mail", "default", "pending"]]
        assert json.loads(jobs(dsn, "show", "1", "--json").stdout)["status"] == "pending"
        assert "no_worker" in jobs(dsn, "why", "1").stdout
        assert jobs(dsn, "cancel", "1", "--reason", "left").stdout == "1 cancelled\n"
        assert jobs(dsn, "retry", "1").stdout == "1 pending\n"
        assert conn.execute("SELECT action, reason FROM pgqueue.audit ORDER BY id").fetchall() == [
            ("cancel", "left"),
            ("retry", None),
        ]
    refused = jobs(dsn, "retry", "1")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "job 1 is pending: only a failed, cancelled or scheduled job can be retried" in refused.stderr
    assert jobs(dsn, "show", "99").returncode == 1


def test_ending_a_doubt(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        for id in (1, 2):
            conn.execute("INSERT INTO pgqueue.jobs (type) VALUES ('mail')")
            conn.execute(
                "WITH gone AS (DELETE FROM pgqueue.jobs_live RETURNING id, type) INSERT INTO pgqueue.jobs_failed"
                " (id, type, status, reason, finished_at) SELECT id, type, 'failed', 'in_doubt', now() FROM gone"
            )
            conn.execute(
                "INSERT INTO pgqueue.effects (key, job_id, expires_at) VALUES (%s, %s, now() + interval '1 day')",
                [f"job:{id}", id],
            )
        assert jobs(dsn, "resolve", "1").returncode == 2
        assert jobs(dsn, "resolve", "1", "--completed", "--reason", "it arrived").stdout == "1 completed\n"
        assert jobs(dsn, "resolve", "2", "--retry").stdout == "2 pending\n"
        effects = conn.execute("SELECT job_id, done_at IS NOT NULL FROM pgqueue.effects").fetchall()
    assert effects == [(1, True)]
