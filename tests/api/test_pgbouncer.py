"""A real PgBouncer in transaction mode between everything and PostgreSQL."""

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest

from pgqueue import PgQueue
from pgqueue.api.endpoint import OPEN
from pgqueue.api.routes import TABLE
from tests.api.conftest import Api, api_process, until, worker_process

BINARY = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
SERVERS = 6
JOBS = 2400
CONFIG = """
[databases]
* = host={host} port={port} user={user} password={password}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {own}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = {servers}
max_client_conn = 500
"""

pytestmark = pytest.mark.skipif(BINARY is None, reason="there is no pgbouncer here: apt install pgbouncer")


@pytest.fixture
def pooled(dsn: str) -> Iterator[str]:
    """The database, through PgBouncer."""
    assert BINARY
    parts = urlsplit(dsn)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        own = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="pgbouncer-") as directory:
        Path(directory).chmod(0o755)
        file = Path(directory) / "pgbouncer.ini"
        file.write_text(
            CONFIG.format(
                host=parts.hostname,
                port=parts.port,
                user=parts.username,
                password=parts.password,
                own=own,
                servers=SERVERS,
            )
        )
        user = ["-u", "nobody"] if os.geteuid() == 0 else []
        process = subprocess.Popen([BINARY, *user, str(file)], stderr=subprocess.DEVNULL)
        url = parts._replace(netloc=f"{parts.username}:any@127.0.0.1:{own}").geturl()
        try:
            until(lambda: process.poll() is not None or _answers(own))
            assert process.poll() is None
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(10)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_everything_through_pgbouncer(dsn: str, pooled: str) -> None:
    with psycopg.connect(pooled) as conn:
        row = conn.execute("SELECT pg_backend_pid()").fetchone()
        assert row
        assert row[0] != conn.info.backend_pid, "there is a pooler between"
    with ExitStack() as stack:
        api, process = stack.enter_context(api_process(pooled, PGQUEUE_SIGNUP="true", PGQUEUE_LOG="json"))
        call_all_routes(api)
        api("POST", "/api/v1/queues/aside/pause")
        listening = stack.enter_context(worker_process(pooled, PGQUEUE_LISTEN_URL=dsn, PGQUEUE_LOG="json"))
        polling = stack.enter_context(worker_process(pooled, PGQUEUE_LOG="json"))
        api("POST", "/api/v1/queues/default/resume")
        until(lambda: "set PGQUEUE_LISTEN_URL" in polling.log)
        before = api.value("SELECT count(*) FROM pgqueue.jobs")
        produce(pooled, api)
        assert api.value("SELECT count(*) FROM pgqueue.jobs") == before + JOBS
        wanted = "SELECT count(*) FROM pgqueue.jobs WHERE type = 'add_numbers' AND status = 'completed'"
        until(lambda: api.value(wanted) >= JOBS, 60)
        failures = "FROM pgqueue.attempts a JOIN pgqueue.jobs j ON j.id = a.job_id WHERE j.type = 'add_numbers'"
        assert api.query(f"SELECT a.reason, a.error {failures}") == []
        leaks_nothing(pooled)
        for each in (process, listening, polling):
            assert each.end() == 0
            said = [json.loads(line) for line in each.lines]
            loud = [one for one in said if one["level"] in ("warning", "error") and one["event"] != "listen.deaf"]
            assert not loud, loud
        assert "listen.deaf" not in listening.log


def call_all_routes(api: Api) -> None:
    """Each once; what they answer is tested elsewhere, here it must not be an error of ours."""
    known = {"type": "add_numbers", "payload": {"x": 1, "y": 2}}
    id = api("POST", "/api/v1/jobs", {**known, "queue": "aside"}).json["id"]
    bodies = {
        "/addJob": {"email": "a@x.org", "name": "A", "queue": "aside"},
        "/submit_job": {"name": "add_numbers", "payload": {"x": 1, "y": 1}, "queue": "aside"},
        "/jobs": {**known, "queue": "aside"},
        "/signup": {"username": "ana", "password": "correct horse"},
        "/login": {"username": "ana", "password": "correct horse"},
        "/refreshToken": {"refresh_token": "x"},
        "/api/v1/jobs": {**known, "queue": "aside", "idempotency_key": "k"},
        "/api/v1/jobs/batch": {"jobs": [{**known, "queue": "aside"}] * 3},
        "/api/v1/jobs/actions": {"action": "cancel", "filter": {"queue": "nothing"}, "dry_run": True},
        "/api/v1/jobs/{id}/resolve": {"outcome": "retry"},
        "/api/v1/tokens": {"subject": "s", "scopes": ["jobs:read"]},
        "/api/v1/tokens/revoke": {"jti": "j"},
        "/api/v1/me/password": {"password": "wrong", "new_password": "another one"},
    }
    for endpoint in TABLE:
        if endpoint.media == "text/event-stream" or endpoint.method == "DELETE":
            continue
        path = endpoint.path.replace("{queue:path}", "default").replace("{id}", str(id))
        path += "?timeout=0.1" if path.endswith("/wait") else ""
        body = {"priority": 3} if endpoint.method == "PATCH" else bodies.get(endpoint.path)
        headers = {"Idempotency-Key": f"once-{endpoint.path}"} if endpoint.keyed else {}
        answer = api(endpoint.method, path, body, token="" if endpoint.scope == OPEN else None, headers=headers)
        assert answer.status < 500, (endpoint.method, endpoint.path, answer.text)
        assert answer.status not in (400, 415, 422), (endpoint.method, endpoint.path, answer.text)


def produce(pooled: str, api: Api) -> None:
    app = PgQueue(pooled)

    def by_python() -> None:
        for number in range(400):
            app.enqueue_sync("add_numbers", {"x": number, "y": 1})

    def by_http() -> None:
        for number in range(200):
            body = {"type": "add_numbers", "payload": {"x": number, "y": 1}}
            assert api("POST", "/api/v1/jobs", body).status == 201

    def by_sql() -> None:
        with psycopg.connect(pooled, autocommit=True, prepare_threshold=None) as conn:
            for _ in range(4):
                statement = "INSERT INTO pgqueue.jobs (type, payload) SELECT 'add_numbers', '{\"x\": 1, \"y\": 2}' FROM"
                conn.execute(f"{statement} generate_series(1, 100)")

    threads = [
        threading.Thread(target=one) for one in (by_python, by_python, by_http, by_http, by_sql, by_sql, by_python)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    app.close_sync()


def leaks_nothing(pooled: str) -> None:
    """Every connection behind PgBouncer is as if new."""
    with ExitStack() as stack:
        seen = set()
        for _ in range(SERVERS - 2):
            conn = stack.enter_context(psycopg.connect(pooled, prepare_threshold=None))
            row = conn.execute(
                "SELECT pg_backend_pid(), current_setting('pgqueue.actor', true),"
                " ARRAY(SELECT pg_listening_channels()), ARRAY(SELECT name FROM pg_prepared_statements),"
                " (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()),"
                " ARRAY(SELECT name FROM pg_settings WHERE source = 'session'"
                "       AND name NOT IN ('application_name', 'client_encoding', 'DateStyle', 'TimeZone',"
                "                        'standard_conforming_strings', 'transaction_isolation',"
                "                        'transaction_read_only')),"
                " current_setting('transaction_isolation')"
            ).fetchone()
            assert row
            seen.add(row[0])
            assert row[1] in (None, "")
            assert row[2:] == ([], [], 0, [], "read committed"), row
        assert len(seen) == SERVERS - 2
