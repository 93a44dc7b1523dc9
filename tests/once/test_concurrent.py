"""Many at once with the same key: one job, one effect, one answer; whatever Redis does meanwhile.

Submissions come over HTTP, by pgqueue.add_job, by plain INSERT and from Python. Executions are jobs with the same
`once_per`, on three worker processes, beside a Redis that is up, away, hung, flushed, full, forged or killed meanwhile.
"""

import asyncio
import json
import os
import random
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
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
from tests.api.conftest import Api, api_process
from tests.once import handlers
from tests.once.arena import Arena, Place, started_valkey
from tests.once.inside import worker_inside
from tests.once.nursery import Nursery, Process
from tests.once.proxy import proxied

# Submissions

KEYS = 100
TIMES = 100
CLIENTS = 25
UNKEYED = 10
"""One submission of so many has no idempotency key: it is a job of its own, whose effect is known by its payload."""


class Http:
    """A client that keeps its connection."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, body: dict[str, Any], key: str | None = None) -> tuple[int, Any]:
        if self.streams is None:
            self.streams = await asyncio.open_connection("127.0.0.1", self.api.port)
        reader, writer = self.streams
        text = json.dumps(body)
        lines = ["POST /api/v1/jobs HTTP/1.1", "Host: localhost", f"Authorization: Bearer {self.api.token}"]
        lines += ["Content-Type: application/json", f"Content-Length: {len(text)}"]
        lines += [f"Idempotency-Key: {key}"] if key is not None else []
        writer.write("\r\n".join([*lines, "", text]).encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().partition("content-length:")[2].split()[0])
        return int(head.split()[1]), json.loads(await reader.readexactly(length))

    def close(self) -> None:
        if self.streams is not None:
            self.streams[1].close()


class Client:
    """Adds jobs by one of the doors. `idem` is their idempotency key, or None."""

    def __init__(self, conn: psycopg.AsyncConnection, app: PgQueue, http: Http) -> None:
        self.conn = conn
        self.app = app
        self.http = http
        self.doors = [self.by_function, self.by_insert, self.from_python, self.by_http, self.by_http_header]

    async def by_function(self, key: str, idem: str | None) -> int:
        query = "SELECT id FROM pgqueue.add_job('in_transaction', %s, idempotency_key => %s)"
        row = await (await self.conn.execute(query, [Jsonb({"key": key}), idem])).fetchone()
        assert row is not None
        return int(row[0])

    async def by_insert(self, key: str, idem: str | None) -> int:
        query = (
            "INSERT INTO pgqueue.jobs (type, payload, idempotency_key) VALUES ('in_transaction', %s, %s) RETURNING id"
        )
        try:
            row = await (await self.conn.execute(query, [Jsonb({"key": key}), idem])).fetchone()
        except pg.UniqueViolation:
            query = "SELECT job_id FROM pgqueue.idempotency_keys WHERE key = %s"
            row = await (await self.conn.execute(query, [idem])).fetchone()
        assert row is not None
        return int(row[0])

    async def from_python(self, key: str, idem: str | None) -> int:
        return (await self.app.types["in_transaction"].using(idempotency_key=idem).enqueue(key=key)).id

    async def by_http(self, key: str, idem: str | None) -> int:
        status, job = await self.http.post({"type": "in_transaction", "payload": {"key": key}, "idempotency_key": idem})
        assert status in (200, 201), job
        return int(job["id"])

    async def by_http_header(self, key: str, idem: str | None) -> int:
        """With a key of the request, too: the first answer to it is given again. 409: it is being made."""
        body = {"type": "in_transaction", "payload": {"key": key}, "idempotency_key": idem}
        while True:
            status, job = await self.http.post(body, idem)
            if status != 409:
                assert status in (200, 201), job
                return int(job["id"])


async def test_a_hundred_keys_a_hundred_times(arena: Arena, nursery: Nursery, valkey: ValkeyServer) -> None:
    """Over HTTP, in SQL and from Python, while Redis is up, flushed, forged, evicting, hung and, in the end, down."""
    every = [f"key-{n}" for n in range(KEYS)]
    answers: dict[str, list[int]] = defaultdict(list)
    unkeyed: list[int] = []
    async with arena.place() as place, producing(place) as app, AsyncExitStack() as stack:
        workers = [nursery.worker(place.dsn, REDIS_URL=valkey.url, **place.env) for _ in range(3)]
        api, _ = stack.enter_context(api_process(place.dsn))
        clients = []
        for _ in range(CLIENTS):
            conn = await stack.enter_async_context(await psycopg.AsyncConnection.connect(place.dsn, autocommit=True))
            http = stack.enter_context(closing(Http(api)))
            clients.append(Client(conn, app, http))

        async def submit(number: int, wanted: list[tuple[str, bool]]) -> None:
            door = clients[number].doors[number % 5]
            while wanted:
                key, known = wanted.pop()
                id = await door(key, key if known else None)
                (answers[key] if known else unkeyed).append(id)

        stages = (Up, Flushed, Forged, Evicting, Hung, Down)
        for number, kind in enumerate(stages):
            keys = every[number :: len(stages)]
            # Each key's submissions come together, so that they meet.
            wanted = [(key, n % UNKEYED > 0) for key in keys for n in range(TIMES)]
            async with trouble(kind, valkey, [("in_transaction", key) for key in keys]):
                await asyncio.gather(*(submit(number, wanted) for number in range(CLIENTS)))
                await idle(place, workers)
        await end(workers)

        assert {key: len(ids) for key, ids in answers.items()} == dict.fromkeys(every, TIMES - TIMES // UNKEYED)
        assert all(len(set(ids)) == 1 for ids in answers.values()), "one key had several answers"
        first = {ids[0] for ids in answers.values()}
        assert len(first) == KEYS
        assert len(set(unkeyed)) == len(unkeyed) == KEYS * TIMES // UNKEYED
        jobs = await place.rows("SELECT id, status::text, reason FROM pgqueue.jobs")
        assert {job["id"] for job in jobs} == first | set(unkeyed)
        assert Counter(job["status"] for job in jobs) == {"completed": len(jobs)}
        assert sum(str(job["reason"]).startswith("duplicate of job") for job in jobs) == len(unkeyed)
        seen = await place.rows("SELECT key, count(*) AS n FROM public.seen GROUP BY 1")
        assert {row["key"]: row["n"] for row in seen} == dict.fromkeys(every, 1)

        # The key remembers what it stood for, in every door.
        with pytest.raises(psycopg.Error, match="another type or payload") as error:
            await clients[0].by_function("other", "key-1")
        assert error.value.sqlstate == "PQ002"
        with pytest.raises(KeyReused):
            await clients[0].from_python("other", "key-1")
        with pytest.raises(pg.UniqueViolation, match="belongs to another job"):
            await place.conn.execute("INSERT INTO pgqueue.jobs (type, idempotency_key) VALUES ('other', 'key-1')")
        for header in ("key-1", None):
            body = {"type": "in_transaction", "payload": {"key": "other"}, "idempotency_key": "key-1"}
            assert (await clients[0].http.post(body, header))[0] == 422
        assert await place.value("SELECT count(*) FROM pgqueue.jobs") == len(jobs)


@asynccontextmanager
async def producing(place: Place) -> AsyncIterator[PgQueue]:
    app = PgQueue(place.dsn)
    app.include(handlers.app)
    try:
        yield app
    finally:
        await app.close()
        handlers.app.pools = PgQueue().pools


async def idle(place: Place, workers: list[Process], within: float = 60) -> None:
    deadline = time.monotonic() + within
    while await place.value("SELECT count(*) FROM pgqueue.jobs_live"):
        assert time.monotonic() < deadline, "\n".join(worker.told()[-2000:] for worker in workers)
        await asyncio.sleep(0.05)


async def end(workers: list[Process]) -> None:
    for worker in workers:
        worker.kill()
    for worker in workers:
        await worker.ended()


# Executions

DIFFERENT = 20
SAME = 10
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


@asynccontextmanager
async def trouble(kind: type[Trouble], valkey: ValkeyServer, keys: list[tuple[str, str]]) -> AsyncIterator[str]:
    """Redis has this trouble; yields its address."""
    trouble = kind(valkey, keys)
    over = threading.Event()
    with redis.Redis.from_url(valkey.url) as client:
        trouble.before(client)
        meanwhile = asyncio.create_task(asyncio.to_thread(trouble.go_on, client, over))
        try:
            yield trouble.url
        finally:
            over.set()
            await meanwhile
            trouble.after()


@pytest.mark.together
@pytest.mark.parametrize("kind", TROUBLES)
async def test_one_effect_a_key_whatever_redis_does(arena: Arena, nursery: Nursery, kind: type[Trouble]) -> None:
    keys = [(TYPES[n % 2], f"key {n}") for n in range(DIFFERENT)]
    async with arena.place() as place:
        jobs = keys * SAME
        random.Random(4).shuffle(jobs)
        rows = [(type, Jsonb({"key": key})) for type, key in jobs]
        async with place.conn.cursor() as cursor:
            await cursor.executemany("INSERT INTO pgqueue.jobs (type, payload) VALUES (%s, %s)", rows)
        with started_valkey() as valkey:
            async with trouble(kind, valkey, keys) as url:
                workers = [nursery.worker(place.dsn, REDIS_URL=url, **place.env) for _ in range(3)]
                try:
                    await idle(place, workers)
                finally:
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
def l1(valkey: ValkeyServer, runner: asyncio.Runner) -> Iterator[L1]:
    async def make() -> L1:
        return L1(valkey.url)

    made = runner.run(make())
    yield made
    runner.run(made.close())


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """How quick Redis is on this machine today is not what is tested."""
    monkeypatch.setattr(idempotency, "BUDGET", 10.0)


async def timed(call: Any) -> tuple[Any, float]:
    started = time.perf_counter()
    answer = await call
    return answer, time.perf_counter() - started


async def test_it_says_what_it_was_told(patient: None, l1: L1, valkey: ValkeyServer) -> None:
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


async def test_any_type_at_its_key_is_a_hint(patient: None, l1: L1, valkey: ValkeyServer) -> None:
    with redis.Redis.from_url(valkey.url) as client:
        client.lpush("pgqueue:done:k", "x")
    assert await l1.is_done("k")
    await l1.set_done("k", 7, 3600)
    await l1.forget("k")
    assert not await l1.is_done("k")


async def test_a_hung_server_is_waited_for_within_the_budget_and_then_not_at_all(
    l1: L1, valkey: ValkeyServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "OPEN_FOR", 1.0)
    with redis.Redis.from_url(valkey.url) as client:
        client.set("pgqueue:done:k", "7")
    os.kill(valkey.pid, signal.SIGSTOP)
    try:
        for _ in range(FAILURES):
            answer, seconds = await timed(l1.is_done("k"))
            assert not answer
            assert BUDGET * 0.8 < seconds < BUDGET + 3
        assert [record.event for record in caplog.records if record.name == "pgqueue.idempotency"] == ["l1.open"]
        # The circuit is open: many questions, one after the other, take much less than their answers may.
        began = time.perf_counter()
        for _ in range(100):
            await l1.is_done("k")
            await l1.set_done("k", 7, 60)
            await l1.forget("k")
        assert time.perf_counter() - began < 300 * BUDGET / 3
    finally:
        os.kill(valkey.pid, signal.SIGCONT)
    async with asyncio.timeout(20):
        while not await l1.is_done("k"):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def test_failures_count_only_in_a_row(
    patient: None,
    l1: L1,
    valkey: ValkeyServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for _ in range(FAILURES):
        os.kill(valkey.pid, signal.SIGSTOP)
        monkeypatch.setattr(idempotency, "BUDGET", BUDGET)
        for _ in range(FAILURES - 1):
            assert not await l1.is_done("k")
        os.kill(valkey.pid, signal.SIGCONT)
        monkeypatch.setattr(idempotency, "BUDGET", 10.0)
        await l1.set_done("k", 7, 60)
        assert await l1.is_done("k")
        await l1.forget("k")
    assert "l1.open" not in [getattr(record, "event", "") for record in caplog.records]


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
                assert (await timed(call))[1] < BUDGET + 3
        await l1.close()
        await asyncio.wait(tasks, timeout=5)


async def test_no_server_at_all() -> None:
    l1 = L1("redis://127.0.0.1:1/0")
    for _ in range(FAILURES + 1):
        answer, seconds = await timed(l1.is_done("k"))
        assert not answer
        assert seconds < BUDGET + 3
    await l1.close()


async def test_a_ttl_below_a_second_is_one(patient: None, l1: L1, valkey: ValkeyServer) -> None:
    with redis.Redis.from_url(valkey.url) as client:
        left: list[int] = []
        # On a busy machine it may be over before anybody looks.
        while not left or (left[-1] <= 100 and len(left) < 20):
            await asyncio.sleep(0.1 if left else 0)
            await l1.set_done("k", 7, 0.1)
            left.append(int(client.pttl("pgqueue:done:k")))
        assert 100 < left[-1] <= 1000
