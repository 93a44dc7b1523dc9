"""Servers and processes for tests that run whole workers."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pgqueue.embedded import ValkeyServer, start_valkey
from tests.once.arena import Arena, started_arena
from tests.once.nursery import Nursery


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
    yield from started_valkey()


@pytest.fixture
def valkey() -> Iterator[ValkeyServer]:
    """For tests that do it harm."""
    yield from started_valkey()


def started_valkey() -> Iterator[ValkeyServer]:
    with tempfile.TemporaryDirectory(prefix="pgqueue-valkey-") as directory:
        server = start_valkey(Path(directory))
        try:
            yield server
        finally:
            server.stop()
