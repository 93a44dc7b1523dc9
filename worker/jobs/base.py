"""What the built-in types share: their app, the settings, and how they read a payload that may be any JSON."""

import json
import random
from functools import cache
from typing import Any

from pgqueue import GiveUp, PgQueue
from pgqueue.settings import Settings

app = PgQueue()


@cache
def settings() -> Settings:
    """Read when the first job needs them: the API imports these types, too, and sends no mail."""
    return Settings.from_env()


def refuse_invalid(payload: Any) -> None:
    """A failure to order: dashboards, retries and the dead letter queue can be tried out with it."""
    # The text has no character that JSON would escape.
    if "invalid_job" in json.dumps(payload, ensure_ascii=False):
        raise ValueError("Invalid job content")


def member(payload: Any, name: str) -> Any:
    """A member of the payload, if that is an object and has one."""
    return payload.get(name) if isinstance(payload, dict) else None


def number(payload: Any, name: str, usual: tuple[int, int], limit: int) -> int:
    """The payload's own number, else one of the usual."""
    given = member(payload, name)
    if given is None:
        return random.randint(*usual)
    if type(given) is not int or not 1 <= given <= limit:
        raise GiveUp(f"{name} must be a whole number from 1 to {limit}")
    return given
