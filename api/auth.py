"""Who is calling and what they may do: Bearer JWTs, keys by `kid`, scopes, revocation."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import jwt

from pgqueue.errors import InvalidSettings
from pgqueue.settings import Settings

SCOPES = ("jobs:read", "jobs:write", "jobs:manage", "admin")
PLAIN_SCOPES = frozenset({"jobs:read", "jobs:write"})
"""Of a token that was signed with JWT_SECRET and has no `scope` at all."""
LEEWAY = 10
LONGEST_TOKEN = 8192
RELOAD_AFTER = 10.0
"""Seconds between two looks at the JWKS file because of a key that is not known."""

_KID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_QUEUES = re.compile(r"[A-Za-z0-9_.:/*-]{1,64}")
_PLACEHOLDER = re.compile(r"change.?me|your.?secret|replace.?(me|this)|placeholder|example", re.IGNORECASE)
_TYPES = (None, "jwt", "at+jwt", "application/at+jwt")
_ALGORITHMS = {"RSA": ("RS256",), "EC": ("ES256",), "OKP": ("EdDSA",)}


class Unauthorized(Exception):
    """The token is not good; the text says why, without showing it."""


@dataclass(frozen=True, slots=True)
class Principal:
    subject: str
    scopes: frozenset[str]
    queues: tuple[str, ...] | None = None
    """Patterns; None is all queues."""
    jti: str | None = None
    expires_at: float | None = None
    issued_at: float = 0.0

    def may(self, scope: str) -> bool:
        return scope in self.scopes or "admin" in self.scopes

    def sees(self, queue: str) -> bool:
        return self.queues is None or any(matches(pattern, queue) for pattern in self.queues)


def matches(pattern: str, queue: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), queue) is not None


@dataclass(frozen=True, slots=True)
class Key:
    """One key, one algorithm: the token's header never chooses."""

    kid: str
    algorithm: str
    material: Any


class Keys:
    """All keys, in memory, by kid."""

    def __init__(self, settings: Settings) -> None:
        self._file = settings.jwks_file
        self._looked = 0.0
        self.secrets = [
            Key(secret_kid(secret), "HS256", secret.encode())
            for secret in (settings.jwt_secret, settings.jwt_secret_previous)
            if secret
        ]
        for name in ("jwt_secret", "jwt_secret_previous"):
            secret = getattr(settings, name)
            if secret and (len(set(secret)) < 8 or _PLACEHOLDER.search(secret)):
                problem = f"{name.upper()}=***: can be guessed; make one with: openssl rand -hex 32"
                raise InvalidSettings([problem])
        self._fixed = {key.kid: key for key in self.secrets}
        self._from_file = self._load() if self._file else {}

    @property
    def signing(self) -> Key | None:
        return self.secrets[0] if self.secrets else None

    def candidates(self, kid: Any) -> Sequence[Key]:
        """The keys that a token may be signed with, newest first."""
        if kid is None:
            return self.secrets or (list(self._from_file.values()) if len(self._from_file) == 1 else [])
        if not isinstance(kid, str) or not _KID.fullmatch(kid):
            return []
        found = self._fixed.get(kid) or self._from_file.get(kid)
        if found is None and self._file and time.monotonic() - self._looked > RELOAD_AFTER:
            with suppress(InvalidSettings):  # a file that is being written: the last good keys stay
                self._from_file = self._load()
            found = self._from_file.get(kid)
        return [found] if found else []

    def _load(self) -> dict[str, Key]:
        assert self._file is not None
        self._looked = time.monotonic()
        return read_jwks(self._file)


def secret_kid(secret: str) -> str:
    return "hs-" + hashlib.sha256(b"pgqueue kid\0" + secret.encode()).hexdigest()[:12]


def read_jwks(file: Path) -> dict[str, Key]:
    """The keys of a JWKS file; anything in it that is not a public signing key with a name refuses the file."""
    problem = f"PGQUEUE_JWKS_FILE={file}: "
    try:
        text = file.read_text("utf-8")
        listed = json.loads(text)["keys"]
        if len(text) > 65_536 or not isinstance(listed, list) or not listed:
            raise ValueError("no list of keys, or more than 64 KiB")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidSettings([f"{problem}must be a JWKS: {error}"]) from None
    keys: dict[str, Key] = {}
    for each in listed:
        try:
            allowed = _ALGORITHMS[each["kty"]]
            algorithm = each.get("alg", allowed[0])
            if algorithm not in allowed or each.get("use", "sig") != "sig" or "d" in each:
                raise ValueError("only public keys for RS256, ES256 or EdDSA")
            if not _KID.fullmatch(each["kid"]) or each["kid"] in keys:
                raise ValueError("every key needs a kid of its own")
            material = jwt.PyJWK(each, algorithm=algorithm).key
            if algorithm == "RS256" and material.key_size < 2048:
                raise ValueError("an RSA key needs at least 2048 bits")
            keys[each["kid"]] = Key(each["kid"], algorithm, material)
        except (jwt.PyJWTError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidSettings([f"{problem}a key cannot be used: {type(error).__name__}: {error}"]) from None
    return keys


class Verifier:
    """From a token to its principal."""

    def __init__(self, settings: Settings, keys: Keys, now: Callable[[], float] = time.time) -> None:
        self._settings = settings
        self._keys = keys
        self._now = now
        self._known: dict[str, Principal] = {}
        self.revoked: Mapping[str, float] = {}
        """Ids of tokens, or sub: and a subject, and since when."""

    def verify(self, token: str) -> Principal:
        principal = self._known.get(token)
        if principal is None:
            principal = self._verify(token)
            if len(self._known) >= 4096:
                self._known.clear()
            self._known[token] = principal
        if principal.expires_at is not None and principal.expires_at + LEEWAY < self._now():
            self._known.pop(token, None)
            raise Unauthorized("the token has expired")
        if self.is_revoked(principal):
            raise Unauthorized("the token was revoked")
        return principal

    def is_revoked(self, principal: Principal) -> bool:
        return principal.jti in self.revoked or self.revoked.get(f"sub:{principal.subject}", 0.0) > principal.issued_at

    def forget(self) -> None:
        """After keys have changed."""
        self._known.clear()

    def _verify(self, token: str) -> Principal:
        if len(token) > LONGEST_TOKEN or not token.isascii():
            raise Unauthorized("the token is malformed")
        try:
            header = _object(token.split(".")[0])
        except ValueError:
            raise Unauthorized("the token is malformed") from None
        kind = header.get("typ")
        if not (kind is None or isinstance(kind, str)) or (kind.lower() if kind else None) not in _TYPES:
            raise Unauthorized("the token is not an access token")
        if "crit" in header or "b64" in header:
            raise Unauthorized("the token demands what is not understood here")
        candidates = [key for key in self._keys.candidates(header.get("kid")) if key.algorithm == header.get("alg")]
        if not candidates:
            raise Unauthorized("the token is signed with an unknown key or another algorithm")
        for last, key in [(key is candidates[-1], key) for key in candidates]:
            try:
                claims = self._decode(token, key)
                break
            except jwt.InvalidSignatureError:
                if last:
                    raise Unauthorized("the token's signature is wrong") from None
            except jwt.ExpiredSignatureError:
                raise Unauthorized("the token has expired") from None
            except (jwt.PyJWTError, ValueError, OverflowError, TypeError):
                raise Unauthorized("the token's claims are not valid") from None
        return self._principal(claims, key)

    def _decode(self, token: str, key: Key) -> dict[str, Any]:
        claims: dict[str, Any] = jwt.decode(
            token,
            key.material,
            algorithms=[key.algorithm],
            issuer=self._settings.jwt_issuer,
            audience=self._settings.jwt_audience,
            leeway=LEEWAY,
            options={"require": ["exp", "iat", "sub"], "strict_aud": True},
        )
        if _object(token.split(".")[1]) != claims:
            raise ValueError("the claims are ambiguous")
        return claims

    def _principal(self, claims: Mapping[str, Any], key: Key) -> Principal:
        exp, iat, subject, jti = claims["exp"], claims["iat"], claims["sub"], claims.get("jti")
        if isinstance(exp, bool) or isinstance(iat, bool) or not 0 < exp - iat <= self._settings.jwt_max_ttl:
            raise Unauthorized("the token lives too long")
        if not 1 <= len(subject) <= 255 or not subject.isprintable():
            raise Unauthorized("the token's subject is not valid")
        if jti is not None and (not isinstance(jti, str) or not 1 <= len(jti) <= 255):
            raise Unauthorized("the token's id is not valid")
        return Principal(subject, self._scopes(claims, key), _queues(claims), jti, float(exp), float(iat))

    def _scopes(self, claims: Mapping[str, Any], key: Key) -> frozenset[str]:
        if "scope" not in claims:
            return PLAIN_SCOPES if key.algorithm == "HS256" else frozenset()
        if not isinstance(claims["scope"], str):
            raise Unauthorized("the token's scope is not a text")
        return frozenset(claims["scope"].split()) & frozenset(SCOPES)


def _queues(claims: Mapping[str, Any]) -> tuple[str, ...] | None:
    queues = claims.get("queues")
    if "queues" not in claims:
        return None
    if not isinstance(queues, list) or len(queues) > 100:
        raise Unauthorized("the token's queues are not a list")
    if not all(isinstance(queue, str) and _QUEUES.fullmatch(queue) for queue in queues):
        raise Unauthorized("the token's queues are not valid")
    return tuple(queues)


def valid_queues(queues: Sequence[str]) -> bool:
    return len(queues) <= 100 and all(_QUEUES.fullmatch(queue) for queue in queues)


def _object(segment: str) -> dict[str, Any]:
    """A part of a token. A name that comes twice would mean one thing to one reader and another to the next."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) != len(pairs):
            raise ValueError("a name comes twice")
        return found

    raw = base64.b64decode(segment.encode("ascii") + b"=" * (-len(segment) % 4), b"-_", validate=True)
    try:
        found = json.loads(raw, object_pairs_hook=once)
    except RecursionError:
        raise ValueError("too deep") from None
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return found


def create_token(
    settings: Settings,
    subject: str,
    scopes: Sequence[str],
    ttl: float,
    *,
    queues: Sequence[str] | None = None,
) -> tuple[str, dict[str, Any]]:
    """The token and its claims."""
    key = Keys(settings).signing
    if key is None:
        others = (
            " (tokens for PGQUEUE_JWKS_FILE are made by whoever has its private keys)" if settings.jwks_file else ""
        )
        raise InvalidSettings([f"JWT_SECRET: must be set to make tokens{others}; make one with: openssl rand -hex 32"])
    if ttl > settings.jwt_max_ttl:
        raise InvalidSettings([f"a token may live at most {settings.jwt_max_ttl:g} s (PGQUEUE_JWT_MAX_TTL)"])
    # With its fraction: what was issued in the second of a revocation came before it or after.
    now = round(time.time(), 3)
    claims: dict[str, Any] = {
        "sub": subject,
        "scope": " ".join(scopes),
        "iat": now,
        "exp": int(now) + max(1, int(ttl)),
        "jti": str(uuid4()),
    }
    if queues is not None:
        claims["queues"] = list(queues)
    if settings.jwt_issuer:
        claims["iss"] = settings.jwt_issuer
    if settings.jwt_audience:
        claims["aud"] = settings.jwt_audience
    return jwt.encode(claims, key.material, key.algorithm, {"kid": key.kid, "typ": "at+jwt"}), claims
