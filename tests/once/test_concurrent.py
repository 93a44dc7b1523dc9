"""Many at once with the same key: one job, one effect, one answer; whatever Redis does meanwhile.

Submissions come by pgqueue.add_job, by plain INSERT and from Python. Executions are jobs with the same `once_per`, on
three worker processes, beside a Redis that is up, away, hung, flushed, full, forged or killed on the way.
"""

import asyncio
import os
import random
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import psycopg
import pytest
import redis
from psycopg import errors as pg
from psycopg.types.json import Jsonb

from pgqueue import PgQueue, idempotency
from pgqueue.embedded import ValkeyServer
from pgqueue.errors import KeyReused
from pgqueue.idempotency import BUDGET, FAILURES, L1
from tests.once import handlers
from tests.once.arena import Arena, Place
from tests.once.inside import worker_inside
from tests.once.nursery import Nursery, Process
from tests.once.proxy import proxied

# Submissions

KEYS = 100
TIMES = 100
CLIENTS = 24

Submit = Callable[[str], Any]


async def by_function(conn: psycopg.AsyncConnection, key: str) -> int:
    query = "SELECT id FROM pgqueue.add_job('in_transaction', %s, idempotency_key => %s)"
    row = await (await conn.execute(query, [Jsonb({"key": key}), key])).fetchone()
    assert row is not None
    return int(row[0])


async def by_insert(conn: psycopg.AsyncConnection, key: str) -> int:
    query = "INSERT INTO pgqueue.jobs (type, payload, idempotency_key) VALUES ('in_transaction', %s, %s) RETURNING id"
    try:
        row = await (await conn.execute(query, [Jsonb({"key": key}), key])).fetchone()
    except pg.UniqueViolation:
        query = "SELECT job_id FROM pgqueue.idempotency_keys WHERE key = %s"
        row = await (await conn.execute(query, [key])).fetchone()
    assert row is not None
    return int(row[0])


async def from_python(app: PgQueue, key: str) -> int:
    return (await app.types["in_transaction"].using(idempotency_key=key).enqueue(key=key)).id


async def test_a_hundred_keys_a_hundred_times(arena: Arena, nursery: Nursery) -> None:
    async with arena.place() as place, producing(place) as app:
        workers = [nursery.worker(place.dsn, **place.env) for _ in range(2)]
        # Each key's submissions come together, so that they meet.
        wanted = [f"key {n}" for n in range(KEYS) for _ in range(TIMES)]
        answers: dict[str, list[int]] = defaultdict(list)

        async def client(number: int) -> None:
            async with await psycopg.AsyncConnection.connect(place.dsn, autocommit=True) as conn:
                doors: list[Submit] = [
                    lambda key: by_function(conn, key),
                    lambda key: by_insert(conn, key),
                    lambda key: from_python(app, key),
                ]
                while wanted:
                    key = wanted.pop()
                    answers[key].append(await doors[number % 3](key))

        await asyncio.gather(*map(client, range(CLIENTS)))
        assert {key: len(ids) for key, ids in answers.items()} == {f"key {n}": TIMES for n in range(KEYS)}
        assert all(len(set(ids)) == 1 for ids in answers.values()), "one key had several answers"
        ids = {key: ids[0] for key, ids in answers.items()}
        assert len(set(ids.values())) == KEYS
        jobs = await place.ended(*ids.values(), processes=(workers[0],))
        assert Counter(job["status"] for job in jobs) == {"completed": KEYS}
        assert await place.value("SELECT count(*) FROM pgqueue.jobs") == KEYS
        seen = await place.rows("SELECT key, count(*) AS n FROM public.seen GROUP BY 1")
        assert {row["key"]: row["n"] for row in seen} == dict.fromkeys(ids, 1)
        await end(workers)

        # The key remembers what it stood for, in every door.
        reused = place.value(
            "SELECT pgqueue.add_job('in_transaction', '{\"key\": \"other\"}', idempotency_key => 'key 1')"
        )
        with pytest.raises(psycopg.Error, match="another type or payload") as error:
            await reused
        assert error.value.sqlstate == "PQ002"
        with pytest.raises(KeyReused):
            await app.types["in_transaction"].using(idempotency_key="key 1").enqueue(key="other")
        with pytest.raises(pg.UniqueViolation, match="belongs to another job"):
            await place.conn.execute("INSERT INTO pgqueue.jobs (type, idempotency_key) VALUES ('other', 'key 1')")
        assert await place.value("SELECT count(*) FROM pgqueue.jobs") == KEYS


@asynccontextmanager
async def producing(place: Place) -> AsyncIterator[PgQueue]:
    app = PgQueue(place.dsn)
    app.include(handlers.app)
    try:
        yield app
    finally:
        await app.close()
        handlers.app.pools = PgQueue().pools


async def end(workers: list[Process]) -> None:
    for worker in workers:
        worker.kill()
    for worker in workers:
        await worker.ended()


# Executions

DIFFERENT = 20
SAME = 25
TYPES = ("in_transaction", "unkeyed")


def key_name(type: str, key: str) -> str:
    return f"pgqueue:done:{handlers.app.types[type].effect(0, {'key': key}).key}"


class Trouble:
    """What happens to Redis before the workers start, while they work, and in the end."""

    def __init__(self, valkey: ValkeyServer, keys: list[tuple[str, str]]) -> None:
        self.valkey = valkey
        self.url = valkey.url
        self.names = [key_name(type, key) for type, key in keys]

    def before(self, client: "redis.Redis") -> None: ...

    def meanwhile(self, client: "redis.Redis") -> None:
        """Again and again, while the workers work."""
        time.sleep(0.05)

    def after(self) -> None: ...

    def go_on(self, client: "redis.Redis", over: threading.Event) -> None:
        while not over.is_set():
            self.meanwhile(client)


class Up(Trouble):
    pass


class Down(Trouble):
    def before(self, client: "redis.Redis") -> None:
        os.kill(self.valkey.pid, signal.SIGKILL)


class Killed(Trouble):
    def meanwhile(self, client: "redis.Redis") -> None:
        time.sleep(0.4)
        with suppress(ProcessLookupError):
            os.kill(self.valkey.pid, signal.SIGKILL)


class Hung(Trouble):
    def before(self, client: "redis.Redis") -> None:
        os.kill(self.valkey.pid, signal.SIGSTOP)

    def after(self) -> None:
        os.kill(self.valkey.pid, signal.SIGCONT)


class HangsAndGoesOn(Trouble):
    def meanwhile(self, client: "redis.Redis") -> None:
        for number in (signal.SIGSTOP, signal.SIGCONT):
            os.kill(self.valkey.pid, number)
            time.sleep(0.1)


class Flushed(Trouble):
    def meanwhile(self, client: "redis.Redis") -> None:
        client.flushall()
        time.sleep(0.02)


class Evicting(Trouble):
    """Full of other things: what is set goes soon."""

    policy = "allkeys-lru"

    def before(self, client: "redis.Redis") -> None:
        client.config_set("maxmemory-policy", self.policy)
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 100_000)

    def meanwhile(self, client: "redis.Redis") -> None:
        with suppress(redis.OutOfMemoryError):
            client.set(f"filler {random.random()}", "x" * 10_000)
        time.sleep(0.002)


class Full(Evicting):
    """Nothing more can be set."""

    policy = "noeviction"

    def before(self, client: "redis.Redis") -> None:
        client.config_set("maxmemory-policy", self.policy)
        client.config_set("maxmemory", 1)


class Forged(Trouble):
    def before(self, client: "redis.Redis") -> None:
        for name in self.names:
            client.set(name, "1")


class ForgedAgain(Forged):
    def meanwhile(self, client: "redis.Redis") -> None:
        self.before(client)
        time.sleep(0.01)


class WrongTypes(Trouble):
    def before(self, client: "redis.Redis") -> None:
        for number, name in enumerate(self.names):
            if number % 2:
                client.lpush(name, "done")
            else:
                client.hset(name, "done", "1")


class AnotherPassword(Trouble):
    def before(self, client: "redis.Redis") -> None:
        self.url = self.url.replace("redis://:", "redis://:not")


TROUBLES = [
    Up, Down, Killed, Hung, HangsAndGoesOn, Flushed, Evicting, Full, Forged, ForgedAgain, WrongTypes, AnotherPassword
]  # fmt: skip


@pytest.mark.parametrize("kind", TROUBLES)
async def test_one_effect_a_key_whatever_redis_does(
    arena: Arena, nursery: Nursery, valkey: ValkeyServer, kind: type[Trouble]
) -> None:
    keys = [(TYPES[n % 2], f"key {n}") for n in range(DIFFERENT)]
    async with arena.place() as place:
        jobs = keys * SAME
        random.Random(4).shuffle(jobs)
        rows = [(type, Jsonb({"key": key})) for type, key in jobs]
        async with place.conn.cursor() as cursor:
            await cursor.executemany("INSERT INTO pgqueue.jobs (type, payload) VALUES (%s, %s)", rows)
        trouble = kind(valkey, keys)
        client = redis.Redis.from_url(valkey.url)
        trouble.before(client)
        over = threading.Event()
        meanwhile = asyncio.create_task(asyncio.to_thread(trouble.go_on, client, over))
        started = time.monotonic()
        workers = [nursery.worker(place.dsn, REDIS_URL=trouble.url, **place.env) for _ in range(3)]
        try:
            while await place.value("SELECT count(*) FROM pgqueue.jobs_live"):
                assert time.monotonic() < started + 60, "\n".join(worker.told()[-2000:] for worker in workers)
                await asyncio.sleep(0.05)
        finally:
            over.set()
            await meanwhile
            trouble.after()
            client.close()
            await end(workers)
        effects = Counter([row["key"] for row in await place.rows("SELECT key FROM public.seen")])
        effects += Counter(place.sink.all("effects"))
        assert effects == {key: 1 for _, key in keys}
        ends = await place.rows("SELECT status::text, reason, result, type, payload->>'key' AS key FROM pgqueue.jobs")
        assert Counter(job["status"] for job in ends) == {"completed": DIFFERENT * SAME}
        duplicates = [job for job in ends if str(job["reason"]).startswith("duplicate of job")]
        assert len(duplicates) == DIFFERENT * (SAME - 1)
        # All that share a key have the result of the one that had the effect.
        assert all(job["result"] for job in ends)
        assert len({(job["key"], str(job["result"])) for job in ends}) == DIFFERENT


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
async def test_a_duplicate_that_redis_knows_costs_one_statement_less(
    arena: Arena, shared_valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch, warm: bool
) -> None:
    monkeypatch.setattr(idempotency, "BUDGET", 10.0)  # what is counted must not depend on the machine's mood
    app = PgQueue()

    @app.job("t", once_per=["key"])
    async def handler(key: str) -> str:
        return "done"

    async with (
        arena.place() as place,
        proxied(place.dsn) as proxy,
        worker_inside(app, place.dsn, handlers_dsn=proxy.dsn(), redis_url=shared_valkey.url) as runtime,
    ):
        # All that is asked and written for one job between its claim and its end.
        runtime.finisher.link.dsn = proxy.dsn()
        payload = {"key": f"warm {warm}"}
        [first] = await place.ended(await place.add("t", payload))
        with redis.Redis.from_url(shared_valkey.url) as client:
            name = f"pgqueue:done:{app.types['t'].effect(0, payload).key}"
            while not client.exists(name):  # noqa: ASYNC110 - another process says so
                await asyncio.sleep(0.01)
            if not warm:
                client.delete(name)
        proxy.statements.clear()
        [job] = await place.ended(await place.add("t", payload))
        assert (job["status"], job["reason"]) == ("completed", f"duplicate of job {first['id']}")
        assert job["result"] == first["result"] == "done"
        asked = ["begin" if "INSERT INTO pgqueue.effects" in text else "end" for text in proxy.statements]
        assert asked == (["end"] if warm else ["begin", "end"])


# The cache itself: quick, or no answer


@pytest.fixture
def l1(valkey: ValkeyServer, runner: asyncio.Runner) -> L1:
    async def make() -> L1:
        return L1(valkey.url)

    return runner.run(make())


async def timed(call: Any) -> tuple[Any, float]:
    started = time.perf_counter()
    answer = await call
    return answer, time.perf_counter() - started


async def test_it_says_what_it_was_told(l1: L1, valkey: ValkeyServer) -> None:
    assert not await l1.is_done("k")
    await l1.set_done("k", 7, 3600)
    assert await l1.is_done("k")
    with redis.Redis.from_url(valkey.url) as client:
        assert client.get("pgqueue:done:k") == b"7"
        assert 3500 < int(client.ttl("pgqueue:done:k")) <= 3600
        await l1.set_done("k", 8, 60)
        assert client.get("pgqueue:done:k") == b"7", "the first stays"
        await l1.forget("k")
        assert client.dbsize() == 0
    await l1.close()


async def test_any_type_at_its_key_is_a_hint(l1: L1, valkey: ValkeyServer) -> None:
    with redis.Redis.from_url(valkey.url) as client:
        client.lpush("pgqueue:done:k", "x")
    assert await l1.is_done("k")
    await l1.set_done("k", 7, 3600)
    await l1.forget("k")
    assert not await l1.is_done("k")
    await l1.close()


async def test_a_hung_server_is_waited_for_within_the_budget_and_then_not_at_all(
    l1: L1, valkey: ValkeyServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "OPEN_FOR", 1.0)
    await l1.set_done("k", 7, 3600)
    os.kill(valkey.pid, signal.SIGSTOP)
    try:
        for _ in range(FAILURES):
            answer, seconds = await timed(l1.is_done("k"))
            assert not answer
            assert BUDGET * 0.8 < seconds < BUDGET + 0.2
        assert [record.event for record in caplog.records if record.name == "pgqueue.idempotency"] == ["l1.open"]
        # The circuit is open: a thousand questions take less than one answer may.
        _, seconds = await timed(asyncio.gather(*[l1.is_done("k") for _ in range(1000)]))
        assert seconds < 0.2
        for call in (l1.set_done("k", 7, 60), l1.forget("k")):
            assert (await timed(call))[1] < 0.02
    finally:
        os.kill(valkey.pid, signal.SIGCONT)
    await asyncio.sleep(1.1)
    assert await l1.is_done("k")
    await l1.close()


async def test_failures_count_only_in_a_row(l1: L1, valkey: ValkeyServer, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(FAILURES):
        os.kill(valkey.pid, signal.SIGSTOP)
        for _ in range(FAILURES - 1):
            await l1.is_done("k")
        os.kill(valkey.pid, signal.SIGCONT)
        await asyncio.sleep(0.1)
        await l1.set_done("k", 7, 60)
        assert await l1.is_done("k")
        await l1.forget("k")
    assert "l1.open" not in [getattr(record, "event", "") for record in caplog.records]
    await l1.close()


ANSWERS = {
    "closes": b"",
    "refuses": b"-ERR no\r\n" * 9,
    "babbles": b"garbage",
    "promises too much": b"$100000000\r\n",
    "agrees to everything": b"+OK\r\n" * 9,
    "says nothing": None,
}


@pytest.mark.parametrize("answers", ANSWERS.values(), ids=ANSWERS)
async def test_a_server_that_is_no_redis_harms_nobody(answers: bytes | None) -> None:
    tasks = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        with suppress(ConnectionError):
            while answers != b"" and await reader.read(4096):
                writer.write(answers or b"")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        l1 = L1(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0")
        for _ in range(FAILURES + 1):
            for call in (l1.is_done("k"), l1.set_done("k", 1, 60), l1.forget("k")):
                assert (await timed(call))[1] < BUDGET + 0.2
        await l1.close()
        await asyncio.wait(tasks, timeout=5)


async def test_no_server_at_all() -> None:
    l1 = L1("redis://127.0.0.1:1/0")
    for _ in range(FAILURES + 1):
        answer, seconds = await timed(l1.is_done("k"))
        assert not answer
        assert seconds < BUDGET + 0.2
    await l1.close()


async def test_a_ttl_below_a_second_is_one(l1: L1, valkey: ValkeyServer) -> None:
    await l1.set_done("k", 7, 0.1)
    with redis.Redis.from_url(valkey.url) as client:
        assert client.ttl("pgqueue:done:k") == 1
    await l1.close()
