"""Everything at once."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress

import psycopg
import redis.asyncio
import redis.exceptions

from pgqueue.embedded import ValkeyServer
from tests.chaos.lab import LEASE, Ground, Lab, observed
from tests.chaos.monitor import Monitor
from tests.chaos.registry import scenario
from tests.chaos.verdict import Verdict, judge
from tests.chaos.wire import Wire
from tests.once.nursery import Process

WORKERS = 4
CUT = 0.02
MIX = ["effect"] * 12 + ["threaded"] * 4 + ["keyed"] * 3 + ["mail"]
"""80 % with the effect in the transaction, 15 % keyed, 5 % at most once."""


@scenario(
    "C1",
    "the storm: 4 workers × 8 threads behind a proxy; kill -9, immediate restarts of PostgreSQL, Redis killed and"
    " flushed, SIGSTOP past the lease, 2 % of COMMITs cut before or after the server; operators cancel, retry, pause",
    invariant="nothing lost, nothing twice, all accounted for, no illegal move",
    minute=True,
    alone=True,
    budget=1800,
)
async def c1(lab: Lab) -> Verdict:
    storm = Storm(lab)
    await storm.prepare()
    started = time.monotonic()
    await storm.rage(over=lab.size(14.0, 40.0, 240.0))
    await storm.ground.settled(within=900)
    seconds = time.monotonic() - started
    faults = dict(storm.faults) | dict(storm.wire.cuts)
    verdict = await judge(lab, storm.ground, doubts=sum(faults.values()))
    verdict.faults = faults
    observed(verdict, storm.monitor)
    attempts = await storm.ground.value("SELECT count(*)::int FROM pgqueue.attempts WHERE outcome = 'retried'")
    verdict.figures |= {
        "jobs_per_s": round(verdict.n / seconds),
        "in_doubt": verdict.figures["failed_for"].get("in_doubt", 0),
        "retried": attempts,
        "fenced": lab.said("job.lease_lost"),
        "replays": sum(call["replay"] for call in lab.sink_calls()),
    }
    return verdict


class Storm:
    ground: Ground
    wire: Wire
    monitor: Monitor
    valkey: ValkeyServer

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.faults: Counter[str] = Counter()
        self.up = asyncio.Lock()
        """Held while PostgreSQL is down."""

    async def prepare(self) -> None:
        lab = self.lab
        self.ground = await lab.ground(own=True)
        self.wire = await lab.wire(self.ground)
        self.wire.cut(b"COMMIT\0", CUT)
        self.valkey = await lab.valkey()
        self.monitor = await lab.monitor(self.ground)
        lab.sink()
        for _ in range(WORKERS):
            self.start()

    def start(self) -> Process:
        url = self.valkey.url
        return self.lab.worker(
            self.ground, dsn=self.wire.dsn, threads=8, REDIS_URL=url, PGQUEUE_LISTEN_URL=self.wire.dsn
        )

    async def rage(self, over: float) -> None:
        """Jobs come all the time, and so do the faults."""
        size = self.lab.size
        async with asyncio.TaskGroup() as together:
            together.create_task(self.produce(size(2_000, 5_000, 100_000), over))
            for act, times in (
                (self.kill, size(4, 20, 20)),
                (self.restart_postgres, size(1, 5, 5)),
                (self.kill_redis, size(1, 3, 3)),
                (self.flush_redis, size(1, 3, 3)),
                (self.stop, size(2, 10, 10)),
                (self.operate, size(10, 60, 200)),
            ):
                together.create_task(self.repeat(act, times, over))

    async def repeat(self, act: Callable[[], Awaitable[None]], times: int, over: float) -> None:
        began = time.monotonic()
        for moment in sorted(self.lab.random.uniform(0, over) for _ in range(times)):
            await asyncio.sleep(max(0.0, began + moment - time.monotonic()))
            await act()
            self.faults[act.__name__] += 1

    async def produce(self, number: int, over: float) -> None:
        batch, began = 50, time.monotonic()
        for start in range(0, number, batch * 10):
            keys = self.lab.keys(min(batch * 10, number - start))
            jobs = [(self.lab.random.choice(MIX), {"key": key, "seconds": self.duration()}) for key in keys]
            await asyncio.sleep(max(0.0, began + over * start / number - time.monotonic()))
            await self.lab.produce(self.ground, jobs, dsn=self.wire.dsn, batch=batch)

    def duration(self) -> float:
        return round(self.lab.random.choice([0, 0, 0.005, 0.02, 0.1]), 3)

    # Faults

    async def kill(self) -> None:
        victim = self.lab.random.choice(self.lab.alive)
        # It may have been started a moment ago.
        found = await self.ground.value("SELECT id FROM pgqueue.workers WHERE pid = %s", victim.pid)
        if found is not None:
            self.monitor.died(found)
        victim.kill()
        self.start()

    async def restart_postgres(self) -> None:
        async with self.up:
            await asyncio.to_thread(self.ground.server.stop, "immediate")
            await asyncio.sleep(self.lab.random.uniform(0, 1.5))
            await asyncio.to_thread(self.ground.server.restart)

    async def kill_redis(self) -> None:
        await asyncio.to_thread(self.valkey.kill)
        await asyncio.sleep(self.lab.random.uniform(0, 1))
        await asyncio.to_thread(self.valkey.restart)

    async def flush_redis(self) -> None:
        client = redis.asyncio.Redis.from_url(self.valkey.url)
        try:
            await client.flushall()
        except redis.exceptions.RedisError:
            return  # it is being killed at the same time
        finally:
            await client.aclose()

    async def stop(self) -> None:
        await self.lab.freeze(self.lab.random.choice(self.lab.alive), LEASE * self.lab.random.uniform(1.2, 1.8))

    async def operate(self) -> None:
        """Jobs with their effect in the transaction may be cancelled and retried at any time."""
        what = self.lab.random.choice(["cancel", "cancel and retry", "pause"])
        if what == "pause":
            await self.ground.rows("SELECT pgqueue.pause_queue('default', 'storm')")
            await asyncio.sleep(0.1)
            await self.ground.rows("SELECT pgqueue.resume_queue('default')")
            return
        found = await self.ground.rows(
            "SELECT id FROM pgqueue.jobs_live WHERE type = 'effect' ORDER BY random() LIMIT 3"
        )
        for job in found:
            with suppress(psycopg.ProgrammingError):  # it has ended meanwhile
                await self.ground.rows("SELECT pgqueue.cancel_job(%s, 'storm')", job["id"])
        if what == "cancel and retry":
            await asyncio.sleep(0.3)
            for job in found:
                await self.ground.rows(
                    "SELECT pgqueue.retry_job(id, 'storm') FROM pgqueue.jobs WHERE id = %s AND status = 'cancelled'",
                    job["id"],
                )
