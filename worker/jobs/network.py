"""network_task: a few GET requests at the same time. It takes any payload."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast
from urllib.parse import SplitResult, quote, urlsplit, urlunsplit

from pgqueue import Context, GiveUp
from pgqueue.worker.jobs.base import app, member, number, refuse_invalid, settings

TIMEOUT = 10.0
"""Seconds for one request, from the look-up of the host to the end of the answer."""


@app.job()
async def network_task(ctx: Context, payload: Any = None) -> dict[str, Any]:
    """{"url": …, "requests": 3} sets the target and the number of requests. Without one the target is
    PGQUEUE_NETWORK_TASK_URL, else an endpoint that this job opens for itself. Redirects are not followed."""
    refuse_invalid(payload)
    count = number(payload, "requests", (1, 5), 100)
    url = member(payload, "url")
    async with _target(settings().network_task_url if url is None else url) as target:
        tls = ssl.create_default_context() if target.scheme == "https" else None
        async with asyncio.TaskGroup() as group:
            requests = [group.create_task(_problem(target, tls)) for _ in range(count)]
    problems = [problem for request in requests if (problem := request.result())]
    told = f"{count - len(problems)}/{count} requests successful"
    if problems:
        raise RuntimeError(f"{told}: {'; '.join(sorted(set(problems))[:3])}")
    return {"message": f"Network task: {told}"}


@asynccontextmanager
async def _target(url: Any) -> AsyncIterator[SplitResult]:
    if url is not None:
        yield _checked(url)
        return
    server = await asyncio.get_running_loop().create_server(_Endpoint, "127.0.0.1", 0)
    try:
        yield urlsplit(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/")
    finally:
        server.close()


class _Endpoint(asyncio.Protocol):
    """Answers any request with 200."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.request = cast(asyncio.Transport, transport), b""

    def data_received(self, data: bytes) -> None:
        self.request += data
        if b"\r\n\r\n" in self.request:
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\nok\n")
            self.transport.close()
        elif len(self.request) > 10_000:
            self.transport.abort()


def _checked(url: Any) -> SplitResult:
    try:
        # urlsplit would drop line breaks and tabs silently.
        if isinstance(url, str) and url.isprintable() and " " not in url:
            target = urlsplit(url)
            with_host = target.hostname and target.hostname.encode("idna") and target.port != 0
            if with_host and target.scheme in ("http", "https") and "@" not in target.netloc:
                return target
    except ValueError:
        pass
    raise GiveUp("url must be http://… or https://…, without a user and a password")


async def _problem(target: SplitResult, tls: ssl.SSLContext | None) -> str | None:
    """What went wrong with one request."""
    try:
        async with asyncio.timeout(TIMEOUT):
            status = await _get(target, tls)
    except TimeoutError:
        return f"{target.netloc} did not answer within {TIMEOUT:g} s"
    except (OSError, EOFError, ValueError) as error:
        return f"{target.netloc}: {error or type(error).__name__}"
    return None if 200 <= status < 300 else f"{target.netloc} answered {status}"


async def _get(target: SplitResult, tls: ssl.SSLContext | None) -> int:
    """The status, once the answer is here to its end."""
    host = (target.hostname or "").encode("idna").decode()
    named = (f"[{host}]" if ":" in host else host) + (f":{target.port}" if target.port else "")
    path = quote(urlunsplit(("", "", target.path or "/", target.query, "")), safe="/?%:@!$&'()*+,;=~")
    request = f"GET {path} HTTP/1.1\r\nHost: {named}\r\nUser-Agent: pgqueue\r\nAccept: */*\r\nConnection: close\r\n\r\n"
    reader, writer = await asyncio.open_connection(host, target.port or (443 if tls else 80), ssl=tls)
    try:
        writer.write(request.encode())
        status, headers = await _head(reader)
        while status < 200:  # 100 and 103 only announce the answer
            status, headers = await _head(reader)
        if status in (204, 304):
            pass
        elif "chunked" in headers.get("transfer-encoding", "").lower():
            while size := int((await reader.readline()).split(b";")[0], 16):
                await _skip(reader, size + 2)
        elif "content-length" in headers:
            await _skip(reader, int(headers["content-length"]))
        else:
            while await reader.read(65_536):
                pass
        return status
    finally:
        writer.transport.abort()  # a polite end of TLS may take as long as the peer likes


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    version, _, rest = (await reader.readline()).decode("latin-1").partition(" ")
    if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
        raise ValueError("the answer is not HTTP")
    headers = {}
    while line := (await reader.readline()).decode("latin-1").strip():
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(rest[:3]), headers


async def _skip(reader: asyncio.StreamReader, size: int) -> None:
    while size > 0:
        size -= len(await reader.readexactly(min(size, 65_536)))
