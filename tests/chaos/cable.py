"""A cable to PostgreSQL that can be slow or narrow, or fall silent: bytes vanish, and nothing is closed."""

import asyncio
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import quote, urlsplit

CANCEL_REQUEST = 80877102
ENCRYPTION_REQUESTS = (80877103, 80877104)
PACKET = 1460

Swallows = Callable[[str, bytes], bool]
"""Told a session's application_name and what it sends; True: this and all that follows on this connection vanishes."""


class Cable:
    """Runs in a thread of its own. Its settings may be changed at any time."""

    def __init__(self, dsn: str) -> None:
        self._target = urlsplit(dsn)
        self.delay = 0.0
        """Seconds, each way."""
        self.rate: float | None = None
        """Bytes a second, each way, for all connections together; what is too much waits, packet by packet."""
        self._free = {True: 0.0, False: 0.0}
        """When each way is free again."""
        self.swallows: Swallows = lambda name, sent: False
        self.dead = False
        """Everything vanishes, new connections too."""
        self.cancels = 0
        self.trips = 0
        """How often somebody spoke after he was answered."""
        self.bytes = 0
        """Both ways."""

    @property
    def dsn(self) -> str:
        target = self._target
        return target._replace(
            netloc=f"{target.username}:{quote(target.password or '')}@127.0.0.1:{self.port}"
        ).geturl()

    @contextmanager
    def running(self) -> Iterator["Cable"]:
        ready = threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), name="cable", daemon=True)
        thread.start()
        ready.wait()
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._stop.set)
            thread.join(5)

    async def passes(self, size: int, *, forth: bool) -> None:
        """Until it has gone through where the cable is narrow."""
        self.bytes += size
        if self.rate is not None:
            now = self._loop.time()
            self._free[forth] = max(now, self._free[forth]) + size / self.rate
            await asyncio.sleep(self._free[forth] - now)

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._links: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await self._stop.wait()
        server.close()
        for link in list(self._links):
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = asyncio.current_task()
        assert link is not None
        self._links.add(link)
        try:
            await _Link(self, reader, writer).run(self._target.hostname or "", self._target.port or 0)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            self._links.discard(link)


class _Link:
    def __init__(self, cable: Cable, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.cable = cable
        self.reader = reader
        self.writer = writer
        self.name = ""
        self.silent = cable.dead
        self.answered = True

    async def run(self, host: str, port: int) -> None:
        first = await self._first()
        if self.silent:
            await self._swallow()
        from_server, to_server = await asyncio.open_connection(host, port)
        try:
            await self._send(to_server, first, forth=True)
            ways = [
                asyncio.create_task(self._pump(from_server, self.writer, forth=False)),
                asyncio.create_task(self._pump(self.reader, to_server, forth=True)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        finally:
            to_server.transport.abort()

    async def _first(self) -> bytes:
        """The message that opens a session, which has its name."""
        while True:
            head = await self.reader.readexactly(8)
            length, code = struct.unpack("!II", head)
            if code in ENCRYPTION_REQUESTS:
                self.writer.write(b"N")
                continue
            body = await self.reader.readexactly(length - 8)
            if code == CANCEL_REQUEST:
                # A network that loses a statement loses the word to stop it, too.
                self.cable.cancels += 1
                self.silent = True
            words = body.split(b"\0")
            if b"application_name" in words:
                self.name = words[words.index(b"application_name") + 1].decode()
            return head + body

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, forth: bool) -> None:
        with suppress(ConnectionError):
            while data := await source.read(1 << 16 if self.cable.rate is None else PACKET):
                if forth and not self.silent:
                    self.cable.trips += self.answered
                    self.silent = self.cable.swallows(self.name, data)
                if self.silent or self.cable.dead:
                    self.silent = True
                    continue
                self.answered = not forth
                await self._send(target, data, forth=forth)
        if self.silent and not forth:
            await asyncio.Event().wait()  # not even that the server closed it is heard

    async def _send(self, target: asyncio.StreamWriter, data: bytes, *, forth: bool) -> None:
        await self.cable.passes(len(data), forth=forth)
        if self.cable.delay:
            asyncio.get_running_loop().call_later(self.cable.delay, _write, target, data)
        else:
            target.write(data)
            await target.drain()

    async def _swallow(self) -> None:
        while await self.reader.read(1 << 16):
            pass


def _write(target: asyncio.StreamWriter, data: bytes) -> None:
    if not target.is_closing():
        target.write(data)
