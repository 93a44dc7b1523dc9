"""Writes the kept figures into the docs: tables into README.md, charts beside it. `python -m tests.bench.peers.docs`"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.bench.peers import charts, report
from tests.bench.peers.report import Column

HERE = Path(__file__).parents[1]
RESULTS = HERE / "results"
FULL = RESULTS / "full.json"
README = HERE / "README.md"
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"


def write(found: dict[str, Any]) -> None:
    """Replaces what is between the marks, and the charts."""
    text = README.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    README.write_text(f"{before}{BEGIN}\n{section(found)}{END}{after}")
    for name, svg in drawn(found["figures"]).items():
        (RESULTS / f"{name}.svg").write_text(svg)


def section(found: dict[str, Any]) -> str:
    about = found["machine"]
    settings = ", ".join(f"{name} {value}" for name, value in about["settings"].items())
    parts = [
        f"\nMeasured {found['at']} on {about['machine']}; {about['postgres']} ({settings}).\n",
        *(f"![{name}](results/{name}.svg)" for name in drawn(found["figures"])),
        "",
        *(table.markdown() for table in report.tables(found["figures"])),
        _peers(found),
        *([_missing(found["missing"])] if found["missing"] else []),
    ]
    return "\n".join(parts)


def _peers(found: dict[str, Any]) -> str:
    rows = [f"| {name} | {peer['version']} | {peer['settings']} |" for name, peer in found["peers"].items()]
    return "\n".join(["### Versions and settings\n", "| | version | settings |", "|---|---|---|", *rows, ""])


def _missing(missing: dict[str, str]) -> str:
    return "\n".join(["### Missing\n", *(f"- {what}: {why}" for what, why in missing.items()), ""])


def drawn(figures: dict[str, Any]) -> dict[str, str]:
    """The charts that there are figures for, by name."""
    one, two = (Column(f"{n} process{'es' if n > 1 else ''}", _drain(n), "jobs/s") for n in (1, 2))
    found = {
        "drain": charts.bars("Drain, no-op jobs per second", figures, [one, two]),
        "latency": charts.bars(
            "Commit to handler, ms",
            figures,
            [Column("p50", "latency, idle", "p50", 1), Column("p99", "latency, idle", "p99", 1)],
            least=True,
        ),
        "enqueue": charts.bars("Enqueue by the call for many, jobs per second", figures, [Column("", "enqueue, many")]),
    }
    if "held snapshot" in figures:
        series = {name: rounds[0] for name, rounds in figures["held snapshot"].items()}
        found["held"] = charts.lines("Drain while a snapshot is held, jobs per second", series, "tenths of the drain")
    if "inserters, idle worker" in figures:
        columns = [Column("idle worker", "inserters, idle worker"), Column("busy worker", "inserters, busy worker")]
        found["inserters"] = charts.bars("32 clients that insert single rows, per second", figures, columns)
    return found


def _drain(processes: int) -> str:
    return f"drain, {processes} process{'es' if processes > 1 else ''}"


if __name__ == "__main__":
    write(json.loads(FULL.read_text()))
