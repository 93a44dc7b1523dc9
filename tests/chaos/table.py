"""The table of README.md, made from the lines that runs have left."""

import json
from pathlib import Path
from typing import Any

from tests.chaos.registry import Scenario, natural
from tests.chaos.runner import RESULTS

README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
SCALES = ("minute", "normal", "long")
TOLD = ("lost", "duplicated", "unexpected", "recovered")
LEFT_OUT = {
    "test",
    "scale",
    "seed",
    "ok",
    "n",
    "faults",
    *TOLD,
    "problems",
    "skipped",
    "seconds",
    "at",
    "statuses",
    "failed_for",
}


def write(scenarios: dict[str, Scenario]) -> None:
    """Keeps of each scenario the latest line of each scale, and shows the one of the largest."""
    latest = {}
    for text in RESULTS.read_text().splitlines():
        line = json.loads(text)
        latest[line["test"], line["scale"]] = line
    lines = sorted(latest.values(), key=lambda line: (natural(line["test"]), SCALES.index(line["scale"])))
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = {line["test"]: line for line in lines}
    head = "| | what is done | what must hold | latest figures | s |\n|---|---|---|---|---|\n"
    rows = "".join(row(each, shown.get(each.name)) for each in scenarios.values())
    before, _, rest = README.read_text().partition(BEGIN)
    README.write_text(f"{before}{BEGIN}\n{head}{rows}{END}{rest.partition(END)[2]}")


def row(scenario: Scenario, line: dict[str, Any] | None) -> str:
    figures = "not run yet" if line is None else told(line)
    seconds = "" if line is None else f"{line['seconds']:.0f}"
    return f"| {scenario.name} | {scenario.title} | {scenario.invariant} | {figures} | {seconds} |\n"


def told(line: dict[str, Any]) -> str:
    parts = [f"{line['scale']}, seed {line['seed']}, n {line['n']:,}"]
    if line["faults"]:
        parts.append(", ".join(f"{count} {what}" for what, count in line["faults"].items()))
    parts.append(", ".join(f"{name} {line[name]}" for name in TOLD))
    parts += [f"{name} {value}" for name, value in line.items() if name not in LEFT_OUT and value is not None]
    if line.get("skipped"):
        return f"**skipped**: {line['skipped']}"
    if not line["ok"]:
        parts.append("**FAILED**: " + "; ".join(line["problems"]))
    return "; ".join(parts).replace("|", "/").replace("\n", " ")
