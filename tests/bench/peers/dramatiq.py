"""Dramatiq on Redis, https://dramatiq.io."""

from __future__ import annotations

from dataclasses import dataclass

from tests.bench.peers.peer import InRedis, Python


@dataclass(frozen=True, kw_only=True)
class Dramatiq(Python):
    def setup(self) -> list[list[str]]:
        return []

    def workers(self, processes: int) -> list[list[str]]:
        return [[self.bin("dramatiq"), "with_dramatiq", "--processes", str(processes), "--threads", "8"]]


PEERS = (
    Dramatiq(
        name="dramatiq",
        package="dramatiq[redis]==2.2.1",
        settings="Redis; `dramatiq --processes N --threads 8`",
        hint=2_000,
        driver="with_dramatiq.py",
        store=InRedis(
            keys=(("hidden:default.msgs", "dramatiq:default.msgs"), ("hidden:default", "dramatiq:default")),
            left=(("HLEN", "dramatiq:default.msgs"), ("LLEN", "dramatiq:default")),
        ),
        lease="heartbeat_timeout 60 s, looked at by chance; alike: 30 s, at every tenth command",
    ),
)
