"""Tokens: what is accepted, and everything that must not be."""

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from pgqueue.api.app import create_app
from pgqueue.api.auth import PLAIN_SCOPES, SCOPES, Keys, Unauthorized, Verifier, create_token, secret_kid
from pgqueue.api.endpoint import ANY, OPEN, Endpoint
from pgqueue.api.routes import TABLE, routes
from pgqueue.errors import InvalidSettings
from pgqueue.settings import Settings
from tests.api.conftest import SECRET, Api, until

NEW_SECRET = "another-0123456789-abcdefghij-987654321"
RSA = rsa.generate_private_key(65537, 2048)
EC = ec.generate_private_key(ec.SECP256R1())
ED = ed25519.Ed25519PrivateKey.generate()
PUBLIC_PEM = RSA.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
PUBLIC_DER = RSA.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def jwks() -> dict[str, Any]:
    keys = [
        json.loads(RSAAlgorithm.to_jwk(RSA.public_key())) | {"kid": "rsa", "alg": "RS256"},
        json.loads(ECAlgorithm.to_jwk(EC.public_key())) | {"kid": "ec", "alg": "ES256"},
        json.loads(OKPAlgorithm.to_jwk(ED.public_key())) | {"kid": "ed", "alg": "EdDSA"},
    ]
    return {"keys": keys}


@pytest.fixture
def jwks_file(tmp_path: Path) -> Path:
    file = tmp_path / "jwks.json"
    file.write_text(json.dumps(jwks()))
    return file


@pytest.fixture
def verify(jwks_file: Path) -> Callable[[str], Any]:
    settings = Settings(jwt_secret=SECRET, jwks_file=jwks_file)
    return Verifier(settings, Keys(settings)).verify


def claims(**more: Any) -> dict[str, Any]:
    now = int(time.time())
    return {"sub": "ana", "iat": now, "exp": now + 600, "scope": "jobs:read"} | more


def signed(payload: Any, headers: dict[str, Any] | None = None, key: bytes = SECRET.encode()) -> str:
    """HS256 by hand: what no library would make."""
    raw = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    head = json.dumps({"alg": "HS256", "typ": "JWT"} | (headers or {})).encode()
    parts = b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in (head, raw))
    tag = base64.urlsafe_b64encode(hmac.digest(key, parts, hashlib.sha256)).rstrip(b"=")
    return (parts + b"." + tag).decode()


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in claims().items() if key != name}


def attacks() -> Iterator[tuple[str, str]]:
    now = int(time.time())
    own = {"jwk": {"kty": "oct", "k": base64.urlsafe_b64encode(b"x" * 32).decode()}}
    yield "empty", ""
    yield "garbage", "garbage"
    yield "dots", "a.b.c"
    yield "none", jwt.encode(claims(), None, "none")
    yield "None", signed(claims(), {"alg": "None"})
    yield "no signature", signed(claims()).rpartition(".")[0] + "."
    yield "wrong secret", signed(claims(), key=b"x" * 32)
    yield "empty secret", signed(claims(), key=b"")
    yield "HS256 with the RSA key as PEM", signed(claims(), {"kid": "rsa"}, PUBLIC_PEM)
    yield "HS256 with the RSA key as DER", signed(claims(), {"kid": "rsa"}, PUBLIC_DER)
    yield "HS256 with the RSA key as JWK", signed(claims(), {"kid": "rsa"}, json.dumps(jwks()["keys"][0]).encode())
    yield "HS512", jwt.encode(claims(), SECRET * 2, "HS512")
    yield "RS256 under the name of the EC key", jwt.encode(claims(), RSA, "RS256", {"kid": "ec"})
    yield "RS256 without kid", jwt.encode(claims(), RSA, "RS256")
    yield "PS256", jwt.encode(claims(), RSA, "PS256", {"kid": "rsa"})
    yield "unknown kid", signed(claims(), {"kid": "nobody"})
    yield "kid that is a path", signed(claims(), {"kid": "../../etc/passwd"}, b"")
    yield "kid that is SQL", signed(claims(), {"kid": "' OR 1=1 --"})
    yield "kid that is no text", signed(claims(), {"kid": ["rsa"]})
    yield "jku", signed(claims(), {"jku": "http://127.0.0.1/keys", "kid": "x"}, b"x" * 32)
    yield "x5u", signed(claims(), {"x5u": "http://127.0.0.1/cert"}, b"x" * 32)
    yield "embedded jwk", signed(claims(), own, b"x" * 32)
    yield "crit", signed(claims(), {"crit": ["exp"]})
    yield "unknown crit", signed(claims(), {"crit": ["x-new"], "x-new": 1})
    yield "b64", signed(claims(), {"b64": False})
    yield "typ of another token", signed(claims(), {"typ": "refresh+jwt"})
    yield "typ that is no text", signed(claims(), {"typ": 7})
    yield "no exp", signed(without("exp"))
    yield "no iat", signed(without("iat"))
    yield "no sub", signed(without("sub"))
    yield "exp 1e18", signed(claims(exp=10**18))
    yield "exp as a float without end", signed(json.dumps(claims()).replace(str(claims()["exp"]), "1e400").encode())
    yield "exp as text", signed(claims(exp="soon"))
    yield "exp null", signed(claims(exp=None))
    yield "exp true", signed(claims(exp=True, iat=0))
    yield "expired a minute ago", signed(claims(iat=now - 600, exp=now - 60))
    yield "nbf in a minute", signed(claims(nbf=now + 60))
    yield "iat in a minute", signed(claims(iat=now + 60, exp=now + 600))
    yield "ends before it begins", signed(claims(iat=now, exp=now - 5))
    yield "lives a year", signed(claims(exp=now + 365 * 86400))
    yield "aud that nobody asked for", signed(claims(aud="other"))
    yield "aud list", signed(claims(aud=["other", "pgqueue"]))
    yield "sub that is a number", signed(claims(sub=7))
    yield "empty sub", signed(claims(sub=""))
    yield "sub with a line break", signed(claims(sub="a\nb"))
    yield "long sub", signed(claims(sub="a" * 300))
    yield "scope that is a list", signed(claims(scope=["admin"]))
    yield "queues that are a text", signed(claims(queues="mail"))
    yield "queues with odd names", signed(claims(queues=["mail%"]))
    yield "jti that is a number", signed(claims(jti=7))
    yield "claims twice", signed(b'{"sub": "ana", "sub": "root", ' + json.dumps(without("sub")).encode()[1:])
    yield "claims that are a list", signed(b"[]")
    yield "claims that are no JSON", signed(b"{")
    yield "claims of great depth", signed(b"[" * 5000)
    yield "64 KB", signed(claims(pad="x" * 65536))
    yield "not ASCII", signed(claims()) + "é"


def test_the_control_passes(verify: Callable[[str], Any]) -> None:
    assert verify(signed(claims())).scopes == {"jobs:read"}
    assert verify(signed(claims(), {"kid": secret_kid(SECRET)})).subject == "ana"
    assert verify(signed(claims(), {"typ": "at+jwt"})).subject == "ana"
    for key, algorithm, kid in ((RSA, "RS256", "rsa"), (EC, "ES256", "ec"), (ED, "EdDSA", "ed")):
        assert verify(jwt.encode(claims(), key, algorithm, {"kid": kid})).subject == "ana"
    assert verify(signed(claims(exp=int(time.time()) - 5, iat=int(time.time()) - 60))), "clocks differ a little"
    # jku, x5u and jwk do not help, and do not harm a good signature.
    assert verify(signed(claims(), {"jku": "http://127.0.0.1/", "x5u": "x", "jwk": {}})).subject == "ana"


@pytest.mark.parametrize("name", [name for name, _ in attacks()])
def test_attacks(verify: Callable[[str], Any], name: str) -> None:
    with pytest.raises(Unauthorized):
        verify(dict(attacks())[name])


def test_attacks_over_the_socket(api: Api) -> None:
    for name, token in attacks():
        if not token.isascii():
            continue
        for method, path, body in (
            ("POST", "/addJob", {"email": "a@x.org", "name": "A"}),
            ("GET", "/failedJobs", None),
        ):
            answer = api(method, path, body, token=token or "none")
            assert answer.status in (401, 400, 431), name
            assert answer.status == 401 or len(token) > 60_000, name
            if answer.status == 401:
                assert answer.headers["www-authenticate"].startswith("Bearer")
    assert api.count() == 0
    for headers in ({}, {"Authorization": SECRET}, {"Authorization": "Basic YTpi"}, {"Authorization": "Bearer"}):
        assert api("GET", "/failedJobs", token="", headers=headers).status == 401
    good = signed(claims(scope="jobs:read jobs:write"))
    assert api("GET", "/failedJobs", token=good).status == 200
    assert api("GET", "/failedJobs", token="", headers={"Authorization": f"bearer {good}"}).status == 200


def test_a_plain_token_of_the_secret_may_add_and_read(api: Api) -> None:
    token = signed(without("scope"))
    assert api("POST", "/addJob", {"email": "a@x.org", "name": "A"}, token=token).status == 200
    assert set(api("GET", "/api/v1/me", token=token).json["scopes"]) == PLAIN_SCOPES


def test_issuer_and_audience() -> None:
    settings = Settings(jwt_secret=SECRET, jwt_issuer="https://id.x.org", jwt_audience="pgqueue")
    verify = Verifier(settings, Keys(settings)).verify
    good = {"iss": "https://id.x.org", "aud": "pgqueue"}
    assert verify(signed(claims(**good)))
    assert verify(create_token(settings, "ana", ["jobs:read"], 60)[0])
    for bad in (
        {},
        {"iss": good["iss"]},
        {"aud": good["aud"]},
        good | {"iss": "https://id.x.org.evil"},
        good | {"iss": "https://id.x"},
        good | {"aud": ["pgqueue", "other"]},
        good | {"aud": "pgqueue2"},
    ):
        with pytest.raises(Unauthorized):
            verify(signed(claims(**bad)))


def test_keys_rotate(jwks_file: Path) -> None:
    old, both = Settings(jwt_secret=SECRET), Settings(jwt_secret=NEW_SECRET, jwt_secret_previous=SECRET)
    new = Settings(jwt_secret=NEW_SECRET)
    by_old, by_new = (create_token(settings, "ana", ["jobs:read"], 60)[0] for settings in (old, both))
    during, after = Verifier(both, Keys(both)).verify, Verifier(new, Keys(new)).verify
    assert during(by_old)
    assert during(by_new)
    assert during(signed(claims())), "without a kid, by the previous key"
    assert after(by_new)
    with pytest.raises(Unauthorized):
        after(by_old)
    settings = Settings(jwt_secret=SECRET, jwks_file=jwks_file)
    keys = Keys(settings)
    token = jwt.encode(claims(), EC, "ES256", {"kid": "new"})
    jwks_file.write_text(json.dumps({"keys": [jwks()["keys"][1] | {"kid": "new"}]}))
    keys._looked -= 60
    assert Verifier(settings, keys).verify(token)


def test_weak_keys_refuse_to_start(tmp_path: Path, jwks_file: Path) -> None:
    dsn = "postgresql://127.0.0.1/none"
    for secret in ("dev-secret-change-me-in-production", "k" * 40, "your-secret-your-secret-your-secret"):
        with pytest.raises(InvalidSettings, match="JWT_SECRET"):
            create_app(Settings(jwt_secret=secret), dsn)
    with pytest.raises(InvalidSettings, match="JWT_SECRET: must be set"):
        create_app(Settings(), dsn)
    small = rsa.generate_private_key(65537, 1024)
    for keys in (
        [],
        [{"kty": "oct", "k": "abc", "kid": "a"}],
        [json.loads(RSAAlgorithm.to_jwk(small.public_key())) | {"kid": "a"}],
        [jwks()["keys"][0] | {"alg": "HS256"}],
        [jwks()["keys"][0] | {"kid": "../x"}],
        [jwks()["keys"][0] | {"use": "enc"}],
        [json.loads(RSAAlgorithm.to_jwk(RSA)) | {"kid": "private"}],
        [jwks()["keys"][0], jwks()["keys"][0]],
    ):
        jwks_file.write_text(json.dumps({"keys": keys}))
        with pytest.raises(InvalidSettings, match="PGQUEUE_JWKS_FILE"):
            create_app(Settings(jwks_file=jwks_file), dsn)


# Scopes


def filled(endpoint: Endpoint) -> str:
    return endpoint.path.replace("{queue:path}", "mail").replace("{id}", "1")


def test_every_route_declares_its_scope() -> None:
    assert len(TABLE) > 30
    for endpoint in TABLE:
        assert endpoint.scope in (OPEN, ANY, *SCOPES), f"{endpoint.method} {endpoint.path}"
    public = {endpoint.path for endpoint in TABLE if endpoint.scope == OPEN}
    probes = {"/health", "/readyz", "/metrics"}
    assert public == {"/signup", "/login", "/refreshToken", "/openapi.json", "/docs"} | probes
    bare = Endpoint(method="GET", path="/new", handler=TABLE[0].handler, summary="Forgotten.")
    with pytest.raises(RuntimeError, match="GET /new has no scope"):
        routes(None, [bare])  # type: ignore[arg-type]


def test_every_route_refuses_who_has_no_token_or_another_scope(api: Api) -> None:
    tokens = {scope: api.make_token(scope) for scope in SCOPES}
    nothing = signed(claims(scope=""))
    for endpoint in TABLE:
        if endpoint.scope == OPEN:
            continue
        assert api(endpoint.method, filled(endpoint), token="").status == 401, endpoint.path
        if endpoint.scope == ANY:
            assert api(endpoint.method, filled(endpoint), token=nothing).status not in (401, 403)
            continue
        for scope, token in [*tokens.items(), ("none", nothing)]:
            if endpoint.media == "text/event-stream" and scope in (endpoint.scope, "admin"):
                continue  # it has no end; tests/api/test_stream.py reads it
            status = api(endpoint.method, filled(endpoint), token=token).status
            assert (status == 403) == (scope not in (endpoint.scope, "admin")), (endpoint.path, scope, status)


def test_dev_mode_opens_only_the_old_routes_and_only_here(serve: Any) -> None:
    with serve(dev=True) as api:
        for endpoint in TABLE:
            if endpoint.scope != OPEN:
                status = api(endpoint.method, filled(endpoint), token="").status
                assert (status == 401) != endpoint.dev, endpoint.path
        assert {endpoint.path.split("/{")[0] for endpoint in TABLE if endpoint.dev} == {
            "/submit_job",
            "/jobs",
            "/db/jobs",
        }
        assert api("GET", "/jobs", token="bad").status == 401, "a bad token is not better than none"
        assert api("GET", "/jobs", token="", headers={"Host": "evil.example"}).status == 403
        assert api("GET", "/jobs", token="", headers={"Origin": "http://evil.example"}).status == 403
        same = {"Origin": f"http://127.0.0.1:{api.port}"}
        assert api("GET", "/jobs", token="", headers=same).status == 200


def test_a_token_that_is_confined_to_queues(api: Api) -> None:
    token = api.make_token("jobs:read jobs:write jobs:manage", queues=["mail", "report*"], subject="tenant")
    mine = api("POST", "/api/v1/jobs", {"type": "t", "queue": "report/day"}, token=token).json["id"]
    theirs = api("POST", "/api/v1/jobs", {"type": "t", "queue": "pay", "idempotency_key": "k"}).json["id"]
    api.query("INSERT INTO pgqueue.jobs_failed (type, queue, status, finished_at) VALUES ('t', 'pay', 'failed', now())")
    row = "SELECT * FROM pgqueue.jobs WHERE id = %s"
    before = api.query(row, theirs)
    for endpoint in TABLE:
        if "/jobs/{id}" in endpoint.path:
            path = endpoint.path.replace("{id}", str(theirs))
            body = {"priority": 5} if endpoint.method == "PATCH" else None
            if endpoint.path.endswith("/resolve"):
                body = {"outcome": "retry"}
            assert api(endpoint.method, path, body, token=token).status == 404, endpoint.path
    for path in ("/api/v1/jobs", "/jobs", "/submit_job", "/addJob"):
        body = {"type": "default", "name": "default", "queue": "pay"}
        assert api("POST", path, body, token=token).status == 403, path
    assert api("POST", "/api/v1/jobs/batch", {"jobs": [{"type": "t", "queue": "pay"}]}, token=token).status == 403
    assert (
        api("POST", "/api/v1/jobs", {"type": "t", "queue": "mail", "idempotency_key": "k"}, token=token).status == 409
    )
    assert api("PATCH", f"/api/v1/jobs/{mine}", {"queue": "pay"}, token=token).status == 403
    assert api("POST", "/api/v1/queues/pay/pause", token=token).status == 403
    bulk = {"action": "cancel", "ids": [mine, theirs], "dry_run": True}
    assert api("POST", "/api/v1/jobs/actions", bulk, token=token).json["matched"] == 1
    assert (
        api("POST", "/api/v1/jobs/actions", bulk | {"dry_run": False, "ids": [theirs]}, token=token).json["done"] == 0
    )
    everything = {"action": "cancel", "filter": {}, "all": True, "dry_run": True}
    assert api("POST", "/api/v1/jobs/actions", everything, token=token).json["matched"] == 1
    assert [one["id"] for one in api("GET", "/api/v1/jobs", token=token).json["data"]] == [mine]
    assert [one["id"] for one in api("GET", "/jobs", token=token).json] == [mine]
    assert [one["queue"] for one in api("GET", "/api/v1/queues", token=token).json["data"]] == ["report/day"]
    assert api("GET", "/api/v1/failures", token=token).json["data"] == []
    failed = api("GET", "/failedJobs", token=token)
    assert (failed.json, failed.headers["x-total-count"]) == ([], "0")
    for path in ("/api/v1/stats", "/api/v1/workers", "/api/v1/audit"):
        assert api("GET", path, token=token).status == 403
    assert api.query(row, theirs) == before


def test_tokens_are_made_and_revoked(api: Api, serve: Any) -> None:
    made = api("POST", "/api/v1/tokens", {"subject": "shop", "scopes": ["jobs:write"], "ttl": 60})
    assert made.status == 201
    token = made.json["token"]
    body = {"type": "t"}
    assert api("POST", "/api/v1/jobs", body, token=token).status == 201
    with serve() as other:
        assert other("POST", "/api/v1/jobs", body, token=token).status == 201
        assert api("POST", "/api/v1/tokens/revoke", {"jti": made.json["jti"], "reason": "left"}).status == 204
        assert api("POST", "/api/v1/jobs", body, token=token).status == 401
        # Another process knows it soon.
        until(lambda: other("POST", "/api/v1/jobs", body, token=token).status == 401)
    assert [one["action"] for one in api("GET", "/api/v1/audit").json["data"]] == ["revoke_token", "create_token"]
    assert token not in str(api.query("SELECT * FROM pgqueue.audit"))
    assert api("POST", "/api/v1/tokens", {"subject": "x", "scopes": ["root"]}).status == 422
    assert api("POST", "/api/v1/tokens", {"subject": "x", "scopes": ["admin"], "ttl": 31_000_000.0}).status == 422
