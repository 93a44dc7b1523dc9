"""A proxy before PostgreSQL that cuts connections by chance, quick enough for a storm: it looks for statements in what
passes by, and leaves the reading of messages to the one in tests/once."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

When = Literal["before", "after"]
"""The server has not had the statement; it has answered, and the client does not hear it."""


OFTEN = 0.4
"""The chance of being cut, for what whole workers send and was not cut often enough yet: they pause after each cut."""


@dataclass
class Rule:
    statement: bytes
    chance: float
    """Of being cut."""
    name: str
    aim: int
    """So many cuts of each kind are wanted: until then it is cut often, however rarely it comes."""
    often: float = OFTEN
    before: int = 0
    after: int = 0

    @property
    def lacks(self) -> bool:
        return min(self.before, self.after) < self.aim

    def fate(self, random: random.Random) -> When | None:
        if random.random() >= (max(self.chance, self.often) if self.lacks else self.chance):
            return None
        if self.before <= self.after:
            self.before += 1
            return "before"
        self.after += 1
        return "after"


@dataclass
class Ambush:
    statement: bytes
    when: When | None
    strike: Callable[[], None]
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    link: "Link | None" = None
    data: bytes = b""

    def let_go(self) -> None:
        """On to the server; the client hears nothing of it."""
        assert self.link is not None
        assert self.link.server is not None
        self.link.deaf = True
        self.link.server.write(self.data)


class Wire:
    def __init__(self, dsn: str, random: random.Random) -> None:
        self.target = urlsplit(dsn)
        self.random = random
        self.rules: list[Rule] = []
        self.cuts: Counter[str] = Counter()
        """How often it cut what: "COMMIT before", "COMMIT after"."""
        self.delay = 0.0
        """Seconds that everything takes, each way."""
        self.frozen = False
        """Whether everything is swallowed, and no connection ends: as if the cable were out."""
        self.links: set[Link] = set()
        self.opened: list[tuple[float, str]] = []
        """When somebody wanted a connection, and the application_name, of those who do not ask for encryption first."""
        self.last: tuple[str, When] | None = None
        """What it cut last."""
        self._ambush: Ambush | None = None

    @property
    def dsn(self) -> str:
        address = f"{self.target.username}:{self.target.password}@127.0.0.1:{self.port}"
        return self.target._replace(netloc=address).geturl()

    def cut(self, statement: bytes, chance: float, name: str = "COMMIT", aim: int = 0, often: float = OFTEN) -> Rule:
        """From now on, half of the cuts before it reaches the server and half after its answer."""
        self.rules.append(rule := Rule(statement, chance, name, aim, often))
        return rule

    def ambush(self, statement: bytes, when: When | None, strike: Callable[[], None]) -> "Ambush":
        """The next such statement is cut before or after, and something happens at that very moment; without a `when`,
        the statement waits here until it is let go."""
        self._ambush = Ambush(statement, when, strike)
        return self._ambush

    def ambushed(self, data: bytes) -> "Ambush | None":
        if self._ambush is None or self._ambush.statement not in data:
            return None
        found, self._ambush = self._ambush, None
        return found

    def cut_all(self) -> None:
        for link in list(self.links):
            link.abort()

    def fate(self, data: bytes) -> When | None:
        for rule in self.rules:
            if rule.statement in data and (when := rule.fate(self.random)) is not None:
                self.cuts[f"{rule.name} {when}"] += 1
                self.last = (rule.name, when)
                return when
        return None

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Wire"]:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Link(self), "127.0.0.1", 0, backlog=512)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            self.cut_all()
            await asyncio.sleep(0)


class Link(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.server: asyncio.Transport | None = None
        self.early: list[bytes] = []
        self.deaf = False
        """Whether the client hears no more."""
        self.ambush: Ambush | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.client: asyncio.Transport = transport  # type: ignore[assignment]
        self.wire.links.add(self)
        self.connecting: asyncio.Task[None] | None = None

    async def _connect(self) -> None:
        target = self.wire.target
        try:
            loop = asyncio.get_running_loop()
            self.server, _ = await loop.create_connection(lambda: Back(self), target.hostname, target.port)
        except OSError:
            self.client.abort()
            return
        if self.client.is_closing():
            self.server.abort()
        for data in self.early:
            self.server.write(data)
        self.early = []

    def data_received(self, data: bytes) -> None:
        if self.wire.frozen:
            return
        if self.connecting is None:
            self.wire.opened.append((time.monotonic(), application_name(data)))
            self.connecting = asyncio.get_running_loop().create_task(self._connect())
        if (ambush := self.wire.ambushed(data)) is not None:
            self.ambush, ambush.link, ambush.data = ambush, self, data
            if ambush.when is None:
                ambush.reached.set()
                return
        fate = ambush.when if ambush is not None else self.wire.fate(data) if self.wire.rules else None
        if fate == "before":
            self.abort()
            return
        self.deaf = self.deaf or fate == "after"
        if self.server is None:
            self.early.append(data)
        else:
            self.later(self.server, data)

    def answered(self, data: bytes) -> None:
        if self.wire.frozen:
            return
        if not self.deaf:
            self.later(self.client, data)
        elif data[-6:-5] == b"Z":  # what ends an answer says that the server is ready again
            self.abort()

    def later(self, transport: asyncio.Transport, data: bytes) -> None:
        if self.wire.delay:
            asyncio.get_running_loop().call_later(self.wire.delay, write, transport, data)
        else:
            transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.wire.links.discard(self)
        if self.server is not None:
            self.server.abort()

    def abort(self) -> None:
        if self.ambush is not None and not self.ambush.reached.is_set():
            self.ambush.strike()
            self.ambush.reached.set()
        self.client.abort()


def application_name(first: bytes) -> str:
    words = first[8:].split(b"\0")
    return words[words.index(b"application_name") + 1].decode() if b"application_name" in words else ""


def write(transport: asyncio.Transport, data: bytes) -> None:
    if not transport.is_closing():
        transport.write(data)


class Back(asyncio.Protocol):
    """Its other half."""

    def __init__(self, link: Link) -> None:
        self.link = link

    def data_received(self, data: bytes) -> None:
        self.link.answered(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.link.wire.frozen:
            self.link.abort()
