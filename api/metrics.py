"""/metrics for Prometheus.

What the queue as a whole does comes from the database, so that it outlives processes and counts what SQL inserted;
every process tells the same of it. What this process does, it counts itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from typing import NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from psycopg import errors as pg
from starlette.responses import Response

from pgqueue import snapshots, tally
from pgqueue.api.calls import Call
from pgqueue.db import Connection, is_outage
from pgqueue.errors import DatabaseUnavailable
from pgqueue.log import say

logger = logging.getLogger("pgqueue.api")

FRESH = 1.0
"""Seconds for which figures are good; ten times as long as it took to get them, if that is more."""
PATIENCE = 10.0
WORKER_STATES = ("available", "busy", "unavailable")
HOLDERS = ("session", "prepared", "slot", "standby")
QUEUES = 200
"""So many are told of one by one."""
RETRY_REASONS = ("worker_failure", "lease_timeout", "max_retries_exceeded")
SEED_BOUNDS = (1, 5, 10, 30, 60, 120, 300)
ATTEMPT_BOUNDS = (1, 2, 3, 4, 5, 8, 13)
RETRY_BOUNDS = (0, 1, 2, 3, 4, 5)


class Figures(NamedTuple):
    totals: list[tally.Total]
    backlog: list[tally.Backlog]
    fleet: list[tally.Slots]
    server: list[tally.TableSize]
    holders: list[snapshots.Holder]


class Cluster(Collector):
    """The figures of the database, got once for all who ask within a second."""

    def __init__(self, connection: Callable[[], AbstractAsyncContextManager[Connection]]) -> None:
        self._connection = connection
        self._turn = asyncio.Lock()
        self._good_until = 0.0
        self._figures: Figures | None = None
        self._watch = snapshots.Watch()
        self.looks = 0

    async def look(self) -> None:
        async with self._turn:
            begun = time.monotonic()
            if begun < self._good_until:
                return
            try:
                async with asyncio.timeout(PATIENCE):
                    self._figures = await self._read()
            except Exception as error:
                self._figures = None
                if not isinstance(error, DatabaseUnavailable | TimeoutError) and not is_outage(error):
                    say(logger, logging.ERROR, "api.metrics", f"{type(error).__name__} while figures were read")
            now = time.monotonic()
            self._good_until = now + max(FRESH, 10 * (now - begun))
            self.looks += 1

    def forget(self) -> None:
        """So that the next look is a new one."""
        self._good_until = 0.0

    async def _read(self) -> Figures:
        async with self._connection() as conn:
            # Who folds in a transaction and leaves it open stops the totals, and nothing else.
            with suppress(pg.LockNotAvailable):
                await tally.fold(conn)
            # All of one moment.
            async with conn.transaction():
                await conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
                return Figures(
                    await tally.read_totals(conn),
                    await tally.read_backlog(conn),
                    await tally.read_fleet(conn),
                    await tally.read_server(conn),
                    await self._watch.look(conn),
                )

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("pgqueue_up", "Whether the database answered.", self._figures is not None)
        if self._figures is not None:
            yield from _seven(self._figures)
            yield from _totals(self._figures.totals)
            yield from _present(self._figures)


class Metrics:
    """The registry of a process."""

    def __init__(self, cluster: Cluster, version: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.cluster = cluster
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(cluster)
        self.requests = Counter(
            "pgqueue_http_requests",
            "Requests to this process that were answered.",
            ("route", "method", "code"),
            registry=self.registry,
        )
        self.seconds = Histogram(
            "pgqueue_http_request_duration_seconds",
            "How long the requests took.",
            ("route", "method"),
            registry=self.registry,
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
        )
        self.streams = Gauge("pgqueue_sse_clients", "Open streams of this process.", registry=self.registry)
        self.connections = Gauge(
            "pgqueue_pool_connections",
            "Connections of this process to the database.",
            ("state",),
            registry=self.registry,
        )
        build = GaugeMetricFamily("pgqueue_build_info", "The version that runs.", labels=["version"])
        build.add_metric([version], 1)
        self.registry.register(_Fixed([build]))
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def count(self, route: str, method: str, code: int, seconds: float) -> None:
        self.requests.labels(route, method, str(code)).inc()
        self.seconds.labels(route, method).observe(seconds)


class _Fixed(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


async def metrics(call: Call) -> Response:
    state = call.state
    state.metrics.streams.set(state.tail.readers)
    for name, value in state.pool.sizes().items():
        state.metrics.connections.labels(name).set(value)
    await state.metrics.cluster.look()
    encode, content_type = choose_encoder(call.request.headers.get("accept", ""))
    return Response(encode(state.metrics.registry), headers={"content-type": content_type})


def _seven(figures: Figures) -> Iterator[Metric]:
    """As a scheduler before this one had them."""
    finished, took = dict.fromkeys(("completed", "failed", "timeout"), 0.0), _Buckets()
    retry = {reason: _Buckets() for reason in RETRY_REASONS}
    lost = 0.0
    for one in figures.totals:
        match one.name:
            case "finished" if one.label in finished:
                finished[one.label] += one.value
            case "lost":
                lost += one.value
            case "took" | "took_seconds":
                took.add(one)
            case "retry":
                retry[one.label].add(one)
                retry[one.label].sum += one.bucket * one.value
    states = dict.fromkeys(WORKER_STATES, 0)
    for worker in figures.fleet:
        states[worker.state] += 1
    yield _counter("jobs_total", "Jobs that have ended.", "status", finished)
    yield _gauge("workers_active", "Workers that have not ended.", "state", states)
    ready, dead = sum(one.ready for one in figures.backlog), sum(one.dead for one in figures.backlog)
    yield GaugeMetricFamily("jobs_in_queue", "Jobs that are ready to run.", ready)
    yield GaugeMetricFamily("jobs_in_dlq", "Jobs in the dead letter queue.", dead)
    text = "How long attempts ran, however they ended."
    yield HistogramMetricFamily("job_processing_duration_seconds", text, took.seconds(SEED_BOUNDS), took.sum)
    family = HistogramMetricFamily(
        "job_retry_attempts", "Which retry it was, by what made it needed.", labels=["reason"]
    )
    for reason, counts in retry.items():
        family.add_metric([reason], counts.numbers(RETRY_BOUNDS), counts.sum)
    yield family
    yield CounterMetricFamily("dts_lease_timeouts_total", "Leases that ran out because a worker died.", lost)


def _totals(totals: list[tally.Total]) -> Iterator[Metric]:
    by: dict[str, list[tally.Total]] = {}
    for one in totals:
        by.setdefault(one.name, []).append(one)
    for name, text, label, kind in (
        ("pgqueue_jobs_enqueued_total", "Jobs that were added.", None, "enqueued"),
        ("pgqueue_jobs_finished_total", "Jobs that have ended.", "status", "finished"),
        ("pgqueue_attempts_total", "Attempts that have ended.", "outcome", "ended"),
        ("pgqueue_job_retries_total", "Retries.", "reason", "retried"),
    ):
        family = CounterMetricFamily(name, text, labels=["queue", "type", *([label] if label else [])])
        for one in by.get(kind, []):
            family.add_metric([one.queue, one.type, *([one.label] if label else [])], one.value)
        yield family
    for name, text, kind in (
        ("pgqueue_lease_timeouts_total", "Leases that ran out because a worker died.", "lost"),
        ("pgqueue_dlq_entered_total", "Jobs that came into the dead letter queue.", "dead"),
    ):
        family = CounterMetricFamily(name, text, labels=["queue"])
        for one in by.get(kind, []):
            family.add_metric([one.queue], one.value)
        yield family
    yield _histogram("pgqueue_job_duration_seconds", "How long attempts ran.", ["queue", "type"], by, "took")
    yield _histogram("pgqueue_job_wait_seconds", "From due to started.", ["queue"], by, "waited")
    attempts: dict[str, _Buckets] = {}
    for one in by.get("attempts", []):
        counts = attempts.setdefault(one.queue, _Buckets())
        counts.add(one)
        counts.sum += one.bucket * one.value
    histogram = HistogramMetricFamily("pgqueue_job_attempts", "Attempts of jobs that have ended.", labels=["queue"])
    for queue, counts in attempts.items():
        histogram.add_metric([queue], counts.numbers(ATTEMPT_BOUNDS), counts.sum)
    yield histogram


def _present(figures: Figures) -> Iterator[Metric]:
    jobs = GaugeMetricFamily("pgqueue_queue_jobs", "Jobs that wait or run.", labels=["queue", "state"])
    oldest = GaugeMetricFamily(
        "pgqueue_queue_oldest_ready_seconds", "For how long the first ready job has been ready.", labels=["queue"]
    )
    paused = GaugeMetricFamily("pgqueue_queue_paused", "Whether the queue is paused.", labels=["queue"])
    dead = GaugeMetricFamily("pgqueue_dlq_jobs", "Jobs in the dead letter queue.", labels=["queue"])
    for one in figures.backlog[:QUEUES]:
        for state in ("ready", "scheduled", "retrying", "running"):
            jobs.add_metric([one.queue, state], getattr(one, state))
        oldest.add_metric([one.queue], one.oldest_ready or 0.0)
        paused.add_metric([one.queue], one.paused)
        dead.add_metric([one.queue], one.dead)
    yield from (jobs, oldest, paused, dead)
    states = dict.fromkeys(WORKER_STATES, 0)
    slots = GaugeMetricFamily("pgqueue_worker_slots", "Threads of a worker.", labels=["worker"])
    busy = GaugeMetricFamily("pgqueue_worker_slots_busy", "Threads of a worker that are in use.", labels=["worker"])
    named: dict[str, list[int]] = {}
    for worker in figures.fleet:
        states[worker.state] += 1
        sums = named.setdefault(worker.name, [0, 0])
        sums[0] += worker.threads
        sums[1] += worker.threads_used
    for name, (threads, used) in named.items():
        slots.add_metric([name], threads)
        busy.add_metric([name], used)
    yield from (_gauge("pgqueue_workers", "Workers that have not ended.", "state", states), slots, busy)
    size = GaugeMetricFamily("pgqueue_pg_table_bytes", "Size of a table with its indexes.", labels=["table"])
    rotten = GaugeMetricFamily("pgqueue_pg_dead_tuples", "Rows of a table that vacuum has to remove.", labels=["table"])
    for table in figures.server:
        size.add_metric([table.name], table.bytes)
        rotten.add_metric([table.name], table.dead)
    yield from (size, rotten)
    text = "Age of the oldest snapshot, as long as this process has watched, by what holds it: vacuum must wait for it."
    ages = dict.fromkeys(HOLDERS, 0.0)
    for holder in figures.holders:
        ages[holder.kind] = max(ages[holder.kind], holder.seconds)
    yield _gauge("pgqueue_pg_oldest_xmin_age_seconds", text, "kind", ages)
    for table in figures.server[:1]:
        text = "How full the queue of notifications is."
        yield GaugeMetricFamily("pgqueue_pg_notify_queue_usage_ratio", text, table.notify_queue)


class _Buckets:
    def __init__(self) -> None:
        self.sum = 0.0
        self._counts: dict[int, float] = {}

    def add(self, one: tally.Total) -> None:
        if one.name.endswith("_seconds"):
            self.sum += one.value
        else:
            self._counts[one.bucket] = self._counts.get(one.bucket, 0.0) + one.value

    def seconds(self, bounds: Iterable[float]) -> list[tuple[str, float]]:
        """Where a bucket is the place of its bound among those of tally."""
        return self._within((str(float(bound)), tally.BOUNDS.index(bound) + 1) for bound in bounds)

    def numbers(self, bounds: Iterable[int]) -> list[tuple[str, float]]:
        """Where a bucket is the number itself."""
        return self._within((str(float(bound)), bound) for bound in bounds)

    def _within(self, bounds: Iterable[tuple[str, int]]) -> list[tuple[str, float]]:
        within = [(text, sum(v for b, v in self._counts.items() if b <= last)) for text, last in bounds]
        return [*within, ("+Inf", sum(self._counts.values()))]


def _histogram(name: str, text: str, labels: list[str], by: dict[str, list[tally.Total]], kind: str) -> Metric:
    found: dict[tuple[str, ...], _Buckets] = {}
    for one in (*by.get(kind, []), *by.get(f"{kind}_seconds", [])):
        key: tuple[str, ...] = (one.queue, one.type) if "type" in labels else (one.queue,)
        found.setdefault(key, _Buckets()).add(one)
    family = HistogramMetricFamily(name, text, labels=labels)
    for key, counts in found.items():
        family.add_metric(key, counts.seconds(tally.BOUNDS), counts.sum)
    return family


def _counter(name: str, text: str, label: str, values: dict[str, float]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for word, value in values.items():
        family.add_metric([word], value)
    return family


def _gauge(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for word, value in values.items():
        family.add_metric([word], value)
    return family
