"""Accounts: signing up, logging in, going on."""

import hashlib
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pgqueue.api.limits import Limiter
from tests.api.conftest import SECRET, Api, environment

ANA = {"username": "ana", "password": "correct horse"}


@pytest.fixture
def open_api(serve: Any) -> Any:
    with serve(signup=True) as api:
        yield api


def test_sign_up_is_off_unless_asked_for(api: Api) -> None:
    answer = api("POST", "/signup", ANA, token="")
    assert answer.status == 403
    assert "pgqueue users add" in answer.json["error"]
    assert api.value("SELECT count(*) FROM pgqueue.users") == 0


def test_from_sign_up_to_a_job(open_api: Api) -> None:
    made = open_api("POST", "/signup", ANA, token="")
    assert made.status == 201
    assert set(made.json) == {"access_token", "refresh_token"}
    job = open_api("POST", "/addJob", {"email": "a@x.org", "name": "Ana"}, token=made.json["access_token"])
    assert job.status == 200
    assert open_api("GET", "/failedJobs", token=made.json["access_token"]).json == []
    assert open_api("GET", "/api/v1/audit", token=made.json["access_token"]).status == 403

    for name in ("ana", "ANA"):
        taken = open_api("POST", "/signup", {"username": name, "password": "another one"}, token="")
        assert taken.status == 409
        assert "token" not in taken.text.replace('"instance"', "")
    assert open_api("POST", "/login", {"username": "ana", "password": "another one"}, token="").status == 401

    logged_in = open_api("POST", "/login", ANA, token="")
    assert logged_in.status == 200
    stored = str(open_api.query("SELECT password_hash FROM pgqueue.users"))
    assert "$argon2id$" in stored
    assert "correct horse" not in stored
    hashes = {bytes(hash) for (hash,) in open_api.query("SELECT hash FROM pgqueue.refresh_tokens")}
    assert hashlib.sha256(logged_in.json["refresh_token"].encode()).digest() in hashes
    assert "add_user" in str(open_api.query("SELECT action FROM pgqueue.audit"))


def test_who_it_is_not(open_api: Api) -> None:
    open_api("POST", "/signup", ANA, token="")
    wrong = open_api("POST", "/login", ANA | {"password": "wrong"}, token="")
    nobody = open_api("POST", "/login", {"username": "nobody", "password": "wrong"}, token="")
    assert wrong.status == nobody.status == 401
    assert wrong.json["error"] == nobody.json["error"], "nobody learns which names exist"
    for body in (
        {},
        {"username": "bob"},
        {"username": "bob", "password": "short"},
        {"username": "b b", "password": "x" * 9},
    ):
        assert open_api("POST", "/signup", body, token="").status == 400
    for body in (ANA | {"scopes": ["admin"]}, ANA | {"username": "x\0y"}, {"username": "x" * 2000, "password": "y"}):
        assert open_api("POST", "/signup", body, token="").status in (400, 409)
        assert open_api("POST", "/login", body, token="").status in (400, 401)


def test_refresh_tokens_are_used_up(open_api: Api) -> None:
    first = open_api("POST", "/signup", ANA, token="").json["refresh_token"]
    other = open_api("POST", "/login", ANA, token="").json["refresh_token"]

    def go_on(token: str) -> Any:
        return open_api("POST", "/refreshToken", {"refresh_token": token}, token="")

    second = go_on(first)
    assert second.status == 200
    assert second.json["refresh_token"] != first
    assert open_api("GET", "/jobs", token=second.json["access_token"]).status == 200
    assert go_on(first).status == 401, "used before: somebody has a copy"
    assert go_on(second.json["refresh_token"]).status == 401, "so the whole session has ended"
    assert go_on(other).status == 200, "and no other"
    for bad in ("", "x", "x" * 150, "\0"):
        assert go_on(bad).status in (400, 401)
    third = open_api("POST", "/login", ANA, token="").json["refresh_token"]
    with ThreadPoolExecutor(8) as pool:
        statuses = [answer.status for answer in pool.map(go_on, [third] * 8)]
    assert statuses.count(200) == 1


def test_the_sixth_session_ends_the_oldest(open_api: Api) -> None:
    tokens = [open_api("POST", "/signup", ANA, token="").json["refresh_token"]]
    for _ in range(5):
        tokens.append(open_api("POST", "/login", ANA, token="").json["refresh_token"])
    assert open_api.value("SELECT count(DISTINCT family) FROM pgqueue.refresh_tokens") == 5
    statuses = [open_api("POST", "/refreshToken", {"refresh_token": one}, token="").status for one in tokens]
    assert statuses == [401, 200, 200, 200, 200, 200]


def test_an_expired_refresh_token(open_api: Api) -> None:
    token = open_api("POST", "/signup", ANA, token="").json["refresh_token"]
    open_api.query("UPDATE pgqueue.refresh_tokens SET expires_at = now() - interval '1 s'")
    assert open_api("POST", "/refreshToken", {"refresh_token": token}, token="").status == 401
    open_api.query("SELECT pgqueue.prune_access()")
    assert open_api.value("SELECT count(*) FROM pgqueue.refresh_tokens") == 0


def test_guessing_is_slow(open_api: Api) -> None:
    assert open_api.state
    open_api.state.guesses_by_name = Limiter(3, "login")
    while time.monotonic() % 60 > 55:
        time.sleep(1)
    statuses = [open_api("POST", "/login", ANA, token="").status for _ in range(5)]
    assert statuses == [401, 401, 401, 429, 429]
    assert int(open_api("POST", "/login", ANA, token="").headers["retry-after"]) > 0


def test_users_add(api: Api) -> None:
    command = [sys.executable, "-m", "pgqueue", "users", "add", "op", "--scope", "jobs:read jobs:manage"]
    given = {"env": environment(api.dsn), "capture_output": True, "text": True, "cwd": "/"}
    done = subprocess.run([*command, "--queues", "mail*"], input="correct horse\n", **given)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert subprocess.run(command, input="correct horse\n", **given).returncode == 1, "the name is taken"
    assert subprocess.run(command, input="short\n", **given).returncode == 2
    tokens = api("POST", "/login", {"username": "op", "password": "correct horse"}, token="").json
    me = api("GET", "/api/v1/me", token=tokens["access_token"]).json
    assert (me["subject"], me["scopes"], me["queues"]) == ("user:op", ["jobs:manage", "jobs:read"], ["mail*"])


def test_token_create(api: Api) -> None:
    command = [sys.executable, "-m", "pgqueue", "token", "create", "--scope", "jobs:read jobs:write", "--ttl", "1h"]
    done = subprocess.run(command, env=environment(api.dsn), capture_output=True, text=True, cwd="/")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1, "the token alone"
    assert api("GET", "/failedJobs", token=done.stdout.strip()).status == 200
    for wrong in (["--scope", "root"], ["--ttl", "soon"], ["--ttl", "0"], ["--queues", "%"]):
        assert subprocess.run([*command, *wrong], env=environment(api.dsn), capture_output=True).returncode == 2
    weak = environment(api.dsn, JWT_SECRET="dev-secret-change-me-in-production")
    refused = subprocess.run(command, env=weak, capture_output=True, text=True, cwd="/")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "openssl rand" in refused.stderr
    assert SECRET not in refused.stderr
