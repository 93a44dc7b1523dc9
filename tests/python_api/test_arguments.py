"""From Python values to JSON and back, and what cannot make the way."""

import json
import timeit
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from pgqueue import Context, InvalidJob, PgQueue, Snooze
from pgqueue.outcome import BadResult, Undecodable

app = PgQueue("postgresql://nobody@127.0.0.1:1/nothing")


class Colour(Enum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


@dataclass
class Point:
    x: int
    when: datetime


class Person(BaseModel):
    name: str = Field(alias="Name")
    born: date


class Strict(BaseModel):
    model_config = ConfigDict(strict=True)
    when: datetime
    id: UUID


class Pair(NamedTuple):
    a: int
    b: str


class Address(TypedDict):
    street: str


NOW = datetime(2030, 1, 2, 3, 4, 5, 678, UTC)
ID = UUID("12345678-1234-5678-1234-567812345678")
VALUES: list[tuple[Any, Any]] = [
    (int, 10**400),
    (int, -(2**63) - 1),
    (float, 0.1),
    (float, 1e300),
    (bool, True),
    (str, "ü☃ \\u0000 \\ ' \" \x01"),
    (bytes, b"abc"),
    (datetime, NOW),
    (date, date(2030, 1, 2)),
    (time, time(1, 2, 3)),
    (timedelta, timedelta(days=1, microseconds=3)),
    (UUID, ID),
    (Decimal, Decimal("1.500")),
    (Decimal, Decimal("123456789012345678901234567890.123456789")),
    (Colour, Colour.RED),
    (Level, Level.HIGH),
    (Path, Path("/a/b")),
    (Point, Point(1, NOW)),
    (Person, Person(Name="x", born=date(2000, 1, 1))),
    (Strict, Strict(when=NOW, id=ID)),
    (Pair, Pair(1, "x")),
    (Address, {"street": "x"}),
    (list[Point], [Point(1, NOW), Point(2, NOW)]),
    (dict[UUID, Decimal], {ID: Decimal("1.1")}),
    (dict[int, int], {1: 2}),
    (tuple[int, str], (1, "x")),
    (set[int], {1, 2, 3}),
    (frozenset[str], frozenset({"a"})),
    (int | None, None),
    (Literal["a", "b"], "b"),
    (Any, {"a": [1, None, {"b": "c"}]}),
    (object, [1]),
]


@pytest.mark.parametrize(("hint", "value"), VALUES, ids=lambda each: str(each)[:40])
def test_arguments_and_results_come_back_as_they_were(hint: Any, value: Any) -> None:
    async def handler(ctx: Context, argument: Any, *, after: int = 3) -> Any: ...

    def whole(payload: Any) -> Any: ...

    handler.__annotations__ |= {"argument": hint, "return": hint | Snooze}
    whole.__annotations__["payload"] = hint
    by_name, as_payload = PgQueue().job(handler), PgQueue().job(whole)

    text = by_name.bind(argument=value).new_job.payload
    payload, arguments = by_name.decode(text)
    assert arguments == {"argument": value}
    assert type(arguments["argument"]) is type(value)
    assert payload == json.loads(text)
    assert as_payload.decode(as_payload.bind(value).new_job.payload)[1] == {"payload": value}

    result = by_name.encode_result(value)
    if result is not None:
        back = by_name.arguments.decode_result(result)
        assert back == value
        assert type(back) is type(value)


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner) | st.dictionaries(texts, inner),
    max_leaves=10,
)


@app.job("whatever")
def whatever(payload: Any) -> None: ...


@given(json_values)
def test_any_json_is_a_payload(value: Any) -> None:
    assert whatever.decode(whatever.bind(value).new_job.payload) == (value, {"payload": value})


@app.job("send")
async def send(
    ctx: Context, to: str, n: Annotated[int, Field(gt=0)] = 1, f: float = 0.0, *, urgent: bool = False
) -> None: ...


@app.job("open")
def open_handler(a: int, **others: Any) -> None: ...


@app.job("empty")
async def empty(ctx: Context) -> None: ...


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{}", "to: is missing"),
        ('{"to": "a", "too": 1}', "too: is unexpected"),
        ('{"to": 1}', "to: input should be a valid string"),
        ('{"to": "a", "n": 0}', "n: input should be greater than 0"),
        ('{"to": "a", "n": "x"}', "n: input should be a valid integer"),
        ('{"to": "a", "n": 1.5}', "n: input should be a valid integer, got a number with a fractional part"),
        ('{"to": "a", "urgent": {}, "n": []}', "n: .*; urgent: input should be a valid boolean"),
        ('{"to": "a", "f": 1e400}', "a number that cannot be read: 1e400 is too large"),
        ('{"to": "a", "f": -1e400}', "a number that cannot be read: -1e400 is too large"),
        ('{"to": "a", "f": 1' + "0" * 400 + "}", "f: input should be a valid number"),
        ('{"to": "a", "n": 1' + "0" * 5000 + "}", "a number that cannot be read: Exceeds the limit"),
        ('{"to": "a", "f": NaN}', "a number that cannot be read: NaN is not JSON"),
        ("[1]", "input should be a valid dictionary"),
        ('"text"', "input should be a valid dictionary"),
        ("null", "input should be a valid dictionary"),
        ('{"to": ' + DEEP + "}", "nested too deeply"),
        ('{"to": ', "is not JSON"),
    ],
    ids=lambda each: each[:30],
)
def test_payloads_that_cannot_be_read(text: str, why: str) -> None:
    with pytest.raises(Undecodable, match=why):
        send.decode(text)


def test_a_payload_that_cannot_be_read_even_as_a_whole() -> None:
    for text in (DEEP, "1e400", '[{"a": 1e999}]', "1" * 5000):
        with pytest.raises(Undecodable):
            whatever.decode(text)


def test_arguments() -> None:
    assert send.decode('{"to": "a"}') == ({"to": "a"}, {"to": "a"})
    assert json.loads(send.bind("a", 2, urgent=True).new_job.payload) == {"to": "a", "n": 2, "urgent": True}
    assert open_handler.decode('{"a": 1, "b": [2]}')[1] == {"a": 1, "b": [2]}
    assert json.loads(open_handler.bind(1, b=NOW).new_job.payload) == {"a": 1, "b": "2030-01-02T03:04:05.000678Z"}
    assert empty.decode("{}") == ({}, {})
    assert empty.bind().new_job.payload == "{}"
    with pytest.raises(Undecodable, match="x: is unexpected"):
        empty.decode('{"x": 1}')


@pytest.mark.parametrize("text", ['"text"', "null", "3", "[1, 2]", '{"a": 1}', "{}", "true"])
def test_a_whole_payload_is_any_json(text: str) -> None:
    assert whatever.decode(text) == (json.loads(text), {"payload": json.loads(text)})


class Odd(BaseModel):
    """Writes itself in a way that it cannot read."""

    x: int = Field(validation_alias="in", serialization_alias="out")


def test_wrong_calls() -> None:
    wrong: Any = send
    loop: list[Any] = []
    loop.append(loop)
    for call, why in [
        (lambda: wrong.bind(), "send: missing a required argument: 'to'"),
        (lambda: wrong.bind("a", too=1), "send: got an unexpected keyword argument 'too'"),
        (lambda: wrong.bind("a", 1, 2.0, True), "send: too many positional arguments"),
        (lambda: wrong.bind(3), "send: to: input should be a valid string"),
        (lambda: wrong.bind("a", n=-1), "send: n: input should be greater than 0"),
        (lambda: wrong.bind("a\0b"), "send: the arguments cannot be stored as JSON: a NUL character"),
        (lambda: wrong.bind("\ud800"), "send: to: .*surrogate|send: the arguments cannot be stored.*surrogate"),
        (lambda: wrong.bind("a", f=float("inf")), "send: the arguments cannot be stored as JSON: Out of range"),
        (lambda: wrong.bind("a", f=float("nan")), "send: the arguments cannot be stored as JSON: Out of range"),
        (lambda: whatever.bind(object()), "whatever: the arguments cannot be stored as JSON: Unable to serialize"),
        (lambda: whatever.bind(loop), "whatever: the arguments cannot be stored as JSON: Circular reference"),
        (lambda: whatever.bind(10**5000), "whatever: the arguments cannot be stored as JSON: Exceeds the limit"),
    ]:
        with pytest.raises(InvalidJob, match=why):
            call()


def test_what_the_handler_could_not_read_is_not_stored() -> None:
    def odd(x: Odd) -> None: ...

    with pytest.raises(InvalidJob, match=r"odd: the handler could not read its own arguments back: x.in: is missing"):
        app.job(odd).bind(Odd.model_validate({"in": 1}))


def test_aliases() -> None:
    def total(
        numbers: Annotated[list[int], Field(validation_alias=AliasChoices("numbers", "array"))],
        of: Annotated[int, Field(alias="from")] = 0,
    ) -> None: ...

    job_type = PgQueue().job(total)
    assert job_type.decode('{"array": [1], "from": 2}')[1] == {"numbers": [1], "of": 2}
    assert job_type.decode('{"numbers": [1], "of": 2}')[1] == {"numbers": [1], "of": 2}
    assert job_type.decode(job_type.bind([1], of=2).new_job.payload)[1] == {"numbers": [1], "of": 2}
    assert list(job_type.json_schema()["properties"]) == ["numbers", "from"]


def broken(value: Any) -> Any:
    raise LookupError("not mine")


def test_a_validator_that_breaks() -> None:
    def handler(x: Annotated[int, AfterValidator(broken)]) -> None: ...

    job_type = PgQueue().job(handler)
    with pytest.raises(Undecodable, match="LookupError while the payload was checked: not mine"):
        job_type.decode('{"x": 1}')
    with pytest.raises(InvalidJob, match="handler: the arguments cannot be stored as JSON: not mine"):
        job_type.bind(1)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, None),
        ({"a": NOW, "b": ID, "c": Decimal("1.5")}, f'{{"a":"2030-01-02T03:04:05.000678Z","b":"{ID}","c":"1.5"}}'),
        (Point(1, NOW), '{"x":1,"when":"2030-01-02T03:04:05.000678Z"}'),
        ([Person(Name="x", born=date(2000, 1, 1))], '[{"Name":"x","born":"2000-01-01"}]'),
        ({ID: 1, NOW: 2}, f'{{"{ID}":1,"2030-01-02T03:04:05.000678Z":2}}'),
        ({1, 2}, "[1,2]"),
        (Colour.RED, '"red"'),
        (10**300, "1" + "0" * 300),
    ],
)
def test_results(value: Any, text: str | None) -> None:
    assert empty.encode_result(value) == text


@pytest.mark.parametrize(
    "value", [float("nan"), {"a": [float("inf")]}, "a\0", object(), {"a": object()}, {object(): 1}, "x" * (1 << 21)]
)
def test_results_that_cannot_be_stored(value: Any) -> None:
    with pytest.raises(BadResult, match="the result cannot be stored as JSON"):
        empty.encode_result(value)


def test_a_result_of_another_shape_is_told() -> None:
    def count() -> int:
        return 1

    job_type = app.job(count)
    assert job_type.arguments.decode_result("3") == 3
    with pytest.raises(
        Undecodable, match="the result of count is not what its annotation says: input should be a valid"
    ):
        job_type.arguments.decode_result('"x"')


def test_a_result_without_a_json_form_comes_as_json() -> None:
    def handler() -> "pytest.Config": ...  # type: ignore[empty-body]

    assert PgQueue().job(handler).arguments.decode_result('{"a": 1}') == {"a": 1}


def test_decoding_is_quick() -> None:
    # Far above what it takes, so that a busy machine does not matter.
    assert min(timeit.repeat(lambda: empty.decode("{}"), number=1000, repeat=20)) / 1000 < 1e-6
    assert min(timeit.repeat(lambda: send.decode('{"to": "a"}'), number=1000, repeat=20)) / 1000 < 20e-6
    assert min(timeit.repeat(lambda: empty.encode_result(None), number=1000, repeat=20)) / 1000 < 1e-6
