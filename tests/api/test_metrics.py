"""/metrics beside psql: after SQL inserts, failures, retries, lost leases, restarts and outages."""

import asyncio
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from pgqueue import rescue, tally
from pgqueue.embedded import PostgresServer
from pgqueue.sql import SQL
from tests.api.conftest import Api, api_process, until, worker_process
from tests.db.queue import MiniWorker

SEVEN = {
    "jobs_total": ("counter", "status", ["completed", "failed", "timeout"]),
    "workers_active": ("gauge", "state", ["available", "busy", "unavailable"]),
    "jobs_in_queue": ("gauge", None, []),
    "jobs_in_dlq": ("gauge", None, []),
    "job_processing_duration_seconds": ("histogram", None, []),
    "job_retry_attempts": ("histogram", "reason", ["worker_failure", "lease_timeout", "max_retries_exceeded"]),
    "dts_lease_timeouts_total": ("counter", None, []),
}
UNITS = ("_total", "_seconds", "_bytes", "_ratio", "_info")
UNITLESS = {
    "jobs_in_queue", "jobs_in_dlq", "workers_active", "job_retry_attempts", "pgqueue_up", "pgqueue_job_attempts",
    "pgqueue_queue_jobs", "pgqueue_queue_paused", "pgqueue_dlq_jobs", "pgqueue_workers", "pgqueue_worker_slots",
    "pgqueue_worker_slots_busy", "pgqueue_sse_clients", "pgqueue_pool_connections", "pgqueue_pg_dead_tuples",
}  # fmt: skip


class Scrape:
    def __init__(self, text: str) -> None:
        self.text = text
        self.families = {family.name: family for family in parse(text)}
        self.samples = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float | None:
        return self.samples.get((name, tuple(sorted(labels.items()))))

    def sum(self, name: str, **labels: str) -> float:
        return sum(v for (n, found), v in self.samples.items() if n == name and labels.items() <= dict(found).items())


def scrape(api: Api) -> Scrape:
    """Fresh: figures may be a second old."""
    if api.state is not None:
        api.state.metrics.cluster.forget()
    answer = api("GET", "/metrics", token="")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return Scrape(answer.text)


def test_the_seven_from_the_first_scrape_on(api: Api) -> None:
    found = scrape(api)
    for name, (kind, label, values) in SEVEN.items():
        family = found.families[name.removesuffix("_total")]
        assert family.type == kind, name
        suffix = "_count" if kind == "histogram" else ""
        for value in values or [None]:
            assert found(f"{name}{suffix}", **({label: value} if label and value else {})) == 0, (name, value)
    bounds = [s.labels["le"] for s in found.families["job_processing_duration_seconds"].samples if "le" in s.labels]
    assert bounds == ["1.0", "5.0", "10.0", "30.0", "60.0", "120.0", "300.0", "+Inf"]
    assert found("pgqueue_up") == 1


def test_names_units_and_help(api: Api) -> None:
    """What promtool check metrics would say."""
    api.query("INSERT INTO pgqueue.jobs (type) VALUES ('t')")
    api("GET", "/api/v1/stats")
    found = scrape(api)
    for name, family in found.families.items():
        if not name.startswith(("pgqueue_", "job", "workers", "dts_")):
            continue
        full = f"{name}_total" if family.type == "counter" else name
        assert re.fullmatch(r"[a-z][a-z0-9_]*", full)
        assert full.endswith(UNITS) or full in UNITLESS, full
        assert full.endswith("_total") == (family.type == "counter"), full
        assert re.fullmatch(r"[A-Z].*\.", family.documentation), f"{full} needs help"
        assert not re.search(r"counter|gauge|histogram", name), full
        for sample in family.samples:
            assert not {"id", "payload", "path", "error"} & set(sample.labels)
    answer = api("GET", "/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert {family.name for family in parse_openmetrics(answer.text)} == set(found.families)


async def test_it_agrees_with_psql(conn: psycopg.AsyncConnection, api: Api) -> None:
    """Every way that a job can go, each a different number of times."""
    await conn.execute("INSERT INTO pgqueue.types (name, queue, schema) VALUES ('t', 'default', '{}')")
    await conn.execute(
        "INSERT INTO pgqueue.jobs (type, queue, priority) SELECT 't', 'a', 5 FROM generate_series(1, 20)"
    )
    await conn.execute(
        "INSERT INTO pgqueue.jobs (type, run_at) VALUES ('t', now() + interval '1 hour'), ('unknown', now())"
    )
    async with conn.cursor() as cursor, cursor.copy("COPY pgqueue.jobs (type, queue) FROM STDIN") as copy:
        await copy.write(b"t\ta\n" * 5)
    async with conn.transaction(force_rollback=True):
        await conn.execute("INSERT INTO pgqueue.jobs (type, queue) VALUES ('t', 'a')")
    for _ in range(2):
        await asyncio.to_thread(api, "POST", "/api/v1/jobs", {"type": "t", "queue": "a", "idempotency_key": "k"})
    worker = await MiniWorker(conn).register()
    jobs = await worker.claim(12)
    await worker.complete(jobs[:4])
    await worker.fail(jobs[4:7], delay=60)
    await worker.fail(jobs[7:9], delay=None)
    await conn.execute("UPDATE pgqueue.workers SET expires_at = now() - interval '1 s'")
    await rescue.rescue(conn)
    pending = [
        id
        for (id,) in await (await conn.execute("SELECT id FROM pgqueue.jobs_live WHERE status = 'pending'")).fetchall()
    ]
    await conn.execute("SELECT pgqueue.cancel_job(%s)", [pending[-1]])
    await conn.execute("SELECT pgqueue.retry_job(%s)", [jobs[8].id])
    await conn.execute("SELECT pgqueue.pause_queue('a', 'test')")
    found = await asyncio.to_thread(scrape, api)

    async def value(statement: str) -> Any:
        row = await (await conn.execute(statement)).fetchone()
        assert row is not None
        return row[0]

    everything = await value("SELECT count(*) FROM pgqueue.jobs")
    assert found.sum("pgqueue_jobs_enqueued_total") == everything == 28
    assert found("pgqueue_jobs_enqueued_total", queue="a", type="t") == 26
    assert found("pgqueue_jobs_enqueued_total", queue="default", type="(other)") == 1
    for status in ("completed", "cancelled"):
        stored = await value(f"SELECT count(*) FROM pgqueue.jobs WHERE status = '{status}'")
        assert found.sum("pgqueue_jobs_finished_total", status=status) == stored, status
    assert found("jobs_total", status="completed") == 4
    failures = await value("SELECT count(*) FROM pgqueue.attempts WHERE outcome = 'failed'")
    assert found("jobs_total", status="failed") == found.sum("pgqueue_dlq_entered_total") == failures == 2
    assert (
        found("jobs_in_dlq")
        == found("pgqueue_dlq_jobs", queue="a")
        == 1
        == await value("SELECT count(*) FROM pgqueue.failed_jobs")
    )
    lost = await value("SELECT count(*) FROM pgqueue.attempts WHERE reason = 'worker_lost'")
    assert found("dts_lease_timeouts_total") == found("pgqueue_lease_timeouts_total", queue="a") == lost == 3
    assert found("job_retry_attempts_count", reason="lease_timeout") == 3
    assert found("job_retry_attempts_count", reason="worker_failure") == 3
    assert found("job_retry_attempts_sum", reason="worker_failure") == 3, "each was the first retry"
    assert found("pgqueue_job_retries_total", queue="a", type="t", reason="error") == 3
    assert found("pgqueue_job_retries_total", queue="a", type="t", reason="worker_lost") == 3
    assert found("pgqueue_job_retries_total", queue="a", type="t", reason="manual") == 1
    assert found("job_processing_duration_seconds_count") == 9
    assert found("job_processing_duration_seconds_bucket", le="1.0") == 9
    assert found("pgqueue_job_wait_seconds_count", queue="a") == 9
    stats = await (await conn.execute("SELECT queue, pending, scheduled, running FROM pgqueue.queue_stats")).fetchall()
    for queue, ready, scheduled, running in stats:
        assert found("pgqueue_queue_jobs", queue=queue, state="ready") == ready
        later = found.sum("pgqueue_queue_jobs", queue=queue, state="scheduled")
        assert later + found.sum("pgqueue_queue_jobs", queue=queue, state="retrying") == scheduled
        assert found("pgqueue_queue_jobs", queue=queue, state="running") == running
    assert found("jobs_in_queue") == await value("SELECT count(*) FROM pgqueue.jobs WHERE status = 'pending'")
    assert found("pgqueue_queue_paused", queue="a") == 1
    assert found("pgqueue_queue_paused", queue="default") == 0
    assert (found("pgqueue_queue_oldest_ready_seconds", queue="a") or 0) > 0
    assert found("workers_active", state="unavailable") == 1
    assert found("pgqueue_job_attempts_count", queue="a") == 6
    assert (found("pgqueue_pg_table_bytes", table="jobs_live") or 0) > 0
    assert await value("SELECT count(*) FROM pgqueue.tallies") == 0


def test_exhausted_attempts(api: Api, dsn: str) -> None:
    """A real worker, whose job fails until it is dead."""
    ids = [api("POST", "/submit_job", {"name": "default", "payload": "invalid_job", "max_retries": 1}).json["id"]]
    ids += [
        api("POST", "/submit_job", {"name": "add_numbers", "payload": {"x": 1, "y": 2}}).json["id"] for _ in range(3)
    ]
    with worker_process(dsn):
        until(lambda: scrape(api)("workers_active", state="available") == 1)
        until(lambda: api.value("SELECT count(*) FROM pgqueue.jobs WHERE finished_at IS NOT NULL") == 4, 30)
        found = scrape(api)
        assert found("pgqueue_jobs_finished_total", queue="default", type="add_numbers", status="completed") == 3
        assert found("jobs_total", status="failed") == 1
        assert found("job_retry_attempts_count", reason="max_retries_exceeded") == 1
        assert found("job_retry_attempts_sum", reason="max_retries_exceeded") == 1
        assert found("pgqueue_attempts_total", queue="default", type="default", outcome="retried") == 1
        assert found("pgqueue_attempts_total", queue="default", type="default", outcome="failed") == 1
        assert found.sum("pgqueue_worker_slots") == 8
    assert scrape(api)("workers_active", state="available") == 0


def test_totals_outlive_processes_and_history(dsn: str) -> None:
    totals = []
    for _ in range(2):
        with api_process(dsn) as (api, process):
            api.query("INSERT INTO pgqueue.jobs (type) SELECT 't' FROM generate_series(1, 10)")
            api.query("SELECT pgqueue.cancel_job(id) FROM pgqueue.jobs WHERE status = 'pending' LIMIT 3")
            found = scrape(api)
            totals.append((found.sum("pgqueue_jobs_enqueued_total"), found.sum("pgqueue_jobs_finished_total")))
            assert process.end(signal.SIGKILL) == -9
            with psycopg.connect(dsn, autocommit=True) as conn:
                conn.execute("DELETE FROM pgqueue.jobs WHERE status = 'cancelled'")
    assert totals == [(10, 3), (20, 6)]


def test_without_the_database(server: PostgresServer, dsn: str, serve: Callable[..., Any]) -> None:
    name = dsn.rpartition("/")[2]
    with serve() as api:
        assert scrape(api)("pgqueue_up") == 1
        with psycopg.connect(server.dsn, autocommit=True) as admin:
            admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
            admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
            found = scrape(api)
            assert found("pgqueue_up") == 0
            assert found("jobs_in_queue") is None, "nothing that is not known"
            assert (found("pgqueue_http_requests_total", route="/metrics", method="GET", code="200") or 0) >= 1
            assert "process_resident_memory_bytes" in found.text
            admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
        until(lambda: scrape(api)("pgqueue_up") == 1)


def test_the_oldest_snapshot_has_its_kind(api: Api, dsn: str) -> None:
    name = "pgqueue_pg_oldest_xmin_age_seconds"
    with psycopg.connect(dsn) as holder, psycopg.connect(dsn, autocommit=True) as other:
        holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        holder.execute("SELECT 1")
        other.execute("SELECT pg_current_xact_id()")
        scrape(api)
        time.sleep(0.2)
        found = scrape(api)
        assert 0.2 <= (found(name, kind="session") or 0) < 60
        assert {found(name, kind=kind) for kind in ("prepared", "slot", "standby")} == {0}


def test_who_leaves_a_fold_open_stops_the_totals_and_nothing_else(api: Api, dsn: str) -> None:
    with psycopg.connect(dsn) as auditor, psycopg.connect(dsn, autocommit=True) as producer:
        auditor.execute("SELECT pgqueue.fold()")
        producer.execute("INSERT INTO pgqueue.jobs (type) VALUES ('t')")
        found = scrape(api)
        assert found("pgqueue_up") == 1
        assert found("jobs_in_queue") == 1
        auditor.rollback()
        assert scrape(api).sum("pgqueue_jobs_enqueued_total") == 1


def test_a_storm_of_scrapes_costs_one_look(api: Api) -> None:
    assert api.state
    scrape(api)
    before, begun = api.state.metrics.cluster.looks, time.monotonic()
    threads = [threading.Thread(target=api, args=("GET", "/metrics"), kwargs={"token": ""}) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert api.state.metrics.cluster.looks - before <= time.monotonic() - begun + 2


def test_requests_are_counted_by_route(api: Api) -> None:
    for id in (1, 2, 3):
        api("GET", f"/jobs/{id}")
    api("GET", "/nowhere/secret")
    api("BREW", "/jobs")
    found = scrape(api)
    assert found("pgqueue_http_requests_total", route="/jobs/{id}", method="GET", code="404") == 3
    assert found("pgqueue_http_request_duration_seconds_count", route="/jobs/{id}", method="GET") == 3
    assert found("pgqueue_http_requests_total", route="-", method="GET", code="404") == 1
    assert "secret" not in found.text
    assert "BREW" not in found.text


def test_names_of_strangers_are_bounded(api: Api) -> None:
    api.query("INSERT INTO pgqueue.jobs (type, queue) SELECT 'x' || i, 'q' || i FROM generate_series(1, 500) i")
    found = scrape(api)
    assert found.sum("pgqueue_jobs_enqueued_total") == 500
    assert found("pgqueue_jobs_enqueued_total", queue="(other)", type="(other)") == 300
    assert api.value("SELECT count(*) FROM pgqueue.totals") <= 201
    assert len({dict(labels).get("queue") for _, labels in found.samples}) <= 202
    assert found("jobs_in_queue") == 500


async def test_buckets(conn: psycopg.AsyncConnection) -> None:
    row = await (await conn.execute("SELECT pgqueue.bounds()")).fetchone()
    assert row is not None
    assert tuple(row[0]) == tally.BOUNDS
    for seconds, bucket in ((0, 1), (0.005, 1), (0.0051, 2), (1, 8), (1.001, 9), (3600, 17), (3601, 18)):
        cursor = await conn.execute("SELECT pgqueue.bucket(%s)", [float(seconds)])
        assert await cursor.fetchone() == (bucket,), seconds


async def test_two_folds_at_once_count_once(conn: psycopg.AsyncConnection, dsn: str) -> None:
    async def fold() -> None:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as other:
            for _ in range(10):
                await other.execute("INSERT INTO pgqueue.jobs (type) VALUES ('t')")
                await tally.fold(other, wait=uuid4().int % 2 == 0)

    await asyncio.gather(*[fold() for _ in range(8)])
    await tally.fold(conn)
    assert sum(one.value for one in await tally.read_totals(conn) if one.name == "enqueued") == 80


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read", "serializable"])
async def test_a_fold_that_waited_for_another(conn: psycopg.AsyncConnection, dsn: str, isolation: str) -> None:
    await conn.execute("INSERT INTO pgqueue.jobs (type) VALUES ('t')")
    async with (
        await psycopg.AsyncConnection.connect(dsn) as first,
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as second,
    ):
        await second.execute(f"SET default_transaction_isolation = '{isolation}'".encode())
        await first.execute("SELECT pgqueue.fold()")
        folding = asyncio.create_task(tally.fold(second))
        waits = b"SELECT 1 FROM pg_locks WHERE NOT granted AND pid = %d" % second.info.backend_pid
        while not await (await conn.execute(waits)).fetchone():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await first.commit()
        assert await folding == 0
    assert sum(one.value for one in await tally.read_totals(conn) if one.name == "enqueued") == 1


def test_percentiles() -> None:
    assert tally.percentile([], 0.5) is None
    assert tally.percentile([(8, 100)], 0.5) == 0.75
    assert tally.percentile([(1, 99), (18, 1)], 0.95) == 0.005 * 95 / 99
    assert tally.percentile([(18, 1)], 0.5) == 3600


async def test_stats_and_series(conn: psycopg.AsyncConnection, api: Api) -> None:
    await conn.execute("INSERT INTO pgqueue.jobs (type, queue) SELECT 't', 'a' FROM generate_series(1, 6)")
    await conn.execute("INSERT INTO pgqueue.jobs (type, queue) SELECT 't', 'b' FROM generate_series(1, 2)")
    worker = await MiniWorker(conn).register()
    jobs = [job for job in await worker.claim() if job.queue == "a"]
    await worker.complete(jobs[:3])
    await worker.fail(jobs[3:4], delay=None)

    def look() -> None:
        stats = api("GET", "/api/v1/stats").json
        assert stats["totals"]["enqueued"] == 8
        assert stats["queues"]["a"] | {"waited": None, "took": None} == {
            "enqueued": 6, "completed": 3, "failed": 1, "cancelled": 0, "retried": 0, "lost": 0, "waited": None,
            "took": None,
        }  # fmt: skip
        assert 0 < stats["queues"]["a"]["waited"]["p95"] < 30
        assert stats["queues"]["b"]["waited"]["p95"] is None
        for path, enqueued in (
            ("", 8),
            ("?queue=a", 6),
            ("?range=86400", 8),
            ("?range=2592000", 8),
            ("?queue=none", 0),
        ):
            found = api("GET", f"/api/v1/stats/series{path}").json
            assert sum(point["enqueued"] for point in found["data"]) == enqueued, path
            assert sum(point["completed"] for point in found["data"]) == (3 if enqueued else 0)
            assert 2 <= len(found["data"]) <= 300
        times = [point["at"] for point in api("GET", "/api/v1/stats/series?range=3600&step=60").json["data"]]
        assert len(times) == 60
        assert times == sorted(times)
        confined = api.make_token("jobs:read", queues=["b*"])
        mine = api("GET", "/api/v1/stats/series", token=confined).json
        assert sum(point["enqueued"] for point in mine["data"]) == 2
        for bad in ("?range=1", "?step=61", "?step=60&range=864000", "?range=x"):
            assert api("GET", f"/api/v1/stats/series{bad}").status == 422, bad

    await asyncio.to_thread(look)


def test_series_are_bounded_and_pruned(api: Api) -> None:
    """A month of everything, twenty queues: as large as it gets."""
    api.query(
        "INSERT INTO pgqueue.series SELECT p.step, date_bin(make_interval(secs => p.step), now(), '2000-01-01')"
        " - make_interval(secs => p.step * i), 'q' || q, n, b, 1"
        " FROM (VALUES (60, 1440), (3600, 2000)) p(step, most) CROSS JOIN generate_series(0, p.most) i"
        " CROSS JOIN generate_series(1, 20) q"
        " CROSS JOIN (VALUES ('enqueued', 0), ('completed', 0), ('waited', 1), ('waited', 8)) v(n, b)"
    )
    begun = time.monotonic()
    day = api("GET", "/api/v1/stats/series?range=86400&step=60").json["data"]
    month = api("GET", "/api/v1/stats/series?range=2592000&step=3600").json["data"]
    assert time.monotonic() - begun < 20
    assert [point["enqueued"] for point in day[:-1]] == [20] * 1439
    assert [point["enqueued"] for point in month[:-1]] == [20] * 719
    api.query(SQL.prune_series.replace("%(days)s", "30"))
    left = api.query("SELECT step, count(DISTINCT at) FROM pgqueue.series GROUP BY 1 ORDER BY 1")
    assert left == [(60, 1441), (3600, 720)] or left == [(60, 1441), (3600, 721)]
