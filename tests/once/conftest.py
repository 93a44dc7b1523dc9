"""Servers and processes for tests that run whole workers.

Tests with the mark `together` wait more than they work. Those of a file run on one loop, a few at a time, when the
first of them is called; pytest hears of each at its turn. Their fixtures are those of the session.
"""

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from pgqueue.embedded import ValkeyServer
from tests.once.arena import Arena, started_arena, started_valkey
from tests.once.nursery import Nursery

AT_A_TIME = 3
_outcomes: dict[str, BaseException | None] = {}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "together: takes only parameters and fixtures of the session")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not pyfuncitem.get_closest_marker("together"):
        return None
    if pyfuncitem.nodeid not in _outcomes:
        items = [
            item
            for item in pyfuncitem.session.items
            if isinstance(item, pytest.Function)
            and item.path == pyfuncitem.path
            and item.get_closest_marker("together")
        ]
        _outcomes.update(pyfuncitem.funcargs["runner"].run(run_together(pyfuncitem, items)))
    if (error := _outcomes.pop(pyfuncitem.nodeid)) is not None:
        raise error
    return True


async def run_together(caller: pytest.Function, items: list[pytest.Function]) -> dict[str, BaseException | None]:
    gate = asyncio.Semaphore(AT_A_TIME)

    async def run(item: pytest.Function) -> None:
        given: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
        names = inspect.signature(item.obj).parameters
        arguments = {name: given[name] if name in given else caller._request.getfixturevalue(name) for name in names}
        async with gate:
            await item.obj(**arguments)

    ends = await asyncio.gather(*map(run, items), return_exceptions=True)
    return dict(zip([item.nodeid for item in items], ends, strict=True))


@pytest.fixture(scope="session")
def arena() -> Iterator[Arena]:
    with started_arena() as arena:
        yield arena


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("nursery"))
    yield nursery
    nursery.close()


@pytest.fixture(scope="session")
def shared_valkey() -> Iterator[ValkeyServer]:
    """For tests that leave it alone and keep to their own keys."""
    with started_valkey() as server:
        yield server


@pytest.fixture
def valkey() -> Iterator[ValkeyServer]:
    """For tests that do it harm."""
    with started_valkey() as server:
        yield server
