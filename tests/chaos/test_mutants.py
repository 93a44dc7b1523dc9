"""The scenarios can see what they look for. That each passes without the fault is what test_minute.py shows."""

import asyncio

import pytest

from tests.chaos.registry import load
from tests.chaos.runner import run_all
from tests.mutants import MUTANTS


@pytest.mark.filterwarnings("default")
def test_unsorted_batches_are_deadlocks(monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS["M5"].apply(monkeypatch.setattr)

    async def run() -> list[dict[str, object]]:
        return [line async for line in run_all([load()["C40"]], "minute", 7)]

    [line] = asyncio.run(run())
    assert line["ok"] is False
    assert line["deadlocks"], line
