"""All the paths, side by side."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.chaos.cuts import operators, parts, producers, upkeep
from tests.chaos.cuts.stage import Theatre


async def play(busy: Theatre, houses: Sequence[Theatre]) -> dict[str, Any]:
    """Everything but the upkeep shares a database. Answers with the figures."""
    with quiet():
        return await play_all(busy, houses)


async def play_all(busy: Theatre, houses: Sequence[Theatre]) -> dict[str, Any]:
    async with asyncio.TaskGroup() as group:
        impatience = group.create_task(produce(busy))
        lost_claims = group.create_task(own(busy))
        for scenes in (operate(busy), end(busy), parts.beat(busy), *map(upkeep.keep_house, houses)):
            group.create_task(scenes)
    return {"gave_up": impatience.result(), "lost_claims_back_after_lease_s": round(lost_claims.result(), 1)}


async def produce(theatre: Theatre) -> dict[str, int]:
    for path in producers.PATHS:
        await producers.add(theatre, path)
    return await producers.lose_patience(theatre, theatre.lab.size(20, 150, 2_000))


async def operate(theatre: Theatre) -> None:
    for path in operators.ACTIONS:
        await operators.operate(theatre, path)
    await operators.pause(theatre)


async def end(theatre: Theatre) -> None:
    for path in parts.ENDS:
        await parts.end(theatre, path)
    await parts.retire(theatre)


async def own(theatre: Theatre) -> float:
    await parts.claim(theatre)
    for path in parts.WRITES:
        await parts.write(theatre, path)
    return await parts.claim_and_die(theatre)


@contextmanager
def quiet() -> Iterator[None]:
    """The parts that run in this process would tell of each cut."""
    loggers = {logger: logger.level for logger in map(logging.getLogger, ("pgqueue.worker", "psycopg.pool"))}
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in loggers.items():
            logger.setLevel(level)
