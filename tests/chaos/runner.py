"""Runs scenarios: those that want the machine alone one after the other, the others three at a time."""

import asyncio
import json
import time
import traceback
from collections.abc import AsyncIterator, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.chaos.lab import Lab, Scale, Suite
from tests.chaos.registry import Scenario
from tests.chaos.verdict import Skipped, Verdict

AT_A_TIME = 3
RESULTS = Path(__file__).parent / "results.jsonl"


async def run_all(
    scenarios: Iterable[Scenario], scale: Scale, seed: int, minutes: float = 3
) -> AsyncIterator[dict[str, Any]]:
    """Yields the line of each as soon as it has ended."""
    scenarios = list(scenarios)
    places = asyncio.Semaphore(AT_A_TIME)
    async with Suite.started() as suite:
        suite.minutes = minutes

        async def beside(scenario: Scenario) -> dict[str, Any]:
            async with places:
                return await run(suite, scenario, scale, seed)

        together = [asyncio.create_task(beside(each)) for each in scenarios if not each.alone]
        try:
            for done in asyncio.as_completed(together):
                yield await done
            for scenario in scenarios:
                if scenario.alone:
                    yield await run(suite, scenario, scale, seed)
        finally:
            for task in together:
                task.cancel()
            await asyncio.gather(*together, return_exceptions=True)


async def run(suite: Suite, scenario: Scenario, scale: Scale, seed: int) -> dict[str, Any]:
    started = time.monotonic()
    budget = scenario.budget * (10 if scale == "long" else 1)
    verdict = Verdict()
    try:
        async with Lab.opened(suite, scenario.name, scale, seed) as lab:
            try:
                async with asyncio.timeout(budget):
                    verdict = await scenario.body(lab)
            finally:
                seconds = time.monotonic() - started
    except Skipped as missing:
        verdict.skipped = str(missing)
    except Exception as error:
        traceback.print_exception(error)
        verdict.problems.append(f"{type(error).__name__}: {error}"[:2000])
    suite.failed = suite.failed or verdict.ok is False
    line = {"test": scenario.name, "scale": scale, "seed": seed, "ok": verdict.ok}
    when = {"seconds": round(seconds, 1), "at": datetime.now(UTC).isoformat(timespec="seconds")}
    return line | verdict.line() | when


def append(line: dict[str, Any], file: Path = RESULTS) -> None:
    with file.open("a") as output:
        output.write(json.dumps(line) + "\n")
