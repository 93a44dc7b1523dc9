"""The fault suite, in a minute."""

import asyncio
import json

import pytest

from tests.chaos.__main__ import is_meant
from tests.chaos.registry import load
from tests.chaos.runner import run_all


@pytest.mark.filterwarnings("default")
def test_nothing_is_lost_or_done_twice_whatever_breaks() -> None:
    async def run() -> list[dict[str, object]]:
        chosen = [each for each in load().values() if is_meant(each, [], "minute")]
        return [line async for line in run_all(chosen, "minute", 7)]

    lines = asyncio.run(run())
    print("\n".join(json.dumps(line) for line in lines))
    assert [line for line in lines if line["ok"] is False] == []
