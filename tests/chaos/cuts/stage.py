"""One path behind a wire of its own, with somebody who goes it again and again until it was cut often enough."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import psycopg

from pgqueue.db import Connection, connect
from pgqueue.errors import PgQueueError
from pgqueue.sql import SQL
from pgqueue.worker.link import Link
from tests.chaos.lab import Ground, Lab
from tests.chaos.wire import Rule, Wire

COMMIT = "COMMIT"
OFTEN = 0.8
"""The chance of being cut, until it was often enough. Whoever goes a path has no time to pause."""


def head(name: str) -> bytes:
    """What a statement begins with, up to its first parameter, which tells it from the others."""
    if name == COMMIT:
        return b"COMMIT\0"
    return str(getattr(SQL, name)).partition("%(")[0].encode()[:100]


class Theatre:
    """Where the paths of one database are gone."""

    def __init__(self, lab: Lab, ground: Ground, aim: int) -> None:
        self.lab = lab
        self.ground = ground
        self.aim = aim
        """Cuts of each kind for each path."""
        self.stages: list[Stage] = []
        self.problems: list[str] = []

    async def stage(self, path: str, *statements: str, wire: Wire | None = None) -> Stage:
        """Cuts these statements, on a wire of their own unless told, and no more when it was often enough: those that
        come after them shall have their turn."""
        stage = Stage(path, self.ground, wire or await self.lab.wire(self.ground))
        aim = math.ceil(self.aim / max(1, len(statements)))
        stage.rules = [stage.wire.cut(head(name), 0, f"{path}: {name}", aim, OFTEN) for name in statements]
        self.stages.append(stage)
        return stage

    def expect(self, condition: object, problem: str) -> None:
        if not condition:
            self.problems.append(problem)

    def same(self, found: object, wanted: object, what: str) -> None:
        self.expect(found == wanted, f"{what}: {difference(found, wanted)}")

    def matrix(self) -> dict[str, list[int]]:
        """Path → cuts before the server had the statement, and after its answer."""
        found: dict[str, list[int]] = {}
        for stage in (stage for stage in self.stages if stage.rules):
            cuts = found.setdefault(stage.path, [0, 0])
            for rule in stage.rules:
                cuts[0] += rule.before
                cuts[1] += rule.after
        return found


class Stage:
    def __init__(self, path: str, ground: Ground, wire: Wire) -> None:
        self.path = path
        self.ground = ground
        self.wire = wire
        self.rules: list[Rule] = []

    @property
    def goes_on(self) -> bool:
        return any(rule.lacks for rule in self.rules)

    def link(self) -> Link:
        """A worker's, which has no time to pause."""
        return Link(self.wire.dsn, f"pgqueue-{self.path}", longest_pause=0.01)

    def happened(self, last: str) -> bool:
        """After an error: whether it took effect, which it does with this statement."""
        cut, self.wire.last = self.wire.last, None
        assert cut is not None, f"{self.path}: an error, and nothing was cut"
        return cut == (f"{self.path}: {last}", "after")

    @asynccontextmanager
    async def direct(self) -> AsyncIterator[Connection]:
        """A connection that nobody cuts, for what comes before."""
        async with await connect(self.ground.dsn) as conn:
            yield conn


def difference(found: Any, wanted: Any) -> str:
    if not (isinstance(found, dict) and isinstance(wanted, dict)):
        return f"{found}, not {wanted}"
    wrong = {key: (found.get(key), wanted.get(key)) for key in found.keys() | wanted.keys()}
    wrong = {key: pair for key, pair in wrong.items() if pair[0] != pair[1]}
    return f"{len(wrong)} of {len(wanted)} wrong (is, should be): {dict(list(wrong.items())[:5])}"


async def values(conn: Connection, query: str, *parameters: Any) -> list[Any]:
    return [row[0] for row in await (await conn.execute(query.encode(), parameters or None)).fetchall()]


def counted(rows: Iterable[dict[str, Any]]) -> dict[Any, int]:
    """From rows of two columns, the second a number; those with none are left out."""
    return {key: number for key, number in (row.values() for row in rows) if number}


def nonzero(numbers: Counter[Any]) -> dict[Any, int]:
    return {key: number for key, number in numbers.items() if number}


OUTAGES = (psycopg.Error, OSError, PgQueueError)
