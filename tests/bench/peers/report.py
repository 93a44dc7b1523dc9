"""The figures as tables: for the terminal, and for the docs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tests.bench.common import print_table
from tests.bench.peers.registry import PEERS

Found = dict[str, list[Any]]
"""Of each peer the figures of every round."""


@dataclass(frozen=True)
class Table:
    title: str
    note: str
    head: list[str]
    rows: list[list[str]]

    def print(self) -> None:
        print_table(self.title, self.head, self.rows)

    def markdown(self) -> str:
        lines = [self.head, ["---", *("---:" for _ in self.head[1:])], *self.rows]
        body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        return f"### {self.title}\n\n{self.note}\n\n{body}\n"


@dataclass(frozen=True)
class Column:
    head: str
    measure: str
    key: str | None = None
    """Which of a round's figures; None: it has only one."""
    digits: int = 0

    def values(self, figures: dict[str, Found], peer: str) -> list[float]:
        rounds = figures.get(self.measure, {}).get(peer, [])
        values = [each if self.key is None else each.get(self.key) for each in rounds]
        return [value for value in values if value is not None]

    def cell(self, figures: dict[str, Found], peer: str) -> str:
        return spread(self.values(figures, peer), self.digits)


def spread(values: Sequence[float], digits: int = 0) -> str:
    """The median, and from where to where the rounds went."""
    if not values:
        return "–"
    texts = [f"{value:,.{digits}f}" for value in (median(values), min(values), max(values))]
    return texts[0] if len(values) == 1 else f"{texts[0]} ({texts[1]}–{texts[2]})"


def _latency(measure: str) -> list[Column]:
    return [Column(key, measure, key, 1) for key in ("p50", "p95", "p99")]


SECTIONS: list[tuple[str, str, list[Column]]] = [
    (
        "Drain",
        "No-op jobs per second, from the moment that all jobs are there to the moment that all are finished, and that"
        " is written.",
        [
            Column("jobs", "drain, 1 process", "jobs"),
            Column("1 process, jobs/s", "drain, 1 process", "jobs/s"),
            Column("2 processes, jobs/s", "drain, 2 processes", "jobs/s"),
        ],
    ),
    (
        "What a job costs",
        "During the drain by one process: CPU of the server and of the worker, write-ahead log, and the worker's memory"
        " at the end.",
        [
            Column("server, µs", "drain, 1 process", "server CPU µs/job"),
            Column("worker, µs", "drain, 1 process", "client CPU µs/job"),
            Column("WAL, bytes", "drain, 1 process", "WAL bytes/job"),
            Column("memory, MB", "drain, 1 process", "memory MB"),
        ],
    ),
    (
        "Enqueue",
        "Jobs per second by one producer: each committed before the next is sent, and by the best call for many.",
        [Column("one at a time", "enqueue, one at a time"), Column("many", "enqueue, many")],
    ),
    (
        "Latency, one job at a time",
        "Milliseconds from the return of the call that committed the job to the first line of its handler; one worker"
        " process, asleep.",
        _latency("latency, idle"),
    ),
    (
        "Latency at 1,000 jobs a second",
        "The same with 1,000 jobs sent every second, whether earlier ones are done or not; and what rate the producer"
        " reached.",
        [*_latency("latency, loaded"), Column("reached, jobs/s", "latency, loaded", "jobs/s")],
    ),
    (
        "Scheduled jobs",
        "Milliseconds from the time that a job was given to the first line of its handler.",
        _latency("scheduled"),
    ),
    (
        "32 clients that insert single rows",
        "Transactions per second of pgbench, each the SQL that the peer itself uses to add one job: while one worker,"
        " asleep at first, runs what it can; and while it has no slot free. Without a limit to its slots a peer has no"
        " figure there.",
        [
            Column("idle worker, inserts/s", "inserters, idle worker"),
            Column("busy worker, inserts/s", "inserters, busy worker"),
        ],
    ),
    (
        "A backlog",
        "One worker process beside so many pending and as many scheduled jobs: what it does, and what its claim"
        " statement takes on the server.",
        [
            Column("pending, and scheduled", "backlog", "jobs"),
            Column("jobs/s", "backlog", "jobs/s"),
            Column("ms a claim", "backlog", "ms a claim", 2),
        ],
    ),
]
SHORT = 5
"""So many of them are in the short run."""


def tables(figures: dict[str, Found]) -> list[Table]:
    found = []
    for title, note, columns in SECTIONS:
        peers = [name for name in PEERS if any(column.values(figures, name) for column in columns)]
        if peers:
            rows = [[name, *(column.cell(figures, name) for column in columns)] for name in peers]
            found.append(Table(title, note, ["", *(column.head for column in columns)], rows))
    makers = {"held snapshot": _held, "recovery, as shipped": _recovery, "features": _features}
    return found + [make(figures) for measure, make in makers.items() if measure in figures]


def _held(figures: dict[str, Found]) -> Table:
    found = figures["held snapshot"]
    parts = max(len(rounds[0]) for rounds in found.values())
    rows = [
        [name, *(f"{rate:,.0f}" for rate in found[name][0]), f"{late(found[name][0]):.2f}"]
        for name in PEERS
        if name in found
    ]
    return Table(
        "Drain while a snapshot is held",
        "Jobs per second in each tenth of a drain by one process, while a transaction that began before holds a"
        " snapshot; and the last three tenths beside the second to fourth (the first holds the wake-up).",
        ["", *(f"{number + 1}." for number in range(parts)), "late / early"],
        rows,
    )


def late(rates: Sequence[float]) -> float:
    return median(rates[-3:]) / median(rates[1:4])


def _recovery(figures: dict[str, Found]) -> Table:
    def cell(measure: str, name: str) -> str:
        rounds = figures.get(measure, {}).get(name)
        if not rounds:
            return "–"
        seconds, limit = rounds[0]["seconds"], rounds[0]["limit"]
        return f"not in {limit:.0f}" if seconds is None else f"{seconds:.1f}"

    measures = ("recovery, as shipped", "recovery, alike")
    names = [name for name in PEERS if any(name in figures.get(measure, {}) for measure in measures)]
    return Table(
        "Recovery",
        "Seconds from `kill -9` of a worker to the moment at which another worker, started at once, begins its job"
        " again: as the peer ships, and set to about half a minute where that can be set.",
        ["", "as shipped, s", "set alike, s", "by"],
        [[name, *(cell(measure, name) for measure in measures), PEERS[name].lease] for name in names],
    )


def _features(figures: dict[str, Found]) -> Table:
    found = figures["features"]
    columns = [
        Column("jobs/s", "features", "jobs/s"),
        Column("server, µs", "features", "server CPU µs/job"),
        Column("worker, µs", "features", "client CPU µs/job"),
        Column("WAL, bytes", "features", "WAL bytes/job"),
    ]
    return Table(
        "What features cost",
        "pgqueue alone, a drain by one process: jobs that use a feature beside jobs that use none.",
        ["", *(column.head for column in columns)],
        [[name, *(column.cell(figures, name) for column in columns)] for name in found],
    )
