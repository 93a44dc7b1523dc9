"""Accounts: signing up, logging in, going on."""

import hashlib
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jwt
import pytest
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from jwt.algorithms import OKPAlgorithm

from pgqueue import cli as pgqueue_cli
from pgqueue.api.limits import Limiter
from tests.api.conftest import SECRET, Api, environment, until

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


def cli(api: Api, *arguments: str, said: str = "", **environ: str) -> Result:
    return CliRunner(env=environment(api.dsn, **environ)).invoke(pgqueue_cli.cli, arguments, input=said)


def test_users_add(api: Api) -> None:
    command = ["users", "add", "op", "--scope", "jobs:read jobs:manage"]
    done = cli(api, *command, "--queues", "mail*", said="correct horse\n")
    assert (done.exit_code, done.stdout) == (0, ""), done.output
    assert cli(api, *command, said="correct horse\n").exit_code == 1, "the name is taken"
    assert cli(api, *command, said="short\n").exit_code == 2
    tokens = api("POST", "/login", {"username": "op", "password": "correct horse"}, token="").json
    me = api("GET", "/api/v1/me", token=tokens["access_token"]).json
    assert (me["subject"], me["scopes"], me["queues"]) == ("user:op", ["jobs:manage", "jobs:read"], ["mail*"])


def test_token_create(api: Api) -> None:
    command = ["token", "create", "--scope", "jobs:read jobs:write", "--ttl", "1h"]
    whole = [sys.executable, "-m", "pgqueue", *command]
    done = subprocess.run(whole, env=environment(api.dsn), capture_output=True, text=True, cwd="/")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1, "the token alone"
    assert api("GET", "/failedJobs", token=done.stdout.strip()).status == 200
    for wrong in (["--scope", "root"], ["--ttl", "soon"], ["--ttl", "0"], ["--queues", "%"]):
        assert cli(api, *command, *wrong).exit_code == 2
    refused = cli(api, *command, JWT_SECRET="dev-secret-change-me-in-production")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "openssl rand" in refused.stderr
    assert SECRET not in refused.stderr


def test_changing_the_password_ends_all_sessions(open_api: Api) -> None:
    first = open_api("POST", "/signup", ANA, token="").json
    other = open_api("POST", "/login", ANA, token="").json
    change = {"password": "correct horse", "new_password": "battery staple"}
    path = "/api/v1/me/password"
    assert open_api("POST", path, change | {"password": "wrong"}, token=first["access_token"]).status == 403
    assert open_api("POST", path, change | {"new_password": "short"}, token=first["access_token"]).status == 422
    assert open_api("POST", path, change, token=open_api.make_token("admin")).status == 403, "not of a user"
    assert open_api("POST", path, change, token="").status == 401
    assert open_api("GET", "/jobs", token=other["access_token"]).status == 200
    assert open_api("POST", path, change, token=first["access_token"]).status == 204
    for session in (first, other):
        assert open_api("GET", "/jobs", token=session["access_token"]).status == 401
        again = open_api("POST", "/refreshToken", {"refresh_token": session["refresh_token"]}, token="")
        assert again.status == 401
    assert open_api("POST", "/login", ANA, token="").status == 401
    fresh = open_api("POST", "/login", ANA | {"password": "battery staple"}, token="").json
    assert open_api("GET", "/jobs", token=fresh["access_token"]).status == 200
    assert open_api("GET", "/jobs").status == 200, "nobody else is logged out"
    assert ("set_password",) in open_api.query("SELECT action FROM pgqueue.audit")
    assert "battery" not in str(open_api.query("SELECT * FROM pgqueue.audit"))


def test_users_ls_passwd_rm(open_api: Api) -> None:
    session = open_api("POST", "/signup", ANA, token="").json
    assert json.loads(cli(open_api, "users", "ls", "--json").stdout)[0]["sessions"] == 1
    assert cli(open_api, "users", "ls").stdout == "ana  jobs:read jobs:write  sessions 1\n"
    assert cli(open_api, "users", "passwd", "ANA", said="battery staple\n").exit_code == 0
    assert open_api("POST", "/login", ANA | {"password": "battery staple"}, token="").status == 200
    until(lambda: open_api("GET", "/jobs", token=session["access_token"]).status == 401)
    for command in ("passwd", "rm"):
        unknown = cli(open_api, "users", command, "bob", said="battery staple\n")
        assert unknown.exit_code == 1
        assert "pgqueue users ls" in unknown.stderr
    session = open_api("POST", "/login", ANA | {"password": "battery staple"}, token="").json
    assert cli(open_api, "users", "rm", "ana").exit_code == 0
    until(lambda: open_api("GET", "/jobs", token=session["access_token"]).status == 401)
    assert open_api("POST", "/refreshToken", {"refresh_token": session["refresh_token"]}, token="").status == 401
    nobody = cli(open_api, "users", "ls")
    assert (nobody.stdout, nobody.stderr) == ("", "no users: pgqueue users add NAME\n")


def test_tokens_are_listed_and_revoked(api: Api) -> None:
    made = api("POST", "/api/v1/tokens", {"subject": "ci", "scopes": ["jobs:read"], "ttl": 600}).json
    [listed] = api("GET", "/api/v1/tokens").json["data"]
    assert (listed["jti"], listed["subject"], listed["scope"]) == (made["jti"], "ci", "jobs:read")
    assert (listed["actor"], listed["revoked"]) == ("api:admin", False)
    assert made["token"] not in str(listed)
    assert api("GET", "/jobs", token=made["token"]).status == 200
    assert api("POST", "/api/v1/tokens/revoke", {"jti": made["jti"]}).status == 204
    assert api("GET", "/jobs", token=made["token"]).status == 401
    assert api("GET", "/api/v1/tokens").json["data"][0]["revoked"] is True
    assert api("GET", "/api/v1/tokens", token=api.make_token("jobs:manage")).status == 403


def test_where_others_sign_nobody_logs_in(serve: Any, tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    jwk = OKPAlgorithm.to_jwk(key.public_key(), as_dict=True) | {"kid": "a", "alg": "EdDSA", "use": "sig"}
    file = tmp_path / "jwks.json"
    file.write_text(json.dumps({"keys": [jwk]}))
    now = int(time.time())
    claims = {"sub": "boss", "iat": now, "exp": now + 60, "scope": "admin"}
    token = jwt.encode(claims, key, "EdDSA", {"kid": "a"})
    with serve(jwt_secret=None, jwks_file=file, signup=True) as api:
        assert api("GET", "/jobs", token=token).status == 200
        for path, body in (("/signup", ANA), ("/login", ANA), ("/refreshToken", {"refresh_token": "x"})):
            answer = api("POST", path, body, token="")
            assert (answer.status, "set JWT_SECRET" in answer.json["error"]) == (403, True), path
        made = api("POST", "/api/v1/tokens", {"subject": "s", "scopes": ["admin"]}, token=token)
        assert (made.status, "set JWT_SECRET" in made.json["error"]) == (403, True)
        assert api.value("SELECT count(*) FROM pgqueue.users") == 0
        done = cli(api, "token", "create", JWT_SECRET="", PGQUEUE_JWKS_FILE=str(file), PGQUEUE_DIR=str(tmp_path))
        assert done.exit_code == 1
        assert "private keys" in done.stderr
