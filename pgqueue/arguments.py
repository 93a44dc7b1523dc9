"""A handler's arguments: from its signature to the rules for its payload, and from JSON to its types and back."""

from __future__ import annotations

import inspect
import json
import math
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NoReturn, NotRequired, Union, get_args, get_origin, get_type_hints

from pydantic import (
    ConfigDict,
    PydanticSchemaGenerationError,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
    with_config,
)
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python
from typing_extensions import TypedDict

from pgqueue.context import Context
from pgqueue.errors import InvalidJob
from pgqueue.outcome import Snooze, Undecodable, dumps

WHOLE = "payload"
"""A handler whose only argument has this name takes any JSON, not only an object."""


class Arguments:
    """What a handler takes, besides its Context."""

    def __init__(self, fn: Callable[..., Any], type: str) -> None:
        self.type = type
        hints = _hints(fn)
        signature = inspect.signature(fn)
        self.takes_context, parameters = _without_context(fn, list(signature.parameters.values()), hints)
        for parameter in parameters:
            if parameter.kind is parameter.VAR_POSITIONAL:
                raise TypeError(
                    f"{type}: *{parameter.name} has no names for the payload's values; write them as arguments"
                )
            if isinstance(parameter.default, FieldInfo):
                raise TypeError(f"{type}: write {parameter.name}: Annotated[…, Field(…)], and its default after it")
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise TypeError(
                    f"{type}: {parameter.name} is positional-only, but arguments come by name from the payload"
                )
        self.signature = signature.replace(parameters=parameters)
        self.names = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
        self.whole = [parameter.name for parameter in parameters] == [WHOLE]
        self._named = set(self.names)
        self._rest = next((each.name for each in parameters if each.kind is each.VAR_KEYWORD), None)
        """The name of the handler's **kwargs."""
        self._empty = not parameters
        self.defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        self._returns = hints.get("return", Any)
        try:
            self._adapter: TypeAdapter[Any] = TypeAdapter(
                hints.get(WHOLE, Any) if self.whole else _object(type, parameters, hints)
            )
        except (PydanticSchemaGenerationError, PydanticUserError) as error:
            raise TypeError(
                f"{type}: {_without_json(parameters, hints)} has no JSON form that pydantic knows"
            ) from error
        self._validate = self._adapter.validator.validate_python
        self._result: TypeAdapter[Any] | None = None

    def encode(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """The payload for this call, once its arguments have been checked."""
        given: Any = dict(kwargs)
        if args or given.keys() != self._named:  # Signature.bind is slow, but knows defaults and says what is wrong
            try:
                given = self.signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                raise InvalidJob(f"{self.type}: {error}") from None
        if self.whole:
            given = given.get(WHOLE, self.defaults.get(WHOLE))
        elif self._rest in given:
            given |= given.pop(self._rest)
        try:
            text = dumps(self._adapter.serializer.to_python(self._validate(given), mode="json", by_alias=True))
        except ValidationError as error:
            raise InvalidJob(f"{self.type}: {told(error)}") from error
        except Exception as error:
            raise InvalidJob(f"{self.type}: the arguments cannot be stored as JSON: {error}") from error
        try:
            self.decode(text)
        except Undecodable as error:
            raise InvalidJob(f"{self.type}: the handler could not read its own arguments back: {error}") from error
        return text

    def decode(self, text: str) -> tuple[Any, dict[str, Any]]:
        """The payload, and the handler's keyword arguments."""
        if self._empty and text == "{}":
            return {}, {}
        payload = loads(text)
        try:
            checked = self._validate(payload)
        except ValidationError as error:
            checked = self._as_json(text, error)
        except RecursionError as error:
            raise Undecodable("the payload is nested too deeply") from error
        except Exception as error:
            # From a validator of the handler's own types.
            raise Undecodable(f"{type(error).__name__} while the payload was checked: {error}") from error
        return payload, {WHOLE: checked} if self.whole else checked

    def _as_json(self, text: str, first: ValidationError) -> Any:
        # Strict types take from JSON what they refuse as Python values: a date, for one, from its text.
        try:
            return _validate_json(self._adapter, text)
        except Exception:
            raise Undecodable(told(first)) from first

    def values(self, arguments: Mapping[str, Any], names: Sequence[str]) -> list[str]:
        """These of the decoded arguments, or their defaults, each as JSON text in which equal values look equal."""
        try:
            if self.whole:
                dumped = {WHOLE: self._adapter.dump_python(arguments[WHOLE], mode="json", warnings=False)}
            else:
                given = {**self.defaults, **arguments}
                dumped = self._adapter.dump_python(given, mode="json", by_alias=False, warnings=False)
            return [json.dumps(dumped.get(name), sort_keys=True) for name in names]
        except Exception as error:
            raise Undecodable(f"{type(error).__name__} while the arguments were compared: {error}") from error

    def decode_result(self, text: str) -> Any:
        """A stored result as the handler's annotation has it."""
        if self._result is None:
            try:
                self._result = TypeAdapter(_without_snooze(self._returns))
            except (PydanticSchemaGenerationError, PydanticUserError):
                self._result = TypeAdapter(Any)
        value = loads(text)
        try:
            return self._result.validate_python(value)
        except ValidationError as error:
            try:
                return _validate_json(self._result, text)
            except ValueError:
                raise Undecodable(
                    f"the result of {self.type} is not what its annotation says: {told(error)}"
                ) from error

    def json_schema(self) -> dict[str, Any]:
        schema = self._adapter.json_schema()
        if not self.whole:
            for name, default in self.defaults.items():
                if name in schema["properties"]:  # not under an alias
                    schema["properties"][name]["default"] = to_jsonable_python(default, fallback=repr)
        return schema


def loads(text: str) -> Any:
    """JSON that strangers stored: PostgreSQL's JSON can be deeper and its numbers larger than Python's."""
    try:
        return _decoder.decode(text)
    except RecursionError as error:
        raise Undecodable("the payload is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise Undecodable(f"the payload is not JSON: {error}") from error
    except ValueError as error:
        raise Undecodable(f"the payload has a number that cannot be read: {error}") from error


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"{text} is too large")
    return value


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _float_sized(text: str) -> int:
    if len(text) > 300:
        raise ValueError("pydantic reads an integer that no float can hold as infinity")
    return int(text)


def _validate_json(adapter: TypeAdapter[Any], text: str) -> Any:
    _careful_decoder.decode(text)
    return adapter.validate_json(text)


_decoder = json.JSONDecoder(parse_float=_finite, parse_constant=_no_constant)
_careful_decoder = json.JSONDecoder(parse_float=_finite, parse_constant=_no_constant, parse_int=_float_sized)


def told(error: ValidationError) -> str:
    """pydantic's errors in one line, each with the argument's name."""
    lines = []
    for each in error.errors(include_url=False, include_context=False, include_input=False)[:5]:
        place = ".".join(map(str, each["loc"]))
        match each["type"]:
            case "missing":
                said = "is missing"
            case "extra_forbidden":
                said = "is unexpected"
            case _:
                said = each["msg"][:1].lower() + each["msg"][1:]
        lines.append(f"{place}: {said}" if place else said)
    return "; ".join(lines)


def _hints(fn: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(fn, include_extras=True)
    except NameError:
        pass
    # The annotation is text, and what it names may be local to the function that defines the handler.
    frame = sys._getframe()
    while frame.f_back and frame.f_globals["__name__"] in ("pgqueue.arguments", "pgqueue.jobtype", "pgqueue.app"):
        frame = frame.f_back
    try:
        return get_type_hints(fn, localns=dict(frame.f_locals), include_extras=True)
    except NameError as error:
        raise TypeError(
            f"{fn.__qualname__}: an annotation cannot be read where the handler is defined: {error}"
        ) from error


def _without_context(
    fn: Callable[..., Any], parameters: list[inspect.Parameter], hints: dict[str, Any]
) -> tuple[bool, list[inspect.Parameter]]:
    for place, parameter in enumerate(parameters):
        hint = hints.get(parameter.name)
        if hint is Context or (place == 0 and hint is None and parameter.name == "ctx"):
            if place or parameter.kind is parameter.KEYWORD_ONLY:
                raise TypeError(f"{fn.__qualname__}: the Context must be the first argument, before the payload's")
            return True, parameters[1:]
    return False, parameters


def _without_json(parameters: list[inspect.Parameter], hints: dict[str, Any]) -> str:
    """Which of the arguments it is, for the error's sake."""
    for parameter in parameters:
        hint = hints.get(parameter.name, Any)
        try:
            TypeAdapter(hint)
        except (PydanticSchemaGenerationError, PydanticUserError):
            return f"{parameter.name}: {hint.__qualname__ if inspect.isclass(hint) else hint}"
    return "an argument's type"


def _object(type: str, parameters: list[inspect.Parameter], hints: dict[str, Any]) -> Any:
    """A TypedDict: unlike a model it has no names of its own that an argument could clash with."""
    fields: dict[str, Any] = {}
    extra: Any = "forbid"
    for parameter in parameters:
        hint = hints.get(parameter.name, Any)
        if parameter.kind is parameter.VAR_KEYWORD:
            extra = "allow"
        else:
            fields[parameter.name] = hint if parameter.default is parameter.empty else NotRequired[hint]
    return with_config(ConfigDict(extra=extra, validate_by_name=True, validate_by_alias=True))(TypedDict(type, fields))  # type: ignore[operator]


def _without_snooze(hint: Any) -> Any:
    if get_origin(hint) is Annotated:
        return hint
    if get_origin(hint) in (Union, types.UnionType):
        left = tuple(each for each in get_args(hint) if each is not Snooze)
        return Union[left] if left else Any  # noqa: UP007
    return Any if hint is Snooze else hint
