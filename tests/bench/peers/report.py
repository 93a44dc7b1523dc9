"""The figures as tables: for the terminal, and for the docs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
]


def tables(figures: dict[str, Found]) -> list[Table]:
    found = []
    for title, note, columns in SECTIONS:
        peers = [name for name in PEERS if any(column.values(figures, name) for column in columns)]
        if peers:
            rows = [[name, *(column.cell(figures, name) for column in columns)] for name in peers]
            found.append(Table(title, note, ["", *(column.head for column in columns)], rows))
    return found


def beside(figures: dict[str, Found], measure: str, key: str | None, of: str, pick: Callable[..., float]) -> float:
    """Ours beside another one's; `pick` makes one figure of the rounds'."""
    column = Column("", measure, key)
    return pick(column.values(figures, "pgqueue")) / pick(column.values(figures, of))
