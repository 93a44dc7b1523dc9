"""Signing up, logging in, and going on with a refresh token."""

from __future__ import annotations

import asyncio
import secrets

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError
from starlette.responses import Response

from pgqueue import accounts
from pgqueue.api.auth import create_token
from pgqueue.api.calls import Call, answer, dumps
from pgqueue.api.problems import Problem
from pgqueue.api.schemas import Credentials, LoginBody, PasswordBody, RefreshBody

NEW_USER = ("jobs:read", "jobs:write")


class Passwords:
    """argon2id. Each takes 64 MiB for a moment, so only a few at a time."""

    def __init__(self, hasher: PasswordHasher | None = None) -> None:
        self._hasher = hasher or PasswordHasher()
        self._turns = asyncio.Semaphore(2)
        self._nobodys = ""

    async def hash(self, password: str) -> str:
        async with self._turns:
            return await asyncio.to_thread(self._hasher.hash, password)

    async def verify(self, password_hash: str | None, password: str) -> bool:
        """Without a hash it takes as long, so that nobody learns which names exist."""
        async with self._turns:
            self._nobodys = self._nobodys or await asyncio.to_thread(self._hasher.hash, secrets.token_hex())
            try:
                await asyncio.to_thread(self._hasher.verify, password_hash or self._nobodys, password)
            except (VerificationError, InvalidHashError):
                return False
        return password_hash is not None

    def is_old(self, password_hash: str) -> bool:
        return self._hasher.check_needs_rehash(password_hash)


async def signup(call: Call) -> Response:
    given: Credentials = call.body
    signing(call)
    if not call.state.settings.signup:
        raise Problem(403, "forbidden", "sign-up is switched off here; an operator adds users: pgqueue users add")
    _limit(call, given.username)
    password_hash = await call.state.passwords.hash(given.password)
    async with call.connection() as conn, conn.transaction():
        user_id = await accounts.add_user(conn, given.username, password_hash, NEW_USER)
        if user_id is None:
            raise Problem(409, "conflict", "username: is taken")
        refresh_token = await accounts.begin_session(conn, user_id)
    return _tokens(call, 201, given.username, list(NEW_USER), None, refresh_token)


async def login(call: Call) -> Response:
    given: LoginBody = call.body
    signing(call)
    _limit(call, given.username)
    name = given.username.replace("\0", "")
    async with call.connection() as conn:
        user = await accounts.get_user(conn, name)
    good = await call.state.passwords.verify(user.password_hash if user else None, given.password)
    if not good or user is None:
        raise _wrong("the name or the password is wrong")
    async with call.connection() as conn:
        if call.state.passwords.is_old(user.password_hash):
            await accounts.rehash(conn, user, await call.state.passwords.hash(given.password))
        refresh_token = await accounts.begin_session(conn, user.id)
    return _tokens(call, 200, user.name, user.scopes, user.queues, refresh_token)


async def refresh(call: Call) -> Response:
    given: RefreshBody = call.body
    signing(call)
    _limit(call, None)
    async with call.connection() as conn:
        session = await accounts.go_on(conn, given.refresh_token)
    if session is None:
        raise _wrong("the refresh token is not good: log in again")
    return _tokens(call, 200, session.name, session.scopes, session.queues, session.refresh_token)


async def change_password(call: Call) -> Response:
    given: PasswordBody = call.body
    kind, _, name = call.principal.subject.partition(":")
    _limit(call, name)
    async with call.connection() as conn:
        user = await accounts.get_user(conn, name) if kind == "user" else None
    if not await call.state.passwords.verify(user.password_hash if user else None, given.password) or user is None:
        raise Problem(403, "forbidden", "password: is wrong, or this token is not of a user")
    password_hash = await call.state.passwords.hash(given.new_password)
    async with call.connection() as conn:
        await accounts.set_password(conn, user.name, password_hash, actor=call.actor)
    call.state.look_for_revoked()
    return Response(status_code=204)


def signing(call: Call) -> None:
    """Before anything is done that would end in a token."""
    if call.state.settings.jwt_secret is None:
        problem = (
            "this server only checks tokens that others sign (PGQUEUE_JWKS_FILE); to make tokens here, set JWT_SECRET"
        )
        raise Problem(403, "forbidden", problem)


def _tokens(
    call: Call, status: int, name: str, scopes: list[str], queues: list[str] | None, refresh_token: str
) -> Response:
    ttl = min(accounts.ACCESS_TTL, call.state.settings.jwt_max_ttl)
    token, _ = create_token(call.state.settings, accounts.subject(name), scopes, ttl, queues=queues)
    return answer(status, dumps({"access_token": token, "refresh_token": refresh_token}))


def _limit(call: Call, name: str | None) -> None:
    """Guessing is slow: per account, and per address."""
    client = call.request.client
    call.state.guesses_by_address.count(client.host if client else "-")
    if name is not None:
        call.state.guesses_by_name.count(name.lower())


def _wrong(text: str) -> Problem:
    return Problem(401, "unauthorized", text, headers={"www-authenticate": 'Bearer realm="pgqueue"'})
