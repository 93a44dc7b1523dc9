"""What is measured of a peer. Each function takes a site and returns figures of one round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from tests.bench.peers import usage
from tests.bench.peers.peer import InPostgres
from tests.bench.peers.site import PATIENCE, Site, Workers

Figures = dict[str, Any]


def drain(site: Site, workers: Workers, jobs: int, job: str = "noop") -> Figures:
    """From the moment that all jobs are there to the moment that all of them are finished, and that is written."""
    with site.filled(job, jobs) as reveal:
        written = site.written()
        server, clients = usage.cpu_seconds([site.server]), usage.cpu_seconds(workers.roots)
        reveal()
        started = time.monotonic()
        site.wait(site.empty, started + PATIENCE, workers)
        seconds = time.monotonic() - started
    figures = {
        "jobs": jobs,
        "seconds": seconds,
        "jobs/s": jobs / seconds,
        "server CPU µs/job": (usage.cpu_seconds([site.server]) - server) / jobs * 1e6,
        "client CPU µs/job": (usage.cpu_seconds(workers.roots) - clients) / jobs * 1e6,
        "memory MB": usage.memory_mb(workers.roots),
    }
    if isinstance(site.peer.store, InPostgres):
        figures["WAL bytes/job"] = (site.written() - written) / jobs
    return figures


def size(rate: float, most: int, seconds: float) -> int:
    """How many jobs: `most`, fewer if they would take longer than twice the seconds, more if less than the seconds."""
    jobs = max(min(most, rate * seconds * 2), rate * seconds)
    digits = 10 ** max(0, len(str(int(jobs))) - 2)
    return max(20, round(jobs / digits) * digits)


def enqueue(site: Site, jobs: int) -> float | None:
    """Jobs per second, each committed before the next is sent."""
    found = site.produce("add", jobs)
    return jobs / found["seconds"] if found else None


def enqueue_many(site: Site, jobs: int) -> float | None:
    found = site.produce("add_many", jobs)
    return jobs / found["seconds"] if found else None


def latency(site: Site, jobs: int, rate: float) -> Figures:
    """From the return of the call that committed the job to the first line of its handler, in ms."""
    first = site.numbers(jobs)
    sent = site.produce("stamps", jobs, first, rate)["sent"]
    site.wait(lambda: len(site.starts(first, first + jobs)) == jobs, time.monotonic() + PATIENCE)
    starts = site.starts(first, first + jobs)
    times = [(starts[number][0] - after) * 1000 for number, _, after in sent]
    whole = [(starts[number][0] - before) * 1000 for number, before, _ in sent]
    span = max(after for *_, after in sent) - min(before for _, before, _ in sent)
    return {
        **percentiles(times),
        "from the call": percentiles(whole),
        "jobs/s": jobs / span,
    }


def lateness(site: Site, jobs: int, seconds: float) -> Figures:
    """How late jobs with a time start, in ms."""
    first = site.numbers(jobs)
    due = site.produce("schedule", jobs, first, seconds)["due"]
    site.wait(lambda: len(site.starts(first, first + jobs)) == jobs, time.monotonic() + PATIENCE)
    starts = site.starts(first, first + jobs)
    return percentiles([(starts[int(number)][0] - at) * 1000 for number, at in due.items()])


def percentiles(values: Sequence[float]) -> Figures:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": cuts[49], "p95": cuts[94], "p99": cuts[98], "max": max(values)}
