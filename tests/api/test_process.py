"""`pgqueue api` as a process: killed, stopped, watched, and started by `pgqueue up`."""

import http.client
import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg

from pgqueue.sql import SQL
from tests.api.conftest import SECRET, Client, api_process, environment, until, worker_process


def test_kill_9_under_load(dsn: str) -> None:
    """Every 2xx has exactly one row; what got no answer has one or none."""
    answered: list[int] = []
    sent = [0]
    lock = threading.Lock()

    def post(port: int, token: str | None) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            while True:
                with lock:
                    sent[0] += 1
                    number = sent[0]
                path, body = [
                    ("/addJob", {"type": "default", "payload": number}),
                    ("/submit_job", {"name": "default", "payload": number}),
                    ("/jobs", {"type": "default", "payload": number}),
                    ("/api/v1/jobs", {"type": "default", "payload": number}),
                ][number % 4]
                headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
                connection.request("POST", path, json.dumps(body), headers)
                response = connection.getresponse()
                response.read()
                if 200 <= response.status < 300:
                    answered.append(number)
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()

    for turn in (1, 2):
        with api_process(dsn) as (api, process):
            threads = [threading.Thread(target=post, args=(api.port, api.token)) for _ in range(8)]
            for thread in threads:
                thread.start()
            until(lambda: len(answered) > turn * 100)  # noqa: B023
            process.process.kill()
            for thread in threads:
                thread.join()
    with psycopg.connect(dsn) as conn:
        rows = [payload for (payload,) in conn.execute("SELECT payload FROM pgqueue.jobs").fetchall()]
    assert len(rows) == len(set(rows)), "none twice"
    assert set(answered) <= set(rows), "none lost"


def test_sigterm_lets_requests_finish(dsn: str) -> None:
    with api_process(dsn) as (api, process):
        id = api("POST", "/submit_job", {"name": "default"}).json["id"]
        results = []
        waiting = threading.Thread(
            target=lambda: results.append(api("GET", f"/api/v1/jobs/{id}/wait?timeout=30").status)
        )
        waiting.start()
        asks = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND starts_with(query, %s)"
        until(lambda: api.value(asks, SQL.still_live.partition("%")[0]))
        begun = time.monotonic()
        assert process.end(signal.SIGTERM) == 0
        waiting.join()
        assert results == [202], "whoever waits is told, not cut off"
        assert time.monotonic() - begun < 15
        assert "stopped" in process.log
        assert "Traceback" not in process.log


def test_no_secret_is_logged(dsn: str) -> None:
    """Canaries in every place that a client or the settings have."""
    canaries = {
        name: f"canary-{name}-7f3a" for name in ("payload", "query", "path", "header", "password", "key", "agent")
    }
    with api_process(dsn, "--log-level", "debug", PGQUEUE_SIGNUP="true", PGQUEUE_LOG="json") as (api, process):
        assert api.token
        api("POST", "/submit_job", {"name": "default", "payload": canaries["payload"]})
        api("POST", "/submit_job", {"name": canaries["payload"] * 20, "payload": "\0" + canaries["payload"]})
        api("POST", "/submit_job", raw=('{"name": "' + canaries["payload"]).encode())
        api("POST", "/jobs", {"type": "add_numbers", "payload": {"x": canaries["payload"]}})
        api("POST", "/api/v1/jobs", {"type": "t", "queue": canaries["payload"] + " "})
        api("GET", f"/jobs?type={canaries['query']}&status={canaries['query']}")
        api("GET", f"/jobs/{canaries['path']}")
        api("GET", f"/{canaries['path']}")
        api("GET", "/jobs", token=canaries["header"])
        api("GET", "/jobs", headers={"Cookie": canaries["header"], "User-Agent": canaries["agent"]})
        api("POST", "/api/v1/jobs", {"type": "t"}, headers={"Idempotency-Key": canaries["key"]})
        for _ in range(2):
            api("POST", "/signup", {"username": "ana", "password": canaries["password"]}, token="")
        tokens = api("POST", "/login", {"username": "ana", "password": canaries["password"]}, token="").json
        api("POST", "/refreshToken", {"refresh_token": tokens["refresh_token"]}, token="")
        with psycopg.connect(dsn, autocommit=True) as conn:
            # An error that nobody expected, whose words hold what was sent.
            conn.execute(
                "CREATE FUNCTION public.break() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
                " RAISE EXCEPTION 'broken: %', NEW.payload; END $$;"
                " CREATE TRIGGER zz BEFORE INSERT ON pgqueue.jobs_live FOR EACH ROW EXECUTE FUNCTION public.break()"
            )
        broken = api("POST", "/submit_job", {"name": "default", "payload": canaries["payload"]})
        assert broken.status == 500
        assert canaries["payload"] not in broken.text
        assert process.end() == 0
        for name, canary in canaries.items():
            assert canary not in process.log, name
        password = re.search(r"://[^:]+:([^@]+)@", dsn)
        assert password
        for secret in (password[1], SECRET, api.token, tokens["refresh_token"], tokens["access_token"]):
            assert secret not in process.log
        events = [json.loads(line) for line in process.lines]
        assert {event["event"] for event in events} >= {"api.started", "api.request", "api.error"}
        requests = [event for event in events if event["event"] == "api.request"]
        assert all(event["request_id"] and event["status"] for event in requests)
        assert {event["subject"] for event in requests} >= {"admin", None}


def test_it_refuses_to_start(dsn: str, empty_dsn: str) -> None:
    def refused(case: tuple[list[str], dict[str, str], str]) -> None:
        arguments, environ, said = case
        command = [sys.executable, "-m", "pgqueue", "api", "--port", "0", *arguments]
        done = subprocess.run(
            command, env=environment(dsn, **environ), capture_output=True, text=True, cwd="/", timeout=60
        )
        assert done.returncode == 1, done.stderr
        assert said in done.stderr
        assert "Traceback" not in done.stderr

    cases: list[tuple[list[str], dict[str, str], str]] = [
        ([], {"JWT_SECRET": "short"}, "at least 32 bytes"),
        ([], {"JWT_SECRET": ""}, "JWT_SECRET: must be set"),
        ([], {"JWT_SECRET": "dev-secret-change-me-in-production"}, "can be guessed"),
        ([], {"DATABASE_URL": empty_dsn}, "pgqueue migrate up"),
        (["--host", "0.0.0.0"], {"PGQUEUE_DEV": "true"}, "only for loopback"),
    ]
    with ThreadPoolExecutor(len(cases)) as pool:
        list(pool.map(refused, cases))


def test_it_starts_before_the_database(dsn: str) -> None:
    with api_process("postgresql://u:secretword@127.0.0.1:1/none") as (api, process):
        assert api("GET", "/health").status == 200
        assert api("GET", "/readyz").status == 503
        assert process.end() == 0
        assert "secretword" not in process.log


def test_up_prints_a_token_and_a_line_that_works() -> None:
    with tempfile.TemporaryDirectory(prefix="pgqueue-up-") as name:
        Path(name).chmod(0o711)
        directory = Path(name) / "d"
        process = subprocess.Popen(
            [sys.executable, "-m", "pgqueue", "up", "--dir", str(directory), "--workers", "1"],
            env={k: v for k, v in environment("").items() if k not in ("DATABASE_URL", "JWT_SECRET")},
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",
        )
        said = ""
        assert process.stderr
        try:
            while "listening on" not in said or "started with" not in said:
                line = process.stderr.readline()
                assert line, said
                said += line
            lines = re.search(r"(  export TOKEN=.*\n  curl .*\n.*)\n", said)
            assert lines, said
            done = subprocess.run(["bash", "-c", lines[1]], capture_output=True, text=True)
            job = json.loads(done.stdout)
            assert job["message"] == "Job added to queue"
            url = re.search(r"HTTP API at http://127.0.0.1:(\d+)", said)
            assert url
            client = Client(int(url[1]))
            token = re.search(r"TOKEN=(\S+)", said)
            assert token
            ended = client("GET", f"/api/v1/jobs/{job['id']}/wait?timeout=20", token=token[1])
            assert ended.json["result"] == {"sum": 12}
            assert client("POST", "/submit_job", {"name": "default", "payload": "test task"}).status == 201, "dev mode"
            assert "work without a token" in said
            made = subprocess.run(
                [sys.executable, "-m", "pgqueue", "token", "create", "--dir", str(directory)],
                env={k: v for k, v in environment("").items() if k not in ("DATABASE_URL", "JWT_SECRET")},
                capture_output=True,
                text=True,
                cwd="/",
            )
            assert client("GET", "/failedJobs", token=made.stdout.strip()).status == 200, "the kept key"
            assert (directory / "jwt_secret").stat().st_mode & 0o777 == 0o600
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=40)
        assert process.returncode == 0


def test_two_processes_and_a_worker(dsn: str) -> None:
    """A cursor, a token and a key of one process are good in another."""
    with api_process(dsn) as (one, _), api_process(dsn) as (two, _), worker_process(dsn):
        first = one(
            "POST",
            "/api/v1/jobs",
            {"type": "add_numbers", "payload": {"x": 1, "y": 1}},
            headers={"Idempotency-Key": "k"},
        )
        again = two(
            "POST",
            "/api/v1/jobs",
            {"type": "add_numbers", "payload": {"x": 1, "y": 1}},
            headers={"Idempotency-Key": "k"},
        )
        assert again.text == first.text
        one("POST", "/submit_job", {"name": "default"})
        cursor = one("GET", "/api/v1/jobs?limit=1").json["next_cursor"]
        page = two("GET", f"/api/v1/jobs?limit=1&cursor={cursor}", token=one.token)
        assert [job["id"] for job in page.json["data"]] == [first.json["id"]]
        assert two("GET", f"/api/v1/jobs/{first.json['id']}/wait?timeout=20").json["result"] == {"sum": 2}
