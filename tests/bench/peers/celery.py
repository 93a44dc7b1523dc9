"""Celery on Redis, https://docs.celeryq.dev."""

from __future__ import annotations

from dataclasses import dataclass

from tests.bench.peers.peer import InRedis, Python


@dataclass(frozen=True, kw_only=True)
class Celery(Python):
    def setup(self) -> list[list[str]]:
        return []

    def workers(self, processes: int) -> list[list[str]]:
        quiet = ["--loglevel", "ERROR", "--without-gossip", "--without-mingle", "--without-heartbeat"]
        command = [self.bin("celery"), "--app", "with_celery", "worker", "--pool", "prefork"]
        return [[*command, "--concurrency", str(processes), *quiet]]


PEERS = (
    Celery(
        name="celery",
        package="celery[redis]==5.7.0",
        settings="Redis; prefork with N processes, prefetch 128 a process, no results, gossip, mingle or heartbeat",
        hint=800,
        driver="with_celery.py",
        store=InRedis(keys=(("hidden", "celery"),), left=(("LLEN", "celery"), ("HLEN", "unacked"))),
        lease="none as shipped (acked before it runs); alike: acks_late, visibility_timeout 30 s",
    ),
)
