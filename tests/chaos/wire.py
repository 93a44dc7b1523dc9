"""A proxy before PostgreSQL that cuts connections by chance, quick enough for a storm: it looks for statements in what
passes by, and leaves the reading of messages to the one in tests/once."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

When = Literal["before", "after"]
"""The server has not had the statement; it has answered, and the client does not hear it."""


@dataclass
class Rule:
    statement: bytes
    chance: float
    """Of being cut."""
    name: str


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

    @property
    def dsn(self) -> str:
        address = f"{self.target.username}:{self.target.password}@127.0.0.1:{self.port}"
        return self.target._replace(netloc=address).geturl()

    def cut(self, statement: bytes, chance: float, name: str = "COMMIT") -> None:
        """From now on, half of the cuts before it reaches the server and half after its answer."""
        self.rules.append(Rule(statement, chance, name))

    def cut_all(self) -> None:
        for link in list(self.links):
            link.abort()

    def fate(self, data: bytes) -> When | None:
        for rule in self.rules:
            if rule.statement in data and self.random.random() < rule.chance:
                when: When = "before" if self.random.random() < 0.5 else "after"
                self.cuts[f"{rule.name} {when}"] += 1
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

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.client: asyncio.Transport = transport  # type: ignore[assignment]
        self.wire.links.add(self)
        self.connecting = asyncio.get_running_loop().create_task(self._connect())

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
        fate = self.wire.fate(data) if self.wire.rules else None
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
            asyncio.get_running_loop().call_later(self.wire.delay, transport.write, data)
        else:
            transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.wire.links.discard(self)
        if self.server is not None:
            self.server.abort()

    def abort(self) -> None:
        self.client.abort()


class Back(asyncio.Protocol):
    """Its other half."""

    def __init__(self, link: Link) -> None:
        self.link = link

    def data_received(self, data: bytes) -> None:
        self.link.answered(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.link.wire.frozen:
            self.link.abort()
