"""Users, their sessions, and tokens that are no longer good."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from uuid import uuid4

from pgqueue.db import Connection, acting_as, translated
from pgqueue.sql import SQL

SESSIONS = 5
"""So many a user; a further one ends the oldest."""
REFRESH_TTL = 7 * 86400.0
"""Seconds for which a refresh token can be used."""
ACCESS_TTL = 900.0
"""The same for an access token of a session."""


def subject(name: str) -> str:
    """What tokens call a user."""
    return f"user:{name}"


class User(NamedTuple):
    id: int
    name: str
    password_hash: str
    scopes: list[str]
    queues: list[str] | None


class UserRow(NamedTuple):
    name: str
    scopes: list[str]
    queues: list[str] | None
    created_at: datetime
    sessions: int


class TokenRow(NamedTuple):
    jti: str
    subject: str
    scope: str
    actor: str
    created_at: datetime
    expires_at: datetime
    revoked: bool


class Session(NamedTuple):
    """Who it is, and the refresh token that follows."""

    name: str
    scopes: list[str]
    queues: list[str] | None
    refresh_token: str


async def add_user(
    conn: Connection,
    name: str,
    password_hash: str,
    scopes: Sequence[str],
    queues: Sequence[str] | None = None,
    *,
    actor: str | None = None,
) -> int | None:
    """None: the name is taken."""
    parameters = {
        "name": name,
        "password_hash": password_hash,
        "scopes": list(scopes),
        "queues": None if queues is None else list(queues),
    }
    with translated():
        async with acting_as(conn, actor or name):
            row = await (await conn.execute(SQL.add_user, parameters, prepare=False)).fetchone()
            if row is None:
                return None
            await _audit(conn, "add_user", {"user": name, "scopes": list(scopes)})
    return int(row[0])


async def get_user(conn: Connection, name: str) -> User | None:
    with translated():
        row = await (await conn.execute(SQL.get_user, {"name": name}, prepare=False)).fetchone()
    return User(*row) if row else None


async def rehash(conn: Connection, user: User, password_hash: str) -> None:
    with translated():
        await conn.execute(SQL.rehash_user, {"id": user.id, "password_hash": password_hash}, prepare=False)


async def list_users(conn: Connection) -> list[UserRow]:
    with translated():
        rows = await (await conn.execute(SQL.list_users, prepare=False, binary=True)).fetchall()
    return [UserRow(*row) for row in rows]


async def set_password(conn: Connection, name: str, password_hash: str, *, actor: str | None = None) -> bool:
    """Ends all sessions of the user, and their access tokens. False: there is no such user."""
    with translated():
        async with acting_as(conn, actor or name):
            parameters = {"name": name, "password_hash": password_hash}
            row = await (await conn.execute(SQL.set_password, parameters, prepare=False)).fetchone()
            if row is None:
                return False
            user_id, found = row
            await conn.execute(SQL.end_sessions, {"user_id": user_id}, prepare=False)
            await _revoke_subject(conn, found, "the password was changed")
            await _audit(conn, "set_password", {"user": found})
    return True


async def remove_user(conn: Connection, name: str, *, actor: str | None = None) -> bool:
    """With all sessions, and their access tokens. False: there is no such user."""
    with translated():
        async with acting_as(conn, actor):
            row = await (await conn.execute(SQL.remove_user, {"name": name}, prepare=False)).fetchone()
            if row is None:
                return False
            await _revoke_subject(conn, row[0], "the user was removed")
            await _audit(conn, "remove_user", {"user": row[0]})
    return True


async def _revoke_subject(conn: Connection, name: str, reason: str) -> None:
    expires_at = datetime.now(UTC) + timedelta(seconds=2 * ACCESS_TTL)
    parameters = {"jti": f"sub:{subject(name)}", "expires_at": expires_at, "reason": reason}
    await conn.execute(SQL.revoke_token, parameters, prepare=False)


async def begin_session(conn: Connection, user_id: int) -> str:
    """A refresh token. Only its hash is stored."""
    with translated():
        async with conn.transaction():
            await conn.execute(SQL.lock_user, {"id": user_id}, prepare=False)
            await conn.execute(SQL.end_old_sessions, {"user_id": user_id, "keep": SESSIONS - 1}, prepare=False)
            return await _add_token(conn, user_id, str(uuid4()))


async def go_on(conn: Connection, refresh_token: str) -> Session | None:
    """Uses a refresh token up, for the next one. None: it is not good, and if it was used before, somebody has a copy
    of it, so its session ends for both."""
    with translated():
        async with conn.transaction():
            hash = _hash(refresh_token)
            row = await (await conn.execute(SQL.use_refresh_token, {"hash": hash}, prepare=False)).fetchone()
            if row is None:
                return None
            family, used, expired, user_id, name, scopes, queues = row
            if used or expired:
                await conn.execute(SQL.end_session, {"family": family}, prepare=False)
                return None
            await conn.execute(SQL.mark_refresh_token, {"hash": hash}, prepare=False)
            return Session(name, scopes, queues, await _add_token(conn, user_id, str(family)))


async def revoke_token(
    conn: Connection, jti: str, expires_at: datetime, *, actor: str | None = None, reason: str | None = None
) -> None:
    with translated():
        async with acting_as(conn, actor):
            parameters = {"jti": jti, "expires_at": expires_at, "reason": reason}
            await conn.execute(SQL.revoke_token, parameters, prepare=False)


async def revoked_tokens(conn: Connection) -> dict[str, float]:
    """The ids of tokens that are no longer good, and since when."""
    with translated():
        return dict(await (await conn.execute(SQL.revoked_tokens, prepare=False)).fetchall())


async def list_tokens(conn: Connection, limit: int) -> list[TokenRow]:
    """Those that the API made and that have not expired, newest first."""
    with translated():
        rows = await (await conn.execute(SQL.list_tokens, {"limit": limit}, prepare=False, binary=True)).fetchall()
    return [TokenRow(*row) for row in rows]


async def note_token(conn: Connection, detail: dict[str, Any], *, actor: str | None = None) -> None:
    with translated():
        async with acting_as(conn, actor):
            await _audit(conn, "create_token", detail)


async def _audit(conn: Connection, action: str, detail: dict[str, Any]) -> None:
    parameters = {"action": action, "detail": json.dumps(detail), "reason": None}
    await conn.execute(SQL.audit_access, parameters, prepare=False)


async def _add_token(conn: Connection, user_id: int, family: str) -> str:
    token = secrets.token_urlsafe(32)
    parameters = {"hash": _hash(token), "family": family, "user_id": user_id, "ttl": REFRESH_TTL}
    await conn.execute(SQL.add_refresh_token, parameters, prepare=False)
    return token


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()
