"""Errors as RFC 9457 problems, with the member `error` beside for clients that look for that."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, Field, ValidationError
from starlette.responses import Response

TITLES = {
    "invalid-json": "The body is not JSON",
    "validation": "The request is not valid",
    "invalid-cursor": "The cursor is not valid",
    "unauthorized": "A valid token is needed",
    "forbidden": "The token does not allow this",
    "not-found": "There is no such thing",
    "method-not-allowed": "The method is not allowed here",
    "timeout": "The request took too long",
    "invalid-status": "The job's status does not allow this",
    "conflict": "This exists already",
    "idempotency-in-progress": "A request with this key is under way",
    "idempotency-key-reused": "This key belongs to another request",
    "precondition-failed": "The job has changed",
    "payload-too-large": "The body is too large",
    "unsupported-media-type": "The body is not application/json",
    "rate-limited": "Too many requests",
    "internal": "Something went wrong here",
    "unavailable": "The database does not answer",
}


class FieldError(BaseModel):
    pointer: str = Field(description="Where in the request, as a JSON pointer.")
    detail: str


class ProblemBody(BaseModel):
    """What went wrong, as RFC 9457 has it."""

    type: str
    title: str
    status: int
    detail: str
    error: str = Field(description="The detail once more, for clients that look here.")
    instance: str | None = None
    request_id: str | None = None
    errors: list[FieldError] | None = None


class Problem(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        kind: str,
        detail: str,
        *,
        errors: Sequence[Mapping[str, str]] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.kind = kind
        self.detail = detail
        self.errors = errors
        self.headers = dict(headers or {})

    def response(self, instance: str, request_id: str) -> Response:
        body: dict[str, Any] = {
            "type": f"urn:pgqueue:problem:{self.kind}",
            "title": TITLES[self.kind],
            "status": self.status,
            "detail": self.detail,
            "error": self.detail,
            "instance": instance,
            "request_id": request_id,
        }
        if self.errors:
            body["errors"] = list(self.errors)
        return Response(json.dumps(body), self.status, self.headers, "application/problem+json")


def invalid(error: ValidationError, status: int, where: str) -> Problem:
    """pydantic's errors, each with its place; never with the value, which may be a secret."""
    errors = [
        {"pointer": "/".join(["", *map(_escaped, each["loc"])]), "detail": each["msg"]}
        for each in error.errors(include_url=False, include_context=False, include_input=False)[:20]
    ]
    first = errors[0]
    place = first["pointer"].lstrip("/").replace("/", ".") or where
    return Problem(status, "validation", f"{place}: {first['detail']}", errors=errors)


def _escaped(part: int | str) -> str:
    return str(part)[:100].replace("~", "~0").replace("/", "~1")
