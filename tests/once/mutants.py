"""Faults put into a worker on purpose, to see that the tests would notice them."""

from collections.abc import Callable

MUTANTS: dict[str, Callable[[], None]] = {}
