"""What clients may not do to the API, and what a database that is away does not do to it."""

import http.client
import json
import socket
import threading
import time
from typing import Any

import pytest

from pgqueue.embedded import PostgresServer
from tests.api.conftest import SECRET, Api, until

V1 = "/api/v1"


def raw_request(api: Api, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", api.port), timeout=10) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    return answer


def test_bodies(api: Api) -> None:
    large = json.dumps({"name": "default", "payload": "x" * (1024 * 1024)}).encode()
    assert api("POST", "/submit_job", raw=large).status == 413
    fits = json.dumps({"name": "default", "payload": "x" * (1024 * 1024 - 60)}).encode()
    assert api("POST", "/submit_job", raw=fits).status == 201
    assert api("POST", "/submit_job", raw=b'{"payload":' + b"[" * 10_000 + b"]" * 10_000 + b"}").status == 400
    assert (
        api("POST", "/submit_job", raw=b'{"name": "default", "payload":' + b"[" * 60 + b"]" * 60 + b"}").status == 201
    )
    many = b'{"name": "default", "payload": [' + b"0," * 300_000 + b"0]}"
    assert api("POST", "/submit_job", raw=many).status == 413
    assert api("POST", "/submit_job", raw=b'{"name": "default", "payload": "[[[[' + b"[" * 500 + b'"}').status == 201
    digits = b'{"name": "default", "payload": ' + b"9" * 100_000 + b"}"
    assert api("POST", "/submit_job", raw=digits).status in (400, 201)
    gzip = {"Content-Encoding": "gzip"}
    assert api("POST", "/submit_job", {"name": "default"}, headers=gzip).status == 415
    for content_type, old, new in (
        ("text/plain", 415, 415),
        ("multipart/form-data; boundary=x", 415, 415),
        ("application/x-www-form-urlencoded", 201, 415),
        ("application/json; charset=utf-8", 201, 201),
    ):
        sent = {"Content-Type": content_type}
        assert api("POST", "/submit_job", {"name": "default"}, headers=sent).status == old
        assert api("POST", f"{V1}/jobs", {"type": "t"}, headers=sent).status == new


def test_a_body_is_counted_while_it_comes(api: Api) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=10)
    connection.putrequest("POST", "/submit_job")
    connection.putheader("Authorization", f"Bearer {api.token}")
    connection.putheader("Transfer-Encoding", "chunked")
    connection.putheader("Content-Type", "application/json")
    connection.endheaders()
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    sent = 0
    try:
        for _ in range(200):
            connection.send(chunk)
            sent += 65536
            time.sleep(0.001)
    except OSError:
        pass
    try:
        assert connection.getresponse().status == 413
    except OSError:
        assert sent < 200 * 65536, "it was cut off"
    finally:
        connection.close()
    assert api.count() == 0


def test_odd_requests_never_break_it(api: Api) -> None:
    head = f"Host: x\r\nAuthorization: Bearer {api.token}\r\n".encode()
    for data in (
        b"GET /jobs?limit=%00 HTTP/1.1\r\n" + head + b"\r\n",
        b"GET /jobs?type=%00 HTTP/1.1\r\n" + head + b"\r\n",
        b"GET /jobs?queue=%ff%fe HTTP/1.1\r\n" + head + b"\r\n",
        b"GET /jobs/%ff HTTP/1.1\r\n" + head + b"\r\n",
        b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\n" + head + b"\r\n",
        b"GET //jobs HTTP/1.1\r\n" + head + b"\r\n",
        b"GET /jobs/ HTTP/1.1\r\n" + head + b"\r\n",
        b"BREW /jobs HTTP/1.1\r\n" + head + b"\r\n",
        b"OPTIONS /jobs HTTP/1.1\r\n" + head + b"\r\n",
        b"POST /submit_job HTTP/1.1\r\nContent-Length: -1\r\n" + head + b"\r\n",
        b"POST /submit_job HTTP/1.1\r\nContent-Length: 5\r\n" + head + b"\r\n{}",
        b"POST /submit_job HTTP/1.1\r\n" + head + b"\r\n",
        b"GET /jobs HTTP/1.1\r\nX-Pad: " + b"x" * 100_000 + b"\r\n" + head + b"\r\n",
        b"GET /jobs HTTP/1.1\r\n" + head + head + b"\r\n",
        b"GET /jobs?cursor=" + b"x" * 5000 + b" HTTP/1.1\r\n" + head + b"\r\n",
        b"garbage\r\n\r\n",
    ):
        answer = raw_request(api, data)
        status = answer.split(b" ", 2)[1:2]
        assert not status or status[0].startswith(b"4"), (data[:60], answer[:100])
    assert api("GET", "/jobs").status == 200
    assert api.count() == 0


def test_headers_of_every_answer(api: Api) -> None:
    for path, token in (("/jobs", None), ("/jobs", "bad"), ("/nowhere", None), ("/docs", None), ("/health", "")):
        headers = api("GET", path, token=token).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
        assert "default-src 'none'" in headers["content-security-policy"]
        assert len(headers["x-request-id"]) == 32
        assert "server" not in headers
        assert "access-control-allow-origin" not in headers
    mine = api("GET", "/nowhere", headers={"X-Request-Id": "abc-1.2"})
    assert mine.headers["x-request-id"] == mine.json["request_id"] == "abc-1.2"
    assert api("GET", "/jobs", headers={"X-Request-Id": 'a"b c'}).headers["x-request-id"] != 'a"b c'
    assert api("PUT", "/jobs").headers["allow"] == "GET, HEAD, POST"
    head = api("HEAD", "/jobs")
    assert (head.status, head.text) == (200, "")


def test_cors_is_off_unless_configured(api: Api, serve: Any) -> None:
    asked = {"Origin": "https://app.x.org", "Access-Control-Request-Method": "POST"}
    assert api("OPTIONS", "/jobs", headers=asked, token="").status == 405
    with serve(cors_origins=("https://app.x.org",)) as other:
        allowed = other("OPTIONS", "/jobs", headers=asked, token="")
        assert (allowed.status, allowed.headers["access-control-allow-origin"]) == (200, "https://app.x.org")
        evil = other("OPTIONS", "/jobs", headers=asked | {"Origin": "https://evil.org"}, token="")
        assert "access-control-allow-origin" not in evil.headers


def test_rate_limits(serve: Any) -> None:
    with serve(rate_limit=5) as api:
        while time.monotonic() % 60 > 55:
            time.sleep(1)
        answers = [api("GET", "/jobs") for _ in range(7)]
        assert [answer.status for answer in answers] == [200] * 5 + [429] * 2
        assert answers[0].headers["ratelimit-policy"] == '"default";q=5;w=60'
        assert answers[0].headers["ratelimit"].startswith('"default";r=4;t=')
        assert 1 <= int(answers[6].headers["retry-after"]) <= 60
        assert api("GET", "/jobs", token=api.make_token()).status == 200, "another token has its own"
        assert api("GET", "/health").status == 200
    with serve(rate_limit=0) as api:
        assert "ratelimit" not in api("GET", "/jobs").headers


def test_slow_clients_do_not_hold_others(api: Api) -> None:
    slow = [socket.create_connection(("127.0.0.1", api.port)) for _ in range(100)]
    try:
        for connection in slow:
            connection.sendall(b"POST /submit_job HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n")
        begun = time.monotonic()
        assert api("GET", "/jobs").status == 200
        assert time.monotonic() - begun < 8
    finally:
        for connection in slow:
            connection.close()


def test_the_database_goes_away_and_comes_back(server: PostgresServer, dsn: str, serve: Any) -> None:
    import psycopg

    name = dsn.rpartition("/")[2]
    with serve() as api:
        assert api("POST", "/submit_job", {"name": "default"}).status == 201
        with psycopg.connect(server.dsn, autocommit=True) as admin:
            admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
            admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
            for path in ("/jobs", "/failedJobs", f"{V1}/jobs", "/readyz"):
                answer = api("GET", path)
                assert answer.status == 503, answer.text
                assert int(answer.headers["retry-after"]) > 0
                assert answer.headers["content-type"] == "application/problem+json"
            assert api("GET", "/health").status == 200
            admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
            until(lambda: api("POST", "/submit_job", {"name": "default"}).status == 201)
            admin.execute("SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = %s", [name])
            statuses = [api("GET", "/jobs").status for _ in range(12)]
            assert statuses == [200] * 12, "connections that ended while idle are not handed out"
        assert api("GET", "/readyz").status == 200


def test_redis_is_not_needed(serve: Any) -> None:
    with serve(redis_url="redis://127.0.0.1:1") as api:
        assert api("POST", "/submit_job", {"name": "default"}).status == 201
        assert api("POST", "/jobs", {"type": "default"}).status == 202
        assert api("POST", "/addJob", {"email": "a@x.org", "name": "A"}).status == 200


def test_more_requests_than_connections(serve: Any) -> None:
    with serve(api_connections=2) as api:
        statuses: list[int] = []

        def post() -> None:
            statuses.extend(api("POST", "/submit_job", {"name": "default"}).status for _ in range(10))

        threads = [threading.Thread(target=post) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert statuses == [201] * 160
        assert api.count() == 160


def test_a_role_of_its_own_is_enough(api: Api, dsn: str, server: PostgresServer, serve: Any) -> None:
    """pgqueue_api may do all that the routes do, and none of what workers do."""
    from urllib.parse import urlsplit

    import psycopg

    from tests.api.conftest import served

    login = "api_login"
    api.query(f"CREATE ROLE {login} LOGIN PASSWORD '{SECRET}' IN ROLE pgqueue_api")
    try:
        parts = urlsplit(dsn)
        own = parts._replace(netloc=f"{login}:{SECRET}@{parts.hostname}:{parts.port}").geturl()
        with served(api.settings.__class__(jwt_secret=SECRET, signup=True), own) as confined:
            ana = {"username": "ana", "password": "correct horse"}
            tokens = confined("POST", "/signup", ana, token="").json
            assert confined("POST", "/login", ana, token="").status == 200
            assert confined("POST", "/refreshToken", {"refresh_token": tokens["refresh_token"]}, token="").status == 200
            id = confined("POST", f"{V1}/jobs", {"type": "t"}, headers={"Idempotency-Key": "k"}).json["id"]
            assert confined("POST", f"{V1}/jobs/batch", {"jobs": [{"type": "t"}] * 3}).status == 201
            assert confined("PATCH", f"{V1}/jobs/{id}", {"priority": 3}).status == 200
            assert confined("POST", f"{V1}/jobs/{id}/cancel").status == 202
            assert confined("POST", f"{V1}/jobs/actions", {"action": "delete", "ids": [id]}).json["done"] == 1
            assert confined("POST", f"{V1}/queues/q/pause").status == 200
            assert confined("POST", f"{V1}/tokens", {"subject": "s", "scopes": ["admin"]}).status == 201
            assert confined("POST", f"{V1}/tokens/revoke", {"jti": "x"}).status == 204
            for path in ("jobs", "failures", "queues", "workers", "types", "stats", "audit"):
                assert confined("GET", f"{V1}/{path}").status == 200, path
            for path in ("/jobs", "/db/jobs", "/failedJobs", "/readyz"):
                assert confined("GET", path).status == 200, path
        with psycopg.connect(own, autocommit=True) as conn:
            for forbidden in (
                "UPDATE pgqueue.jobs SET status = 'completed'",
                "DELETE FROM pgqueue.jobs",
                "DELETE FROM pgqueue.audit",
                "INSERT INTO pgqueue.revoked_tokens (jti, expires_at) VALUES ('x', now())",
                "SELECT pgqueue.write_audit('cancel', 1, 'q', 'forged')",
                "SELECT pgqueue.drop_partitions('30 days')",
            ):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    conn.execute(forbidden)
    finally:
        api.query(f"DROP ROLE {login}")
