"""A request's body: counted while it comes, and JSON that is neither too deep nor too much."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from pgqueue.api.problems import Problem

LARGEST = 1024 * 1024
DRAINED = 4 * LARGEST
"""So much is read, and dropped, so that the client gets to read the answer; after that it is cut off."""
DEEPEST = 64
NODES = 200_000
PATIENCE = 30.0
"""Seconds for a body to arrive."""

_JSON_TYPE = re.compile(r"application/(?:[\w.+-]+\+)?json\s*(?:;.*)?", re.IGNORECASE | re.ASCII)
_FORM_TYPE = re.compile(r"application/x-www-form-urlencoded\s*(?:;.*)?", re.IGNORECASE | re.ASCII)
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)


async def read(request: Request, *, lenient: bool) -> bytes:
    """`lenient`: what curl sends by itself is taken for JSON as well."""
    content_type = request.headers.get("content-type")
    if content_type is not None and not _JSON_TYPE.fullmatch(content_type):
        if not (lenient and _FORM_TYPE.fullmatch(content_type)):
            raise Problem(415, "unsupported-media-type", "Content-Type must be application/json")
    elif content_type is None and not lenient:
        raise Problem(415, "unsupported-media-type", "Content-Type must be application/json")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Problem(415, "unsupported-media-type", "a compressed body is not accepted")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > DRAINED:
        raise _too_large()
    chunks, size = [], 0
    try:
        async with asyncio.timeout(PATIENCE):
            async for chunk in request.stream():
                size += len(chunk)
                if size > DRAINED:
                    raise _too_large()
                if size <= LARGEST:
                    chunks.append(chunk)
                else:
                    chunks.clear()
    except TimeoutError:
        headers = {"connection": "close"}
        raise Problem(408, "timeout", f"the body did not arrive within {PATIENCE:g} s", headers=headers) from None
    except ClientDisconnect:
        raise Problem(400, "invalid-json", "the body ended early") from None
    if size > LARGEST:
        raise _too_large()
    return b"".join(chunks)


def parse(body: bytes) -> Any:
    _measure(body)
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Problem(400, "invalid-json", f"the body is not JSON: {error}") from None
    if b"\\u0000" in body and (place := _with_nul(value)) is not None:
        raise Problem(400, "validation", f"{'.'.join(place) or 'body'}: PostgreSQL cannot store \\u0000 in a text")
    return value


def text_of(value: Any) -> str:
    """As JSON, for PostgreSQL to store."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise Problem(422, "validation", "payload: a number is too large") from None


def canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _measure(body: bytes) -> None:
    """Depth and number of values, before anything is built of them."""
    if len(body) < DEEPEST:
        return
    brackets = _STRINGS.sub(b"", body)
    if brackets.count(b",") + brackets.count(b"[") + brackets.count(b"{") > NODES:
        raise Problem(413, "payload-too-large", f"the body has more than {NODES} values")
    depth = 0
    for byte in re.findall(rb"[\[\]{}]", brackets):
        depth += 1 if byte in b"[{" else -1
        if depth > DEEPEST:
            raise Problem(400, "invalid-json", f"the body is nested deeper than {DEEPEST} levels")


def _with_nul(value: Any) -> list[str] | None:
    """Where."""
    if isinstance(value, str):
        return [] if "\0" in value else None
    items: Any = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    for name, each in items:
        if isinstance(name, str) and "\0" in name:
            return []
        if (place := _with_nul(each)) is not None:
            return [str(name), *place]
    return None


def _too_large() -> Problem:
    return Problem(413, "payload-too-large", "the body is larger than 1 MiB", headers={"connection": "close"})
