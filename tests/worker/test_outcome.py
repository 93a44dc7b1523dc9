"""From what a handler raised to what becomes of its job: pauses, reasons, and texts that can be stored."""

import math
import pickle
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgqueue.outcome import (
    ERROR_LIMIT,
    TRACEBACK_LIMIT,
    BadResult,
    GiveUp,
    JobTimeout,
    Retry,
    RetryLater,
    Snooze,
    Undecodable,
    clean,
    encode_result,
    failure,
)


@pytest.mark.parametrize(("attempt", "base"), [(1, 1), (2, 2), (3, 4), (4, 8), (5, 16), (6, 32), (7, 60), (8, 60)])
def test_pauses_double_up_to_a_cap_with_jitter(attempt: int, base: float) -> None:
    pauses = [Retry().delay(attempt) for _ in range(300)]
    assert base <= min(pauses) < base + 0.1
    assert base + 0.9 < max(pauses) <= base + 1


@given(attempt=st.integers(1, 1000), base=st.floats(0, 1e6), cap=st.floats(0, 1e6), jitter=st.floats(0, 1e3))
def test_every_pause_is_finite_and_within_its_bounds(attempt: int, base: float, cap: float, jitter: float) -> None:
    pause = Retry(base=base, cap=cap, jitter=jitter).delay(attempt)
    assert math.isfinite(pause)
    assert 0 <= pause <= cap + jitter


def test_the_thousandth_pause_is_like_any_other() -> None:
    assert 60 <= Retry(max_attempts=1000).delay(1000) <= 61


@pytest.mark.parametrize(
    "wrong", [{"max_attempts": 0}, {"max_attempts": 1001}, {"base": -1}, {"cap": -1}, {"jitter": -0.1}]
)
def test_a_rule_for_retries_that_makes_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Retry"):
        Retry(**wrong)


@pytest.mark.parametrize(
    ("error", "reason", "again"),
    [
        (ValueError("no"), "error", True),
        (KeyboardInterrupt(), "error", True),
        (JobTimeout("late"), "timeout", True),
        (TimeoutError("of its own"), "error", True),
        (RetryLater(7, "later"), "error", True),
        (GiveUp("never"), "gave_up", False),
        (KeyError("k"), "gave_up", False),
        (Undecodable("what?"), "undecodable", False),
        (BadResult("what?"), "bad_result", False),
    ],
)
def test_reasons(error: BaseException, reason: str, again: bool) -> None:
    what = failure(error, Retry(give_up_on=(LookupError,)), 1)
    assert (what.reason, what.delay is not None) == (reason, again)
    assert what.error


def test_a_handler_may_say_when() -> None:
    assert failure(RetryLater(7.5), Retry(), 3).delay == 7.5
    assert failure(RetryLater(timedelta(minutes=2)), Retry(), 3).delay == 120
    assert Snooze(timedelta(seconds=3)).seconds() == 3


class Busy(RetryLater):
    def __init__(self) -> None:
        super().__init__(3, "busy")


def test_when_survives_the_way_from_a_process() -> None:
    for error in (RetryLater(7.5, "not yet"), Busy()):
        error.add_note("where")
        back = pickle.loads(pickle.dumps(error))
        assert (type(back), back.delay, str(back), back.__notes__) == (type(error), error.delay, str(error), ["where"])


def test_errors_are_named_as_people_know_them() -> None:
    class Own(Exception):
        pass

    assert failure(ValueError("no"), Retry(), 1).error_type == "ValueError"
    assert failure(Own(), Retry(), 1).error_type.endswith("test_errors_are_named_as_people_know_them.<locals>.Own")
    assert failure(Own(), Retry(), 1).error == "Own"


def test_an_error_without_words() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert "cannot be read" in failure(Mute(), Retry(), 1).error


@given(st.text(st.characters()), st.integers(2, 50))
def test_cleaned_text_can_be_stored(text: str, limit: int) -> None:
    cleaned = clean(text, limit)
    assert "\0" not in cleaned
    assert len(cleaned) <= limit + 3
    cleaned.encode()


def test_endless_errors_are_cut_in_the_middle() -> None:
    def dig(depth: int) -> None:
        if depth:
            dig(depth - 1)
        raise ValueError("x" * 100_000 + "the end")

    try:
        dig(200)
    except ValueError as error:
        what = failure(error, Retry(), 1)
    assert len(what.error) <= ERROR_LIMIT + 3
    assert what.error.endswith("the end")
    assert what.traceback is not None
    assert len(what.traceback) <= TRACEBACK_LIMIT + 3
    assert what.traceback.startswith("Traceback")


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, {1: {2}}, "\0", {"a": "\0"}, "\ud800", object(), "x" * 1_100_000]
)
def test_results_that_cannot_be_stored(value: Any) -> None:
    with pytest.raises(BadResult, match="cannot be stored"):
        encode_result(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, None),
        ({"ä": [1, 2.5, None, True]}, '{"ä":[1,2.5,null,true]}'),
        ("\\u0000", '"\\\\u0000"'),
        (10**30, "1" + "0" * 30),
    ],
)
def test_results(value: Any, text: str | None) -> None:
    assert encode_result(value) == text
