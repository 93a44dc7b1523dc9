"""Everything through PgBouncer in transaction mode, which is paused, told to read its settings, and killed."""

import asyncio
import signal
import time
from collections import Counter
from contextlib import suppress

import psycopg

from pgqueue import PgQueue
from pgqueue.errors import DatabaseUnavailable
from tests.api.test_pgbouncer import SERVERS, leaks_nothing
from tests.chaos.cuts.play import quiet
from tests.chaos.door import answered
from tests.chaos.lab import LEASE, Ground, Lab, free_port, observed, until
from tests.chaos.pooler import Pooler
from tests.chaos.registry import scenario
from tests.chaos.verdict import Verdict, judge

TYPES = ["effect"] * 4 + ["threaded", "keyed", "fickle", "stepped"]
# What a client finds on the connection that it happens to get.
FOUND = """
SELECT (SELECT jsonb_object_agg(name, setting) FROM pg_settings WHERE name <> 'application_name')
       || jsonb_build_object('pgqueue.actor', coalesce(current_setting('pgqueue.actor', true), '')) AS settings,
       ARRAY(SELECT pg_listening_channels()) || ARRAY(SELECT name FROM pg_prepared_statements)
       || ARRAY(SELECT locktype || ' ' || objid FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid())
       || ARRAY(SELECT relname::text FROM pg_class WHERE relnamespace = pg_my_temp_schema()) AS left_behind,
       pg_backend_pid() AS server
"""


@scenario(
    "C18",
    "workers, the API and producers by SQL, Python and HTTP, all through PgBouncer in transaction mode, which is paused"
    " (once for longer than a lease), reconfigured, told to connect anew, and killed with -9",
    invariant="nothing lost, nothing twice; other clients of it find every setting as before, and nothing on its"
    " connections; a worker that cannot listen through it says so",
)
async def c18(lab: Lab) -> Verdict:
    ground = await lab.ground()
    pooler = lab.stack.enter_context(Pooler.running(ground.dsn, free_port()))
    other = Bystander(pooler.dsn)
    await other.look()
    monitor = await lab.monitor(ground)
    lab.sink()
    lab.worker(ground, dsn=pooler.dsn, PGQUEUE_LISTEN_URL=ground.dsn)
    lab.worker(ground, dsn=pooler.dsn)
    door = await lab.door(pooler.dsn)
    stop = asyncio.Event()
    number = lab.size(400, 2_000, 10_000)
    faults = Counter({"pauses": lab.size(1, 2, 6), "reloads": 2, "reconnects": lab.size(1, 1, 4)})
    faults["kill -9"] = lab.size(1, 2, 6)
    outages: list[tuple[float, float]] = []
    async with asyncio.TaskGroup() as group:
        group.create_task(other.watch(stop))
        producers = [
            group.create_task(by_sql(lab, ground, pooler.dsn, number * 8 // 10)),
            group.create_task(by_python(lab, pooler.dsn, number // 10)),
            *(group.create_task(door.add_many(TYPES, number // 20, insists=insists)) for insists in (False, True)),
        ]
        acts = list(faults.elements())
        lab.random.shuffle(acts)
        for place, act in enumerate(acts):
            # Spread over what the producers do, however long that takes here.
            share = (place + 1) / (len(acts) + 2)
            await until(lambda share=share: len(lab.ledger.acknowledged()) >= number * share, "jobs come", 300, 0.05)
            began = time.monotonic()
            await ACTS[act](pooler, LEASE * 1.5 if act == "pauses" and act not in acts[:place] else 0.3)
            outages.append((began, time.monotonic()))
        await asyncio.wait(producers)
        await ground.settled()
        stop.set()
    verdict = await judge(lab, ground, doubts=0)
    observed(verdict, monitor)
    verdict.faults = dict(faults)
    verdict.expect(len(lab.alive) == 2, "a worker has ended")
    verdict.expect(lab.said("listen.deaf"), "the worker that cannot listen did not say so")
    answered(verdict, door, outages)
    verdict.problems += sorted(other.problems)
    await asyncio.to_thread(leaks_nothing, pooler.dsn)
    verdict.expect(other.looks > 10, f"somebody else looked only {other.looks} times")
    verdict.figures |= {"servers": SERVERS, "api": door.statuses, "looks_of_somebody_else": other.looks}
    verdict.figures |= {"servers_that_he_had": len(other.servers), "fenced": lab.said("job.lease_lost")}
    return verdict


class Bystander:
    """Another client of the same PgBouncer and database, with nothing to do with us."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.looks = 0
        self.servers: set[int] = set()
        self.problems: set[str] = set()
        self._before: dict[str, str] | None = None

    async def watch(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            with suppress(psycopg.OperationalError):  # it is being killed
                await self.look()
            await asyncio.sleep(0.05)

    async def look(self) -> None:
        connecting = psycopg.AsyncConnection.connect(self.dsn, autocommit=True, prepare_threshold=None)
        async with await connecting as conn:
            found = await (await conn.execute(FOUND.encode())).fetchone()
        assert found is not None
        settings, left_behind, server = found
        self._before = self._before or settings
        # PL/pgSQL brings its own when a server first needs it.
        changed = {name: value for name, value in settings.items() if value != self._before.get(name, value)}
        if changed:
            self.problems.add(f"somebody else found other settings: {changed}")
        if left_behind:
            self.problems.add(f"somebody else found {left_behind} on his connection")
        self.servers.add(server)
        self.looks += 1


async def by_sql(lab: Lab, ground: Ground, dsn: str, number: int) -> None:
    jobs = [(lab.random.choice(TYPES), {"key": key}) for key in lab.keys(number)]
    for start in range(0, number, 50):
        await lab.produce(ground, jobs[start : start + 50], dsn=dsn, batch=25)


async def by_python(lab: Lab, dsn: str, number: int) -> None:
    """With keys: whoever is not answered asks again."""
    with quiet():
        async with PgQueue(dsn) as app:
            for key in lab.keys(number):
                lab.ledger.attempt([key])
                await insisting(app, lab.random.choice(TYPES), key)
                lab.ledger.acknowledge([key])


async def insisting(app: PgQueue, type: str, key: str) -> None:
    while True:
        try:
            await app.enqueue(type, {"key": key}, max_attempts=20, idempotency_key=key)
            return
        except DatabaseUnavailable:
            await asyncio.sleep(0.2)


async def pause(pooler: Pooler, seconds: float) -> None:
    await asyncio.to_thread(pooler.tell, "PAUSE")
    await asyncio.sleep(seconds)
    await asyncio.to_thread(pooler.tell, "RESUME")


async def read_settings(pooler: Pooler, seconds: float) -> None:
    pooler.configure(SERVERS + 2)
    await asyncio.to_thread(pooler.tell, "RELOAD")
    await asyncio.sleep(seconds)
    pooler.configure(SERVERS)
    await asyncio.to_thread(pooler.tell, "RELOAD")


async def connect_anew(pooler: Pooler, seconds: float) -> None:
    await asyncio.to_thread(pooler.tell, "RECONNECT")


async def kill(pooler: Pooler, seconds: float) -> None:
    await asyncio.to_thread(pooler.end, signal.SIGKILL)
    await asyncio.sleep(seconds)
    await asyncio.to_thread(pooler.start)


ACTS = {"pauses": pause, "reloads": read_settings, "reconnects": connect_anew, "kill -9": kill}
