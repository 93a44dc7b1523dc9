"""RQ: its worker as its command line starts it."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import driver
from redis import Redis
from rq import Queue


def noop() -> None: ...


def stamp(number: int) -> None:
    driver.stamp(number)


def hold(number: int) -> None:
    driver.stamp(number)
    time.sleep(driver.HELD)


class Producer:
    def open(self) -> None:
        self.redis = Redis.from_url(driver.REDIS)
        self.queue = Queue("default", connection=self.redis)

    def add(self, job: str, number: int) -> None:
        self.queue.enqueue(f"with_rq.{job}", *self._arguments(job, number), result_ttl=0)

    def add_many(self, job: str, jobs: int) -> None:
        self._many(self.queue, job, jobs)

    def add_at(self, job: str, number: int, at: float) -> None:
        self.queue.enqueue_at(datetime.fromtimestamp(at, UTC), f"with_rq.{job}", number, result_ttl=0)

    def add_hidden(self, jobs: int) -> None:
        self._many(Queue("hidden", connection=self.redis), "noop", jobs)

    def _many(self, queue: Queue, job: str, jobs: int) -> None:
        for size in driver.chunks(jobs, 1000):
            queue.enqueue_many([Queue.prepare_data(f"with_rq.{job}", result_ttl=0) for _ in range(size)])

    def _arguments(self, job: str, number: int) -> tuple[Any, ...]:
        return () if job == "noop" else (number,)

    def close(self) -> None:
        self.redis.close()


if __name__ == "__main__":
    driver.main(Producer())
