"""/api/v1/stream: how things stand, as server-sent events, whenever that has changed.

Each event is the whole picture, and its id is a digest of it. So a client that was away needs nothing but the present:
who comes back with the Last-Event-ID of the present picture gets the next one, all others get this one first. Nothing
is missed and nothing comes twice, however many changes fall between two events.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, NamedTuple

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from pgqueue import pages
from pgqueue.api.auth import LEEWAY
from pgqueue.api.calls import Call, dumps
from pgqueue.api.problems import Problem
from pgqueue.db import Connection, is_outage
from pgqueue.errors import DatabaseUnavailable
from pgqueue.log import say

logger = logging.getLogger("pgqueue.api")

PAUSE = 1.0
"""Seconds between two looks; ten times as long as a look took, if that is more."""
PING = 15.0
PER_TOKEN = 10
STATUSES = ("pending", "scheduled", "running", "failed")


class Picture(NamedTuple):
    queues: list[pages.QueueStats]
    workers: list[pages.WorkerRow]


class Tail:
    """Looks at the database for all streams of this process, as long as there are any."""

    def __init__(
        self, connection: Callable[[], AbstractAsyncContextManager[Connection]], stopping: asyncio.Event
    ) -> None:
        self._connection = connection
        self._stopping = stopping
        self._task: asyncio.Task[None] | None = None
        self._readers: dict[str, int] = {}
        self.looks = 0
        self.picture: Picture | None = None
        self._news = asyncio.Event()

    def enter(self, who: str) -> None:
        if self._readers.get(who, 0) >= PER_TOKEN:
            headers = {"retry-after": "5"}
            raise Problem(429, "rate-limited", f"more than {PER_TOKEN} streams of one token", headers=headers)
        self._readers[who] = self._readers.get(who, 0) + 1
        if self._task is None or self._task.done():
            self.picture = None
            self._task = asyncio.create_task(self._run(), name="stream")

    def leave(self, who: str) -> None:
        self._readers[who] -= 1
        if not self._readers[who]:
            del self._readers[who]

    @property
    def readers(self) -> int:
        return sum(self._readers.values())

    async def news(self, seconds: float) -> None:
        """Returns at the next look, or after so many seconds."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), seconds)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def run_once(self) -> None:
        async with self._connection() as conn:
            self.picture = Picture(await pages.list_queues(conn), await pages.list_workers(conn))
        self.looks += 1
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _run(self) -> None:
        while self._readers and not self._stopping.is_set():
            begun = time.monotonic()
            try:
                await self.run_once()
            except Exception as error:
                if not isinstance(error, DatabaseUnavailable) and not is_outage(error):
                    say(logger, logging.ERROR, "api.stream", f"{type(error).__name__} while the streams were fed")
            pause = max(PAUSE, 10 * (time.monotonic() - begun))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)
        self._news.set()


async def stream(call: Call) -> Response:
    last = call.request.headers.get("last-event-id", "")
    who = call.principal.jti or call.principal.subject
    call.state.tail.enter(who)
    return _Stream(call.state.tail, who, _events(call, last))


class _Stream(StreamingResponse):
    """Gives its place back however it ends, even before the first event."""

    def __init__(self, tail: Tail, who: str, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._tail, self._who = tail, who

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._tail.leave(self._who)


async def _events(call: Call, last: str) -> AsyncIterator[str]:
    tail, stopping = call.state.tail, call.state.stopping
    quiet = time.monotonic()
    yield "retry: 2000\n\n"
    while not stopping.is_set():
        if (end := await _end(call)) is not None:
            yield f"event: end\ndata: {dumps({'reason': end})}\n\n"
            return
        if tail.picture is not None:
            text = dumps(_shown(tail.picture, call))
            id = hashlib.sha256(text.encode()).hexdigest()[:32]
            if id != last:
                last, quiet = id, time.monotonic()
                yield f"id: {id}\nevent: state\ndata: {text}\n\n"
        if time.monotonic() - quiet >= PING:
            quiet = time.monotonic()
            yield ": still here\n\n"
        await tail.news(PING)
    yield f"event: end\ndata: {dumps({'reason': 'this process is stopping'})}\n\n"


async def _end(call: Call) -> str | None:
    """Why this stream must end: a token is good only until it is not."""
    expires_at = call.principal.expires_at
    if expires_at is not None and expires_at + LEEWAY < time.time():
        return "the token has expired"
    try:
        return "the token was revoked" if await call.state.is_revoked(call.principal) else None
    except DatabaseUnavailable:
        return None


def _shown(picture: Picture, call: Call) -> dict[str, Any]:
    """What this caller may see. Ages are left out: they change without anything having happened."""
    queues = [one._asdict() for one in picture.queues if call.principal.sees(one.queue)]
    for queue in queues:
        del queue["oldest_wait"]
    shown: dict[str, Any] = {
        "jobs": {name: sum(queue[name] for queue in queues) for name in STATUSES},
        "queues": queues,
    }
    if call.principal.queues is None:
        shown["workers"] = [
            {
                "id": one.id,
                "name": one.name,
                "state": one.state,
                "draining": one.draining,
                "threads": one.threads,
                "threads_used": one.threads_used,
                "completed": one.completed,
                "failed": one.failed,
            }
            for one in picture.workers
        ]
    return shown
