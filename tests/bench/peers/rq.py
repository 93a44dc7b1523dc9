"""RQ, https://python-rq.org."""

from __future__ import annotations

from dataclasses import dataclass

from tests.bench.peers.peer import InRedis, Python


@dataclass(frozen=True, kw_only=True)
class Rq(Python):
    def setup(self) -> list[list[str]]:
        return []

    def workers(self, processes: int) -> list[list[str]]:
        command = [self.bin("rq"), "worker", "--with-scheduler", "--worker-class", "rq.SimpleWorker", "--quiet"]
        return [["/bin/sh", "-c", 'exec "$@" --url "$REDIS_URL"', "sh", *command]] * processes


PEERS = (
    Rq(
        name="rq",
        package="rq==2.12.0",
        settings="Redis; `rq worker --with-scheduler`, SimpleWorker (no fork), result_ttl 0;"
        " bulk by enqueue_many of 1,000",
        hint=500,
        driver="with_rq.py",
        store=InRedis(
            keys=(("rq:queue:hidden", "rq:queue:default"),),
            left=(("LLEN", "rq:queue:default"), ("ZCARD", "rq:wip:default"), ("ZCARD", "rq:wip:hidden")),
        ),
        lease="abandoned jobs are failed, not run again",
        alike=False,
    ),
)
