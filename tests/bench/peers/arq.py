"""arq, https://arq-docs.helpmanual.io."""

from __future__ import annotations

from dataclasses import dataclass

from tests.bench.peers.peer import InRedis, Python


@dataclass(frozen=True, kw_only=True)
class Arq(Python):
    def setup(self) -> list[list[str]]:
        return []

    def workers(self, processes: int) -> list[list[str]]:
        return [[self.bin("arq"), "with_arq.WorkerSettings"]] * processes


PEERS = (
    Arq(
        name="arq",
        package="arq==0.28.0",
        beside=("uvloop",),
        settings="Redis; max_jobs 200, poll_delay 10 ms, keep_result 0",
        hint=1_000,
        driver="with_arq.py",
        store=InRedis(keys=(("hidden", "arq:queue"),), left=(("ZCARD", "arq:queue"),)),
        lease="job_timeout 300 s + 10 s; alike: 20 s + 10 s",
    ),
)
