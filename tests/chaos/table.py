"""The table of README.md, made from the lines that runs have left."""

import json
from pathlib import Path
from typing import Any

from tests.chaos.registry import Scenario, natural
from tests.chaos.runner import RESULTS

README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
SCALES = ("minute", "normal", "long")
BUCKETS = ("lost", "duplicated", "unexpected", "recovered")
# What every line has, or what only a failure makes interesting.
LEFT_OUT = {
    *("test", "scale", "seed", "ok", "n", "faults", *BUCKETS, "problems", "skipped", "seconds", "at"),
    *("statuses", "failed_for", "connections_max", "xmin_age_max", "rss_mb_max", "fds_max", "overdue_max"),
    *("recovery_p50", "recovery_p99", "cuts_before_and_after", "of_whole_workers"),
}
COLUMNS = ("", "what is done", "what must hold", "jobs", "faults", " / ".join(BUCKETS), "figures", "run")


def write(scenarios: dict[str, Scenario]) -> None:
    """Keeps of each scenario the latest line of each scale, and shows the one of the largest."""
    latest = {}
    for text in RESULTS.read_text().splitlines():
        line = json.loads(text)
        latest[line["test"], line["scale"]] = line
    lines = sorted(latest.values(), key=lambda line: (natural(line["test"]), SCALES.index(line["scale"])))
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = {line["test"]: line for line in lines}
    head = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n"
    rows = "".join(row(each, shown.get(each.name)) for each in scenarios.values())
    before, _, rest = README.read_text().partition(BEGIN)
    README.write_text(f"{before}{BEGIN}\n{head}{rows}{END}{rest.partition(END)[2]}")


def row(scenario: Scenario, line: dict[str, Any] | None) -> str:
    cells = [
        scenario.name,
        scenario.title,
        scenario.invariant,
        *(["not run yet", *[""] * 4] if line is None else told(line)),
    ]
    return f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in cells)} |\n"


def told(line: dict[str, Any]) -> list[str]:
    run = f"{line['scale']}, seed {line['seed']}, {line['seconds']:.0f} s, {line['at'][:16]}"
    if line["skipped"]:
        return ["**skipped**", "", "", line["skipped"], run]
    faults = ", ".join(f"{count:,} {what.replace('_', ' ')}" for what, count in line["faults"].items())
    figures = [words(name, value) for name, value in line.items() if name not in LEFT_OUT and value is not None]
    if line["recovery_p50"] is not None:
        figures.insert(0, f"recovery p50 {line['recovery_p50']:.2f} s, p99 {line['recovery_p99']:.2f} s")
    if not line["ok"]:
        figures.append("**FAILED**: " + "; ".join(line["problems"]))
    return [f"{line['n']:,}", faults, " / ".join(f"{line[name]:,}" for name in BUCKETS), "; ".join(figures), run]


def words(name: str, value: Any) -> str:
    """jobs_per_s: 161 → jobs per s 161"""
    return f"{name.replace('_', ' ')} {plain(value)}"


def plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(words(name, part) for name, part in value.items())
    if isinstance(value, list):
        return " / ".join(map(plain, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)
