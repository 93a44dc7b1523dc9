"""The welcome e-mail: fifty jobs for the same person, five workers that are killed meanwhile, one message.

An SMTP server cannot take part in a transaction. So a worker that dies while it talks to one leaves a doubt: that job
waits in the dead letter queue, the others wait for it, and nothing is sent until somebody has looked. In these tests
somebody does, at once.
"""

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from email import message_from_bytes
from typing import Any

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP

from pgqueue.embedded import ValkeyServer
from pgqueue.settings import Settings
from pgqueue.worker.jobs import base, welcome
from tests.once.arena import Arena, Place
from tests.once.inside import worker_inside
from tests.once.nursery import Nursery, Process

JOBS = 50
WORKERS = 5


class Mailbox:
    """What the server was offered and what it took, by Message-ID. It can be told to hesitate, once."""

    def __init__(self) -> None:
        self.offered: list[str] = []
        self.taken: list[str] = []
        self.sessions = 0
        """Those that are open."""
        self.hesitates: str | None = None
        self.asked = threading.Event()
        self.go_on = threading.Event()

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        message = message_from_bytes(envelope.content)
        self.offered.append(message["Message-ID"])
        await self._hesitate("before")
        self.taken.append(message["Message-ID"])
        await self._hesitate("after")
        return "250 taken"

    async def _hesitate(self, when: str) -> None:
        if self.hesitates == when and not self.asked.is_set():
            self.asked.set()
            while not self.go_on.is_set():  # noqa: ASYNC110 - another thread says so
                await asyncio.sleep(0.01)


class Session(SMTP):
    def connection_made(self, transport: Any) -> None:
        self.event_handler.sessions += 1
        super().connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self.event_handler.sessions -= 1


class Server(Controller):
    """Finds a free port by itself."""

    def __init__(self, mailbox: Mailbox) -> None:
        super().__init__(mailbox, hostname="127.0.0.1", port=0)
        self.mailbox = mailbox

    def factory(self) -> SMTP:
        return Session(self.mailbox)

    def _trigger_server(self) -> None:
        assert isinstance(self.server, asyncio.Server)
        self.port = self.server.sockets[0].getsockname()[1]
        super()._trigger_server()  # type: ignore[no-untyped-call]


@contextmanager
def started_smtp() -> Iterator[tuple[Mailbox, Server]]:
    mailbox = Mailbox()
    server = Server(mailbox)
    server.start()
    try:
        yield mailbox, server
    finally:
        server.stop()


class Fleet:
    """Five workers. Whoever is killed is replaced and declared dead: tests of leases that run out are elsewhere."""

    def __init__(self, place: Place, start: Callable[[], Process]) -> None:
        self.place = place
        self.start = start
        self.living = [start() for _ in range(WORKERS)]
        self.kills = 0

    async def kill(self, process: Process) -> None:
        process.kill()
        await process.ended()
        self.kills += 1
        over = "UPDATE pgqueue.workers SET expires_at = now() - interval '1 s' WHERE pid = %s"
        await self.place.conn.execute(over, [process.pid])
        self.living.remove(process)
        self.living.append(self.start())

    async def sender(self) -> Process:
        """The one that talks to the server."""
        pid = await self.place.value(
            """
            SELECT w.pid FROM pgqueue.effects e JOIN pgqueue.jobs_live j ON j.id = e.job_id
            JOIN pgqueue.workers w ON w.id = j.worker_id
            """
        )
        return next(process for process in self.living if process.pid == pid)

    async def end(self) -> None:
        for process in self.living:
            process.kill()
        for process in self.living:
            await process.ended()


async def kill_the_others(fleet: Fleet, mailbox: Mailbox) -> None:
    """… while one of them sends."""
    mailbox.hesitates = "before"
    await asked(mailbox)
    sender = await fleet.sender()
    for process in [process for process in fleet.living if process is not sender]:
        await fleet.kill(process)
    mailbox.go_on.set()


async def kill_the_sender_before(fleet: Fleet, mailbox: Mailbox) -> None:
    """The server has the message, and has not taken it."""
    mailbox.hesitates = "before"
    await asked(mailbox)
    await fleet.kill(await fleet.sender())
    await kill_all(fleet)


async def kill_the_sender_after(fleet: Fleet, mailbox: Mailbox) -> None:
    """The server has taken the message, and its answer is not there yet."""
    mailbox.hesitates = "after"
    await asked(mailbox)
    await fleet.kill(await fleet.sender())
    await kill_all(fleet)


async def kill_at_random(fleet: Fleet, mailbox: Mailbox) -> None:
    for _ in range(10):
        await asyncio.sleep(random.uniform(0.0, 0.25))
        await fleet.kill(random.choice(fleet.living))


async def kill_all(fleet: Fleet) -> None:
    for process in list(fleet.living):
        await fleet.kill(process)


async def asked(mailbox: Mailbox) -> None:
    assert await asyncio.to_thread(mailbox.asked.wait, 20), "nobody sent anything"


Kill = Callable[[Fleet, Mailbox], Awaitable[None]]
DOUBTS: dict[Kill, tuple[int, ...]] = {
    kill_the_others: (0,),
    kill_the_sender_before: (1,),
    kill_the_sender_after: (1,),
    kill_at_random: tuple(range(11)),
}


@pytest.mark.together
@pytest.mark.parametrize("kill", DOUBTS, ids=lambda kill: kill.__name__)
async def test_fifty_jobs_one_message(arena: Arena, nursery: Nursery, shared_valkey: ValkeyServer, kill: Kill) -> None:
    ana = {"email": f"{kill.__name__}@example.org", "name": "Ana"}
    env = {"SMTP_HOST": "127.0.0.1", "SMTP_EMAIL": "shop@example.org", "REDIS_URL": shared_valkey.url}
    with started_smtp() as (mailbox, server):
        async with arena.place() as place:
            ids = [await place.add("send_welcome_email", ana) for _ in range(JOBS)]
            env |= {"SMTP_PORT": str(server.port)}
            fleet = Fleet(place, lambda: nursery.worker(place.dsn, "pgqueue.worker.jobs", **env))
            try:
                await kill(fleet, mailbox)
                doubts = await settle(place, mailbox)
                jobs = await place.ended(*ids, processes=tuple(fleet.living))
            finally:
                await fleet.end()
    assert fleet.kills >= WORKERS - 1
    assert doubts in DOUBTS[kill]
    assert len(mailbox.taken) == 1, "nobody is welcomed twice"
    assert len(set(mailbox.offered)) == 1, "every attempt has the same Message-ID"
    # Every job is accounted for: one sent it, or an operator said that it did; the others are its duplicates.
    ends = Counter(str(job["reason"]).partition(" of job")[0] for job in jobs)
    assert Counter(job["status"] for job in jobs) == {"completed": JOBS}
    assert ends["duplicate"] == JOBS - 1
    if kill is kill_the_sender_before:
        assert mailbox.offered == mailbox.taken * 2
    if kill is kill_the_sender_after:
        assert ends["resolved"] == 1
    else:
        assert {job["result"]["message_id"] for job in jobs if job["result"]} <= set(mailbox.taken)


async def settle(place: Place, mailbox: Mailbox) -> int:
    """An operator ends each doubt by looking into the mailbox. After that nobody needs to wait any longer."""
    doubts = 0
    deadline = time.monotonic() + 30
    left = "SELECT id, status, reason, lost FROM pgqueue.jobs WHERE status <> 'completed'"
    while unended := await place.rows(left):
        assert time.monotonic() < deadline, unended
        for row in await place.rows("SELECT id FROM pgqueue.jobs_failed WHERE reason = 'in_doubt'"):
            doubts += 1
            # What was sent has arrived when its sender's connection is seen to be gone; nobody else sends meanwhile.
            while mailbox.sessions:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
            verdict = "completed" if mailbox.taken else "retry"
            await place.value("SELECT pgqueue.resolve_job(%s, %s)", row["id"], verdict)
        # One that was lost with three workers waits for somebody who tries it again.
        await place.rows("SELECT pgqueue.retry_job(id) FROM pgqueue.jobs_failed WHERE reason = 'poison'")
        if doubts:
            await place.conn.execute("UPDATE pgqueue.jobs_live SET run_at = now() WHERE status = 'scheduled'")
        await asyncio.sleep(0.05)
    return doubts


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"251 forwarded\r\n", "in_doubt"),
        (b"200 queued\r\n", "in_doubt"),
        (b"OK queued as 17\r\n", "in_doubt"),
        (b"250 " + b"x" * 9000 + b"\r\n", "in_doubt"),
        (b"451 later\r\n", "max_attempts"),
        (b"554 never\r\n", "gave_up"),
    ],
    ids=["251", "200", "no code", "long", "451", "554"],
)
async def test_only_a_refusal_says_that_it_was_not_taken(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, answer: bytes, reason: str
) -> None:
    messages: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 hello\r\n")
        while line := await reader.readline():
            if line.upper() == b"DATA\r\n":
                writer.write(b"354 go on\r\n")
                messages.append(await reader.readuntil(b"\r\n.\r\n"))
                writer.write(answer)
            else:
                writer.write(b"250 fine\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    config = Settings(smtp_host="127.0.0.1", smtp_port=port, smtp_email="shop@example.org")
    monkeypatch.setattr(welcome, "settings", lambda: config)
    async with server, arena.place() as place:
        id = await place.add("send_welcome_email", {"email": "ana@example.org", "name": "Ana"}, max_attempts=1)
        async with worker_inside(base.app, place.dsn):
            [job] = await place.ended(id)
    assert (job["status"], job["reason"], len(messages)) == ("failed", reason, 1)
