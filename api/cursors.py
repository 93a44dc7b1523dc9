"""Cursors: where a page ended, signed, and good only for the filters that they were made with."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from datetime import datetime
from typing import Any

from pgqueue.api.problems import Problem

TAG = 16


class Cursors:
    def __init__(self, secret: str) -> None:
        self._key = hashlib.sha256(b"pgqueue cursors\0" + secret.encode()).digest()

    def encode(self, filters: Any, *position: Any) -> str:
        values = [value.isoformat() if isinstance(value, datetime) else value for value in position]
        body = json.dumps(values, separators=(",", ":")).encode()
        return base64.urlsafe_b64encode(self._tag(filters, body) + body).decode().rstrip("=")

    def decode(self, filters: Any, cursor: str) -> list[Any]:
        try:
            raw = base64.b64decode(cursor.encode("ascii") + b"=" * (-len(cursor) % 4), b"-_", validate=True)
        except ValueError:
            raw = b""
        tag, body = raw[:TAG], raw[TAG:]
        if not body or not hmac.compare_digest(tag, self._tag(filters, body)):
            raise Problem(400, "invalid-cursor", "cursor: it is not one of ours, or the filters have changed")
        values: list[Any] = json.loads(body)
        return values

    def _tag(self, filters: Any, body: bytes) -> bytes:
        # Length first: no filters and body can be read as other filters and another body.
        kept = json.dumps(filters, sort_keys=True, default=str).encode()
        return hmac.digest(self._key, len(kept).to_bytes(8) + kept + body, "sha256")[:TAG]
