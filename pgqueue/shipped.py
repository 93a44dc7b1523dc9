"""The job types that ship, as those see them who add jobs: names, and payloads that can be refused at the door."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, StrictFloat, StrictInt, StrictStr, ValidationError

from pgqueue.arguments import told
from pgqueue.errors import InvalidJob

Number = StrictInt | StrictFloat
Pixels = Annotated[StrictInt, Field(ge=1)]


class AddNumbers(BaseModel):
    model_config = ConfigDict(extra="forbid")
    x: Number
    y: Number


class ReverseString(BaseModel):
    model_config = ConfigDict(extra="forbid")
    text: StrictStr


class ResizeImage(BaseModel):
    model_config = ConfigDict(extra="forbid")
    url: StrictStr
    width: Pixels
    height: Pixels


class LargeArraySum(BaseModel):
    model_config = ConfigDict(extra="forbid")
    numbers: Annotated[list[Number], Field(validation_alias=AliasChoices("numbers", "array"))]


class WelcomeEmail(BaseModel):
    model_config = ConfigDict(extra="forbid")
    email: Annotated[StrictStr, Field(min_length=3, max_length=254, pattern=r"^[^\s@,;:<>()\[\]\\\"]+@[^\s@,;:<>()]+$")]
    name: Annotated[StrictStr, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")]


WELCOME = "send_welcome_email"
PAYLOADS: Mapping[str, type[BaseModel]] = {
    "add_numbers": AddNumbers,
    "reverse_string": ReverseString,
    "resize_image": ResizeImage,
    "large_array_sum": LargeArraySum,
    WELCOME: WelcomeEmail,
}
NAMES = frozenset({*PAYLOADS, "cpu_intensive", "io_intensive", "mixed_workload", "network_task", "default", "test_job"})
_CASELESS = {"add_numbers", "reverse_string", "resize_image", "large_array_sum"}


def snake_case(name: str) -> str:
    """AddNumbers as add_numbers."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def canonical(name: str) -> str:
    """The name of a type that ships, however it is written; other names stay as they are."""
    for each in (name.lower(), snake_case(name)):
        if each in NAMES:
            return each
    return name


def checked(type: str, payload: Any) -> Any:
    """The payload as its handler takes it, or InvalidJob. Types that do not ship here take any."""
    if type not in PAYLOADS:
        return payload
    if type in _CASELESS and isinstance(payload, dict):
        payload = {key.lower(): value for key, value in payload.items()}
    try:
        PAYLOADS[type].model_validate(payload)
    except ValidationError as error:
        raise InvalidJob(f"invalid payload for {type}: {told(error)}") from error
    return payload
