"""The scenarios: every module of the folder `scenarios` adds its own."""

import importlib
import pkgutil
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.chaos import scenarios

if TYPE_CHECKING:
    from tests.chaos.lab import Lab
    from tests.chaos.verdict import Verdict

Body = Callable[["Lab"], Awaitable["Verdict"]]


@dataclass(frozen=True)
class Scenario:
    name: str
    title: str
    """What is done."""
    invariant: str
    body: Body
    minute: bool
    """Whether it is cheap enough for the one-minute run."""
    alone: bool
    """Whether it wants the machine for itself; the others run beside each other."""
    named_only: bool
    """Whether it runs only when it is asked for by name."""
    budget: float
    """Seconds after which it has failed."""


_all: dict[str, Scenario] = {}


def scenario(
    name: str,
    title: str,
    *,
    invariant: str,
    minute: bool = False,
    alone: bool = False,
    named_only: bool = False,
    budget: float = 600,
) -> Callable[[Body], Body]:
    def register(body: Body) -> Body:
        assert name not in _all, f"there is a scenario {name} already"
        _all[name] = Scenario(name, title, invariant, body, minute, alone, named_only, budget)
        return body

    return register


def load() -> dict[str, Scenario]:
    """All of them, by name, in their natural order."""
    for module in pkgutil.iter_modules(scenarios.__path__):
        importlib.import_module(f"{scenarios.__name__}.{module.name}")
    return {name: _all[name] for name in sorted(_all, key=natural)}


def natural(name: str) -> list[int | str]:
    """C2 comes before C10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]
