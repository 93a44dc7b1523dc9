"""Statements touch rows and pages in proportion to what they take, in whatever state the table is.

Each operation runs on a table that was planned for while it was empty and has been filled since, on a full one, and on
one that is bloated: many thousands of jobs came and went while somebody held a snapshot, so that nothing could be
cleaned away. Everything is rolled back, so that each finds the table as it was.
"""

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID, uuid4

import psycopg
import pytest

from pgqueue import claim, finish, promote, read, rescue, workers
from pgqueue.db import Connection
from pgqueue.embedded import PostgresServer
from pgqueue.job import Lease, Status
from pgqueue.sql import SQL
from tests.conftest import TEMPLATE
from tests.db.plans import Seen, watching
from tests.db.queue import MiniWorker

BATCH = 100
ROWS = 5 * BATCH
"""A claim reads its rows to lock them and once more to write them."""
PAGES = 40 * BATCH
"""A row that moves is found, locked and written, and so are its entries in three or four indexes of three levels."""
LONG_AGO = "'2020-01-01+00'"

_numbers = count(1)


@dataclass
class Scene:
    """A database in some state, and what a worker that has been there for long remembers of it."""

    dsn: str
    worker: UUID = field(default_factory=uuid4)
    dead: UUID = field(default_factory=uuid4)
    floors: dict[tuple[str, int], int] = field(default_factory=dict)
    due: promote.DueFloor = field(default_factory=promote.DueFloor)


@contextmanager
def database(server: PostgresServer) -> Iterator[tuple[Scene, psycopg.Connection]]:
    name = f"plans_{next(_numbers)}"
    with psycopg.connect(server.dsn, autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}")
        try:
            dsn = urlsplit(server.dsn)._replace(path=f"/{name}").geturl()
            with psycopg.connect(dsn, autocommit=True) as conn:
                # Only the test says when the table is cleaned and analysed.
                for table in ("jobs_live", "jobs_failed", "workers"):
                    conn.execute(f"ALTER TABLE pgqueue.{table} SET (autovacuum_enabled = off)")
                scene = Scene(dsn)
                conn.execute(*hired(scene.worker))
                yield scene, conn
        finally:
            admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


def hired(worker: UUID) -> tuple[Any, list[Any]]:
    statement = """
        INSERT INTO pgqueue.workers (id, name, host, pid, version, threads, expires_at)
        VALUES (%s, 'w', 'h', 1, '0', 8, now() + interval '1 day')
    """
    return statement, [worker]


def fill(conn: psycopg.Connection, scene: Scene, size: int) -> None:
    """Jobs in every state, most of them pending; the triggers are spared."""
    conn.execute("SET session_replication_role = replica")
    for columns, values, rows in (
        ("queue", "CASE n % 10 WHEN 0 THEN 'mail' WHEN 1 THEN 'reports' ELSE 'default' END", size),
        ("type, parked", "'foreign', true", size // 50),
        ("status, run_at", f"'scheduled', {LONG_AGO}::timestamptz + n * interval '1 s'", 5 * BATCH),
        ("status, run_at", "'scheduled', now() + n * interval '1 min'", size // 10),
        ("status, lease_token, worker_id", f"'running', gen_random_uuid(), '{scene.dead}'", 3 * BATCH),
        (
            "status, lease_token, worker_id, cancel_requested_at",
            f"'running', gen_random_uuid(), '{scene.worker}', CASE WHEN n <= 5 THEN now() END",
            size // 200,
        ),
        ("status, started_at, finished_at", "'completed', now(), now() - n % 2 * interval '1 day'", size // 5),
        ("status, started_at, finished_at", "'failed', now(), now() - n * interval '1 s'", size // 10),
    ):
        names, given = (f"type, {columns}", f"'t', {values}") if "type" not in columns else (columns, values)
        conn.execute(f"INSERT INTO pgqueue.jobs ({names}) SELECT {given} FROM generate_series(1, {rows}) n")
    conn.execute("RESET session_replication_role")


def drain(conn: psycopg.Connection, scene: Scene, size: int) -> None:
    """Some that are due, and many that are pending, come and go. The scene remembers how far it got."""
    conn.execute(
        "INSERT INTO pgqueue.jobs (type, status, run_at)"
        f" SELECT 't', 'scheduled', {LONG_AGO}::timestamptz + n * interval '1 ms'"
        f" FROM generate_series(1, {size // 5}) n"
    )
    while (row := conn.execute(SQL.promote, {"floor": scene.due.run_at, "limit": 5000}).fetchone()) and row[0]:
        scene.due.run_at = row[1]
    conn.execute(f"INSERT INTO pgqueue.jobs (type) SELECT 't' FROM generate_series(1, {size})")
    lane = ("default", 0)
    scene.floors[lane] = 0
    claimant = {"types": None, "threads": 8, "limit": 5000, "worker_id": scene.worker}
    while True:
        token = uuid4()
        lanes = {"queues": [lane[0]], "priorities": [lane[1]], "floors": [scene.floors[lane]]}
        jobs = conn.execute(SQL.claim, {**claimant, **lanes, "lease_token": token}).fetchall()
        if not jobs:
            return
        scene.floors[lane] = max(job[5] for job in jobs)
        ids, ages = [job[0] for job in jobs], [0.0] * len(jobs)
        done = {"ids": ids, "tokens": [token] * len(ids), "threads": [1] * len(ids), "results": None, "patience": None}
        conn.execute(SQL.complete, {**done, "started_ago": ages, "ended_ago": ages})


@pytest.fixture(scope="module")
def full(server: PostgresServer) -> Iterator[Scene]:
    with database(server) as (scene, conn):
        fill(conn, scene, 1_000_000 if server.version >= 18 else 100_000)
        conn.execute("VACUUM ANALYZE")
        scene.floors = {("default", 0): 0, ("mail", 0): 0, ("reports", 0): 0}
        yield scene


@pytest.fixture(scope="module")
def bloated(server: PostgresServer) -> Iterator[Scene]:
    size = 200_000 if server.version >= 18 else 50_000
    with database(server) as (scene, conn), psycopg.connect(scene.dsn) as holder:
        holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        holder.execute("SELECT count(*) FROM pgqueue.jobs")
        drain(conn, scene, size)
        conn.execute("VACUUM ANALYZE pgqueue.jobs_live")
        remains = conn.execute("SELECT pg_relation_size('pgqueue.jobs_live_pending') / 8192").fetchone()
        assert remains is not None
        assert remains[0] > size // 500, "nothing was to be cleaned away"
        fill(conn, scene, 5_000)
        yield scene


class Actor:
    """The worker of a scene on the connection of a test."""

    def __init__(self, conn: Connection, scene: Scene) -> None:
        self.conn = conn
        self.scene = scene
        self.mini = MiniWorker(conn)
        self.mini.who.worker_id = scene.worker
        self.lanes = claim.Lanes(dict(scene.floors), dict.fromkeys(scene.floors, time.monotonic()))
        self.due = promote.DueFloor(scene.due.run_at)

    async def claim(self) -> claim.Claim:
        return await claim.claim(self.conn, self.mini.who, self.lanes, BATCH)

    async def leases(self) -> list[Lease]:
        taken = await self.claim()
        return [Lease(job.id, taken.lease_token) for job in taken.jobs]


Operation = Callable[[Actor], AsyncIterator[None]]
OPERATIONS: dict[str, Operation] = {}
"""What comes before the `yield` of each is preparation, and what comes after it is watched."""


def operation(run: Operation) -> Operation:
    OPERATIONS[run.__name__] = run
    return run


@operation
async def claim_lanes(actor: Actor) -> AsyncIterator[None]:
    yield
    assert len((await actor.claim()).jobs) == BATCH


@operation
async def sweep(actor: Actor) -> AsyncIterator[None]:
    yield
    assert len((await claim.sweep(actor.conn, actor.mini.who, actor.lanes, BATCH)).jobs) == BATCH


@operation
async def claim_parked(actor: Actor) -> AsyncIterator[None]:
    yield
    assert len((await claim.claim_parked(actor.conn, actor.mini.who, BATCH)).jobs) == BATCH


@operation
async def complete(actor: Actor) -> AsyncIterator[None]:
    jobs = [finish.Completed(job.id, job.lease_token, 0.0, 0.0, 1, None) for job in await actor.leases()]
    yield
    assert len(await finish.complete(actor.conn, jobs)) == BATCH


@operation
async def retry(actor: Actor) -> AsyncIterator[None]:
    leases = await actor.leases()
    jobs = [finish.Failed(job.id, job.lease_token, 0.0, 0.0, 1, 1.0, "error", "E", "no") for job in leases]
    yield
    assert len(await finish.fail(actor.conn, jobs)) == BATCH


@operation
async def bury(actor: Actor) -> AsyncIterator[None]:
    leases = await actor.leases()
    jobs = [finish.Failed(job.id, job.lease_token, 0.0, 0.0, 1, None, "error", "E", "no") for job in leases]
    yield
    assert len(await finish.fail(actor.conn, jobs)) == BATCH


@operation
async def cancel(actor: Actor) -> AsyncIterator[None]:
    jobs = [finish.Cancelled(job.id, job.lease_token, 0.0, 0.0, 1) for job in await actor.leases()]
    yield
    assert len(await finish.cancel(actor.conn, jobs)) == BATCH


@operation
async def snooze(actor: Actor) -> AsyncIterator[None]:
    jobs = [finish.Snoozed(job.id, job.lease_token, 60.0) for job in await actor.leases()]
    yield
    assert len(await finish.snooze(actor.conn, jobs)) == BATCH


@operation
async def release(actor: Actor) -> AsyncIterator[None]:
    jobs = await actor.leases()
    yield
    assert len(await finish.release(actor.conn, jobs)) == BATCH


@operation
async def owned(actor: Actor) -> AsyncIterator[None]:
    jobs = await actor.leases()
    yield
    assert len(await finish.owned(actor.conn, jobs)) == BATCH


@operation
async def still_leased(actor: Actor) -> AsyncIterator[None]:
    jobs = await actor.leases()
    yield
    assert len(await finish.still_leased(actor.conn, jobs)) == BATCH


@operation
async def ended(actor: Actor) -> AsyncIterator[None]:
    jobs = await actor.leases()
    await finish.complete(actor.conn, [finish.Completed(job.id, job.lease_token, 0.0, 0.0, 1, None) for job in jobs])
    yield
    assert len(await finish.ended(actor.conn, jobs)) == BATCH


@operation
async def promote_due(actor: Actor) -> AsyncIterator[None]:
    yield
    assert await promote.promote(actor.conn, actor.due, BATCH) == BATCH


@operation
async def next_due(actor: Actor) -> AsyncIterator[None]:
    yield
    assert await promote.seconds_until_due(actor.conn, actor.due) is not None


@operation
async def tick(actor: Actor) -> AsyncIterator[None]:
    yield
    await workers.tick(actor.conn, actor.scene.worker, actor.due.run_at)


@operation
async def cancellations(actor: Actor) -> AsyncIterator[None]:
    yield
    assert len(await workers.cancellations(actor.conn, actor.scene.worker)) == 5


@operation
async def rescue_batch(actor: Actor) -> AsyncIterator[None]:
    yield
    assert (await rescue._batch(actor.conn, BATCH)).jobs == BATCH


@operation
async def rescue_none(actor: Actor) -> AsyncIterator[None]:
    """The usual case: everybody is alive."""
    await actor.conn.execute(*hired(actor.scene.dead))
    yield
    assert (await rescue._batch(actor.conn, BATCH)).jobs == 0


@operation
async def get_job(actor: Actor) -> AsyncIterator[None]:
    [lease, *_] = await actor.leases()
    yield
    await read.get_job(actor.conn, lease.id)


@operation
async def list_jobs(actor: Actor) -> AsyncIterator[None]:
    yield
    assert len(await read.list_jobs(actor.conn, limit=BATCH)) == BATCH


@operation
async def list_running(actor: Actor) -> AsyncIterator[None]:
    yield
    assert await read.list_jobs(actor.conn, statuses=[Status.RUNNING], limit=BATCH)


@operation
async def list_failed(actor: Actor) -> AsyncIterator[None]:
    [*_, last] = await read.list_failed(actor.conn, limit=BATCH // 2)
    yield
    assert await read.list_failed(actor.conn, before=(last.finished_at, last.id), limit=BATCH // 2)


@operation
async def count_pending(actor: Actor) -> AsyncIterator[None]:
    yield
    await actor.conn.execute(SQL.count_jobs, {"status": "pending", "queue": None, "limit": BATCH})


@operation
async def count_scheduled(actor: Actor) -> AsyncIterator[None]:
    yield
    await actor.conn.execute(SQL.count_jobs, {"status": "scheduled", "queue": None, "limit": BATCH})


@operation
async def count_running(actor: Actor) -> AsyncIterator[None]:
    yield
    await actor.conn.execute(SQL.count_jobs, {"status": "running", "queue": None, "limit": BATCH})


# What people ask now and then, planned by what the statistics say. All else must not need them.
ASKED = {"list_running", "list_failed", "count_pending", "count_scheduled", "count_running"}
# These look at a whole lane or index from its beginning, so they wade while a snapshot is held. The sweep knows it, and
# stays below its share of the time; the others are what people ask now and then.
WADING = {"sweep", "list_running", "count_pending", "count_scheduled", "count_running"}


async def watched(actor: Actor, name: str) -> Seen:
    async with actor.conn.transaction(force_rollback=True):
        steps = OPERATIONS[name](actor)
        await anext(steps)
        async with watching(actor.conn) as seen:
            with suppress(StopAsyncIteration):
                await anext(steps)
    return seen


def check(name: str, seen: Seen, *, wading: bool = False) -> None:
    nodes = [(node["Node Type"], node.get("Index Name", node["Relation Name"])) for node in seen.scans()]
    what = f"{name} read {seen.rows} rows and {seen.pages} pages: {nodes}"
    assert nodes, f"nothing was seen of {name}"
    assert ("Seq Scan", "jobs_live") not in nodes, what
    # The list of what runs may be sorted: there are never more of them than the workers have threads.
    assert seen.rows <= ROWS or name == "list_running", what
    assert wading or seen.pages <= PAGES, what
    assert not seen.jitted, what


@pytest.mark.parametrize("name", OPERATIONS)
async def test_full(full: Scene, name: str) -> None:
    async with await psycopg.AsyncConnection.connect(full.dsn, autocommit=True) as conn:
        check(name, await watched(Actor(conn, full), name))


@pytest.mark.parametrize("name", OPERATIONS)
async def test_bloated(bloated: Scene, name: str) -> None:
    async with await psycopg.AsyncConnection.connect(bloated.dsn, autocommit=True) as conn:
        check(name, await watched(Actor(conn, bloated), name), wading=name in WADING)


@pytest.mark.parametrize("analysed", [False, True], ids=["unknown", "known_as_empty"])
async def test_filled_since_it_was_planned_for(server: PostgresServer, analysed: bool) -> None:
    """The session planned while the table was empty; what the statistics say of it is nothing, or that it is empty."""
    with database(server) as (scene, filler):
        if analysed:
            filler.execute("VACUUM ANALYZE")
        scene.floors = {("default", 0): 0}
        async with await psycopg.AsyncConnection.connect(scene.dsn, autocommit=True) as conn:
            for name in OPERATIONS:
                with suppress(AssertionError, ValueError):  # there is nothing to take
                    seen = await watched(Actor(conn, scene), name)
                    assert seen.pages <= PAGES
            fill(filler, scene, 200_000 if server.version >= 18 else 50_000)
            for name in OPERATIONS.keys() - ASKED:
                check(name, await watched(Actor(conn, scene), name))


async def test_a_flood_of_jobs_that_nobody_knows_is_seen_once(conn: Connection) -> None:
    """They stand at the head of the lane. Each claim parks a batch of them, and then they are out of the way."""
    flood, batch = 100_000, 1000
    await conn.execute("SET session_replication_role = replica")
    await conn.execute(f"INSERT INTO pgqueue.jobs (type) SELECT 'unknown' FROM generate_series(1, {flood})")
    await conn.execute(f"INSERT INTO pgqueue.jobs (type) SELECT 'known' FROM generate_series(1, {3 * BATCH})")
    worker = await MiniWorker(conn, types=["known"]).register()
    worker.lanes.floors[("default", 0)] = 0
    for _ in range(flood // batch):
        taken = await claim.claim(conn, worker.who, worker.lanes, batch)
        assert all(job.parked for job in taken.jobs)
        assert len(taken.jobs) == batch
    for _ in range(3):
        async with watching(conn) as seen:
            taken = await claim.claim(conn, worker.who, worker.lanes, BATCH)
        assert [job.type for job in taken.jobs] == ["known"] * BATCH
        check("claim", seen)
    async with watching(conn) as seen:
        assert (await claim.claim(conn, worker.who, worker.lanes, BATCH)).jobs == []
        assert (await claim.claim_parked(conn, worker.who, BATCH)).jobs == []
    check("claim", seen)


async def test_old_steps_and_keys_are_found_without_a_scan(conn: Connection) -> None:
    """Of history and of keys there is much more than what is past its time."""
    for table, rows in (
        ("jobs_finished (id, type, status, finished_at)", "n, 't', 'completed', now()"),
        ("steps (job_id, name, created_at)", "n, 's', now() - interval '31 days' + make_interval(secs => n)"),
        ("idempotency_keys (key, job_id, fingerprint, expires_at)", "n, n, '', now() + (n - 5000) * interval '1 s'"),
    ):
        await conn.execute(f"INSERT INTO pgqueue.{table} SELECT {rows} FROM generate_series(1, 100000) n".encode())
    await conn.execute("ANALYZE")
    async with watching(conn) as seen:
        await conn.execute(SQL.prune_steps, {"days": 30.97})
        await conn.execute(SQL.prune_keys, {"limit": 5000})
    scans = [node for node in seen.nodes() if node["Node Type"] == "Seq Scan"]
    assert [n["Relation Name"] for n in scans if n["Actual Rows"] or n.get("Rows Removed by Filter")] == []
