"""The first answer to a request with an Idempotency-Key, kept in the transaction that did what was asked."""

from __future__ import annotations

from typing import NamedTuple

from psycopg import errors as pg

from pgqueue.db import Connection, translated
from pgqueue.errors import KeyReused
from pgqueue.sql import SQL

PATIENCE = "2s"
"""For another request with the same key that is under way."""


class Key(NamedTuple):
    subject: str
    route: str
    key: str
    fingerprint: bytes


class Answer(NamedTuple):
    status: int
    body: str
    location: str | None


class InProgress(Exception):
    """Another request with this key is under way."""


async def first_answer(conn: Connection, key: Key) -> Answer | None:
    """The answer that was given; None: the key is taken now, and keep() must follow in the same transaction."""
    try:
        with translated():
            await conn.execute("SELECT set_config('lock_timeout', %s, true)", [PATIENCE])
            parameters = key._asdict()
            taken = await (await conn.execute(SQL.begin_answer, parameters, prepare=False)).fetchone()
            await conn.execute("SET LOCAL lock_timeout TO DEFAULT")
            if taken:
                return None
            del parameters["fingerprint"]
            row = await (await conn.execute(SQL.get_answer, parameters, prepare=False, binary=True)).fetchone()
    except pg.LockNotAvailable as error:
        raise InProgress from error
    if row is None or row[1] is None:
        raise InProgress
    if bytes(row[0]) != key.fingerprint:
        raise KeyReused("this Idempotency-Key was used for another request: use a new key for a new request")
    return Answer(*row[1:])


async def keep(conn: Connection, key: Key, answer: Answer) -> None:
    with translated():
        parameters = {**key._asdict(), **answer._asdict()}
        del parameters["fingerprint"]
        await conn.execute(SQL.keep_answer, parameters, prepare=False)
