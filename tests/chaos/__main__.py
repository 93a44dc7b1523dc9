"""python -m tests.chaos [--minute | --long] [--seed N] [NAME …], python -m tests.chaos soak --minutes 30"""

import argparse
import json
import random
import signal
import sys

import uvloop

from tests.chaos import table
from tests.chaos.registry import Scenario, load
from tests.chaos.runner import append, run_all


def main() -> int:
    scenarios = load()
    parser = argparse.ArgumentParser("tests.chaos", description="Breaks everything and counts what became of the jobs.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(scenarios)}")
    parser.add_argument("--minute", dest="scale", action="store_const", const="minute", default="normal")
    parser.add_argument("--long", dest="scale", action="store_const", const="long")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--table", action="store_true", help="only write the table of README.md from the results")
    parser.add_argument("--minutes", type=float, default=3, help="of the soak")
    arguments = parser.parse_args()
    arguments.names = ["C36" if name == "soak" else name for name in arguments.names]
    if arguments.table:
        table.write(scenarios)
        return 0
    if unknown := set(arguments.names) - set(scenarios):
        parser.error(f"no such scenario: {', '.join(sorted(unknown))}")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)  # whoever ends it, its servers must end, too
    chosen = [each for each in scenarios.values() if is_meant(each, arguments.names, arguments.scale)]
    return uvloop.run(report(chosen, arguments.scale, arguments.seed, arguments.minutes))


def is_meant(scenario: Scenario, names: list[str], scale: str) -> bool:
    if names:
        return scenario.name in names
    return not scenario.named_only and (scenario.minute or scale != "minute")


async def report(scenarios: list[Scenario], scale: str, seed: int, minutes: float) -> int:
    print(f"seed {seed}", file=sys.stderr)
    failed = 0
    async for line in run_all(scenarios, scale, seed, minutes):  # type: ignore[arg-type]
        print(json.dumps(line), flush=True)
        append(line)
        failed += line["ok"] is False
        if line["skipped"]:
            print(f"{line['test']} was skipped: {line['skipped']} (make tools)", file=sys.stderr)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
