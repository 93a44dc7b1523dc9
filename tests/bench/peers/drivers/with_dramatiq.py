"""Dramatiq on Redis, its worker as its command line starts it."""

from __future__ import annotations

import time
from typing import Any

import dramatiq
import driver
from dramatiq.brokers.redis import RedisBroker

# Maintenance, which requeues a dead worker's jobs, runs by chance: at every thousandth command as it ships.
LEASE: dict[str, Any] = (
    {"heartbeat_timeout": int(driver.LEASE) * 1000, "maintenance_chance": 100_000} if driver.LEASE else {}
)
broker = RedisBroker(url=driver.REDIS, **LEASE)
dramatiq.set_broker(broker)


@dramatiq.actor
def noop() -> None: ...


@dramatiq.actor
def stamp(number: int) -> None:
    driver.stamp(number)


@dramatiq.actor(time_limit=driver.HELD * 1000)
def hold(number: int) -> None:
    driver.stamp(number)
    time.sleep(driver.HELD)


ACTORS: dict[str, Any] = {"noop": noop, "stamp": stamp, "hold": hold}


class Producer:
    def open(self) -> None: ...

    def add(self, job: str, number: int) -> None:
        ACTORS[job].send(*(() if job == "noop" else (number,)))

    def add_many(self, job: str, jobs: int) -> None:
        raise driver.NoSuchCall

    def add_at(self, job: str, number: int, at: float) -> None:
        ACTORS[job].send_with_options(args=(number,), delay=max(0, round((at - time.time()) * 1000)))

    def add_hidden(self, jobs: int) -> None:
        hidden = RedisBroker(url=driver.REDIS, namespace="hidden")
        for _ in range(jobs):
            hidden.enqueue(noop.message())

    def close(self) -> None:
        broker.close()


if __name__ == "__main__":
    # Messages name their actor alone, so that the module's name does not matter.
    driver.main(Producer())
