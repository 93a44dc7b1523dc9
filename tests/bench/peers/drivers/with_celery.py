"""Celery on Redis: prefork, its worker as its command line starts it."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import driver
from celery import Celery

app = Celery("with_celery", broker=driver.REDIS)
app.conf.update(
    task_ignore_result=True,
    worker_prefetch_multiplier=128,
    worker_disable_rate_limits=True,
    worker_hijack_root_logger=False,
    broker_connection_retry_on_startup=True,
)
if driver.LEASE:
    app.conf.update(
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        worker_prefetch_multiplier=1,
        broker_transport_options={"visibility_timeout": int(driver.LEASE)},
    )


@app.task(name="noop")
def noop() -> None: ...


@app.task(name="stamp")
def stamp(number: int) -> None:
    driver.stamp(number)


@app.task(name="hold")
def hold(number: int) -> None:
    driver.stamp(number)
    time.sleep(driver.HELD)


TASKS: dict[str, Any] = {"noop": noop, "stamp": stamp, "hold": hold}


class Producer:
    def open(self) -> None: ...

    def add(self, job: str, number: int) -> None:
        TASKS[job].apply_async(() if job == "noop" else (number,))

    def add_many(self, job: str, jobs: int) -> None:
        raise driver.NoSuchCall

    def add_at(self, job: str, number: int, at: float) -> None:
        TASKS[job].apply_async((number,), eta=datetime.fromtimestamp(at, UTC))

    def add_hidden(self, jobs: int) -> None:
        for _ in range(jobs):
            noop.apply_async(queue="hidden")

    def close(self) -> None: ...


if __name__ == "__main__":
    driver.main(Producer())
