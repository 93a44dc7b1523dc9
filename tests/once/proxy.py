"""A proxy before PostgreSQL that reads what clients send: it counts statements, and cuts connections at one of them."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Literal
from urllib.parse import quote, urlsplit

When = Literal["before", "during", "after"]
"""Before the statement reaches the server; when it has, and nobody waits for its answer; when the answer is there."""

REQUESTS_OF_ENCRYPTION = (80877103, 80877104)


class Proxy:
    def __init__(self, dsn: str) -> None:
        self._target = urlsplit(dsn)
        self._rule: tuple[str, When] | None = None
        self._links: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self.statements: list[str] = []
        """All that went through, in order."""
        self.cuts = 0
        self.reached = asyncio.Event()
        """Set when a statement that was to be cut has come."""

    def dsn(self, **settings: str) -> str:
        """Through the proxy; the settings are those of the sessions."""
        options = quote(" ".join(f"-c {name}={value}" for name, value in settings.items()))
        target = self._target
        address = f"{target.username}:{target.password}@127.0.0.1:{self.port}"
        return target._replace(netloc=address, query=f"options={options}" if settings else "").geturl()

    def cut(self, statement: str, when: When) -> None:
        """The next statement that begins with this text."""
        self._rule = (statement, when)
        self.reached.clear()

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Proxy"]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for link in list(self._links):
                link.cancel()
            await asyncio.gather(*self._links, return_exceptions=True)
            for writer in self._writers:
                await end(writer)
            await server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task that is cancelled before its first step could not close it.
        self._writers.append(writer)
        link = asyncio.create_task(self._serve(reader, writer))
        self._links.add(link)
        link.add_done_callback(self._links.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await Link(self, reader, writer).run(self._target.hostname or "", self._target.port or 0)

    def asked(self, statement: str) -> When | None:
        self.statements.append(statement)
        if self._rule is None or not statement.startswith(self._rule[0]):
            return None
        (_, when), self._rule = self._rule, None
        self.cuts += 1
        self.reached.set()
        return when


class Link:
    """One client's connection."""

    def __init__(self, proxy: Proxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.proxy = proxy
        self.reader = reader
        self.writer = writer
        self.cut_when: When | None = None

    async def run(self, host: str, port: int) -> None:
        from_server, to_server = await asyncio.open_connection(host, port)
        back = asyncio.create_task(self._back(from_server))
        try:
            await self._forth(to_server)
            if self.cut_when == "during":
                # The client is gone; the server has not noticed yet.
                self.writer.transport.abort()
                await asyncio.Event().wait()
        finally:
            back.cancel()
            for writer in (self.writer, to_server):
                writer.transport.abort()  # now: what is awaited here may be cancelled
            await asyncio.gather(back, return_exceptions=True)
            await end(to_server)

    async def _forth(self, to_server: asyncio.StreamWriter) -> None:
        while True:
            # The first messages have no type.
            head = await self.reader.readexactly(8)
            length, code = struct.unpack("!II", head)
            to_server.write(head + await self.reader.readexactly(length - 8))
            if code not in REQUESTS_OF_ENCRYPTION:
                break
        while True:
            kind = await self.reader.readexactly(1)
            size = await self.reader.readexactly(4)
            body = await self.reader.readexactly(struct.unpack("!I", size)[0] - 4)
            if kind in b"QP":
                # A simple query is the text; a parse has the name of the statement before it.
                text = body if kind == b"Q" else body.split(b"\0", 1)[1]
                self.cut_when = self.proxy.asked(text.split(b"\0")[0].decode())
                if self.cut_when == "before":
                    return
            to_server.write(kind + size + body)
            await to_server.drain()
            if self.cut_when == "during" and kind in b"QS":
                return

    async def _back(self, from_server: asyncio.StreamReader) -> None:
        while data := await from_server.read(65536):
            # What ends an answer says that the server is ready again.
            if self.cut_when == "after":
                if data[-6:-5] == b"Z":
                    self.writer.transport.abort()
                continue
            self.writer.write(data)
            await self.writer.drain()
        self.writer.transport.abort()


async def end(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


@asynccontextmanager
async def proxied(dsn: str) -> AsyncIterator[Proxy]:
    async with Proxy(dsn).running() as proxy:
        yield proxy
