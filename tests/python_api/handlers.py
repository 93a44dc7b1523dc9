"""Handlers that a child process imports."""

from typing import Any

from pgqueue import PgQueue

app = PgQueue()


@app.job(executor="process")
def double(n: int) -> int:
    return n * 2


def triple(n: int) -> int:
    return n * 3


renamed = app.job("three", executor="process")(triple)


def call_with_4(job_type: Any) -> Any:
    return job_type.fn(**job_type.decode('{"n": 4}')[1])
