"""A network that swallows what is sent, without a word: what must notice does, and in time."""

import asyncio
import time
from uuid import uuid4

import psycopg
import pytest

from pgqueue import listen, workers
from pgqueue.listen import Listener
from pgqueue.worker.heartbeat import Heartbeat, Vitals
from pgqueue.workers import Worker
from tests.chaos.cable import Cable
from tests.chaos.lab import until


async def test_three_heartbeats_in_a_row_may_vanish(dsn: str, conn: psycopg.AsyncConnection) -> None:
    lease = 8.0
    worker = Worker(
        id=uuid4(), name="w", host="h", pid=1, version="1", queues=None, types=None, threads=1, listening=False,
        lease_timeout=lease,
    )  # fmt: skip
    await workers.register(conn, worker)
    beats: list[bool] = []

    def vanishes(name: str, sent: bytes) -> bool:
        if b"pgqueue.workers" not in sent:
            return False
        beats.append(len(beats) % 4 != 3)
        return beats[-1]

    with Cable(dsn).running() as cable:
        heartbeat = Heartbeat(cable.dsn, worker, 0.5, Vitals, lambda pulse: None)
        cable.swallows = vanishes
        heartbeat.start()
        stood_still, before = 0.0, time.monotonic()
        while len(beats) < 9:
            now = time.monotonic()
            # The machine's part in it: nobody here could do anything meanwhile.
            stood_still += max(0.0, now - before - 0.1)
            before = now
            assert now - heartbeat.confirmed < lease + stood_still, f"the lease was lost after {beats}"
            await asyncio.sleep(0.02)
        await asyncio.to_thread(heartbeat.stop)
    assert beats.count(False) >= 2


async def test_a_listener_notices_that_nothing_comes_any_more(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "PING_EVERY", 0.3)
    monkeypatch.setattr(listen, "PONG_WITHIN", 0.5)
    heard: list[str] = []
    changes: list[bool] = []
    with Cable(dsn).running() as cable:
        listener = Listener(cable.dsn, "ear", heard.append, "pgqueue-listen w")
        listener.changed = lambda: changes.append(listener.hears)
        listening = asyncio.create_task(listener.run())
        try:
            await until(lambda: listener.hears, "it hears")
            cable.dead = True
            await until(lambda: not listener.hears, "it notices")
            cable.dead = False
            # An attempt to connect that began in the silence may take its ten seconds.
            await until(lambda: listener.hears, "it hears")
        finally:
            listening.cancel()
            await asyncio.wait([listening])
    # A machine that stands still for long enough is a silence, too.
    assert changes.count(True) >= 2
    assert heard.count("") == changes.count(True), "whoever listens again must look once, too"
