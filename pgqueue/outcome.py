"""From what a handler returned or raised to what happens with its job. Pure: no clock, no database."""

from __future__ import annotations

import copyreg
import json
import random
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

ERROR_LIMIT = 4_000
TRACEBACK_LIMIT = 32_000
RESULT_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True)
class Retry:
    """How often a failing job is tried, and how long it waits in between: base, 2 base, 4 base …, plus jitter."""

    max_attempts: int = 5
    base: float = 1.0
    cap: float = 60.0
    jitter: float = 1.0
    give_up_on: tuple[type[BaseException], ...] = ()
    """Errors after which no other attempt makes sense."""

    def __post_init__(self) -> None:
        if not 1 <= self.max_attempts <= 1000:
            raise ValueError("Retry: max_attempts must be between 1 and 1000")
        if self.base < 0 or self.cap < 0 or self.jitter < 0:
            raise ValueError("Retry: base, cap and jitter must not be negative")

    def delay(self, attempt: int) -> float:
        """Seconds to wait after this attempt (the first is 1) has failed."""
        # Beyond 2^20 times the base every cap is reached, and 2^1000 would overflow.
        return min(self.base * float(2 ** min(attempt - 1, 20)), self.cap) + random.uniform(0, self.jitter)


@dataclass(frozen=True, slots=True)
class Snooze:
    """Return it from a handler: run this job again later, without spending an attempt."""

    delay: float | timedelta

    def seconds(self) -> float:
        return seconds(self.delay)


class JobSignal(Exception):
    """The base of what a handler raises to steer its job; none of it is a failure of pgqueue."""


class RetryLater(JobSignal):
    """This attempt failed; try again after so many seconds instead of the usual backoff."""

    def __init__(self, delay: float | timedelta, message: str = "") -> None:
        super().__init__(message or "the handler asked to be tried again later")
        self.delay = seconds(delay)

    def __reduce__(self) -> Any:
        # Not by __init__, whose arguments are not what is kept; those of subclasses may be any.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class GiveUp(JobSignal):
    """This job cannot succeed: to the dead letter queue at once, whatever attempts are left."""


class InDoubt(JobSignal):
    """Nobody knows whether the effect happened: to the dead letter queue, for an operator to resolve."""


class JobCancelled(JobSignal):
    """Raised by ctx.check() when somebody cancelled the job."""


class JobTimeout(JobSignal):
    """The attempt ran over its timeout."""


class JobAbandoned(JobSignal):
    """Raised by ctx.check() when the worker stops, or has lost the lease: end quietly, the job runs again elsewhere."""


class NoConnection(JobSignal):
    """Raised by ctx.transaction() when there is no connection to be had: the job is put off for a moment, uncharged;
    one that is at_most_once is in doubt, because nobody knows what it did before."""


class Undecodable(Exception):
    """The payload is not what the handler takes; no other attempt will change that."""


class BadResult(Exception):
    """The handler returned something that cannot be stored as JSON; no other attempt will change that."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What goes into the attempt's row."""

    reason: str
    delay: float | None
    """Seconds until the next attempt; None: no other attempt."""
    error_type: str
    error: str
    traceback: str | None


FINAL: dict[type[BaseException], str] = {
    GiveUp: "gave_up",
    InDoubt: "in_doubt",
    Undecodable: "undecodable",
    BadResult: "bad_result",
}


def failure(error: BaseException, retry: Retry, attempt: int) -> Failure:
    """What becomes of this attempt (the first is 1), which ended with this error."""
    reason, delay = "error", None
    if (final := next((why for kind, why in FINAL.items() if isinstance(error, kind)), None)) is not None:
        reason = final
    elif isinstance(error, RetryLater):
        delay = seconds(error.delay)
    elif isinstance(error, retry.give_up_on):
        reason = "gave_up"
    else:
        reason = "timeout" if isinstance(error, JobTimeout) else "error"
        delay = retry.delay(attempt)
    kind = type(error)
    plain = kind.__module__ == "builtins" or kind.__module__.startswith("pgqueue.")
    told = kind.__name__ if plain else f"{kind.__module__}.{kind.__qualname__}"
    trace = (
        None if isinstance(error, JobSignal | Undecodable | BadResult) else "".join(traceback.format_exception(error))
    )
    return Failure(
        reason, delay, clean(told, 200), clean(said(error), ERROR_LIMIT), trace and clean(trace, TRACEBACK_LIMIT)
    )


def said(error: BaseException) -> str:
    """The error's own words; a __str__ that raises must not stop the job from ending."""
    try:
        return str(error) or type(error).__name__
    except BaseException:
        return f"{type(error).__name__} (its message cannot be read)"


def clean(text: str, limit: int) -> str:
    """Text that PostgreSQL can store: no NUL, no lone surrogates, not endless."""
    text = text.replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= limit else f"{text[: limit // 2]} … {text[-(limit // 2) :]}"


def encode_result(value: Any, default: Callable[[Any], Any] | None = None) -> str | None:
    """The result as JSON text that PostgreSQL can store."""
    if value is None:
        return None
    try:
        text = dumps(value, default)
        if len(text.encode("utf-8")) > RESULT_LIMIT:
            raise ValueError("it is larger than 1 MiB: store it elsewhere and return a reference")
    except (TypeError, ValueError, RecursionError) as error:
        raise BadResult(f"the result cannot be stored as JSON: {error}") from error
    return text


_STRICT: dict[str, Any] = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
_encoder = json.JSONEncoder(**_STRICT)


def dumps(value: Any, default: Callable[[Any], Any] | None = None) -> str:
    """JSON text that PostgreSQL can store; TypeError, ValueError or RecursionError say why there is none."""
    encoder = _encoder if default is None else json.JSONEncoder(**_STRICT, default=default)
    text = encoder.encode(value)
    if "\\u0000" in text and _NUL.search(text):
        raise ValueError("a NUL character cannot be stored")
    text.encode("utf-8")  # a lone surrogate cannot
    return text


# Not a backslash, itself escaped, before the letters u0000.
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


def result_text(value: Any) -> str | None:
    """What a handler returned, as JSON text; what is no JSON by itself (dates, models …) as pydantic writes it."""
    if value is None:
        return None
    from pydantic_core import to_jsonable_python

    try:
        return encode_result(value, to_jsonable_python)
    except BadResult as error:
        if not isinstance(error.__cause__, TypeError):
            raise
    # A dict with dates or the like as its keys.
    try:
        return encode_result(to_jsonable_python(value))
    except (ValueError, RecursionError) as error:
        raise BadResult(f"the result cannot be stored as JSON: {error}") from error


def seconds(delay: float | timedelta) -> float:
    return delay.total_seconds() if isinstance(delay, timedelta) else float(delay)
