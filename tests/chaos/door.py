"""The API as a process of its own, and those who add jobs by it."""

import asyncio
import http.client
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.api.conftest import Api, Process
    from tests.chaos.lab import Lab
    from tests.chaos.verdict import Verdict

NOBODY = 0
"""The status of a request that was cut off: the API itself never does that."""
AGAIN = 0.2
"""Seconds after which somebody who insists asks again. Retry-After asks for more patience than that."""
RECONNECT = 5.0
"""Seconds after which the API is connected again. Its pool tries after one second, then after two more."""


@dataclass
class Answer:
    began: float
    ended: float
    status: int
    retry_after: str | None


class Door:
    def __init__(self, lab: "Lab", api: "Api", process: "Process") -> None:
        self.lab = lab
        self.api = api
        self.process = process
        self.answers: list[Answer] = []

    @classmethod
    @asynccontextmanager
    async def opened(cls, lab: "Lab", dsn: str, **environ: str) -> AsyncIterator["Door"]:
        from tests.api.conftest import api_process

        opening = api_process(dsn, **environ)
        api, process = await asyncio.to_thread(opening.__enter__)
        try:
            yield cls(lab, api, process)
        finally:
            await asyncio.to_thread(opening.__exit__, None, None, None)

    @property
    def alive(self) -> bool:
        return self.process.process.poll() is None

    @property
    def statuses(self) -> dict[int, int]:
        return dict(sorted(Counter(answer.status for answer in self.answers).items()))

    async def add(self, type: str, payload: dict[str, Any], *, insists: bool) -> None:
        """Whoever insists sends the job's key as the request's, and the same request until it is answered."""
        body = {"type": type, "payload": payload, "max_attempts": 20}
        headers = {"Idempotency-Key": payload["key"]} if insists else {}
        self.lab.ledger.attempt([payload["key"]])
        while True:
            answer = await asyncio.to_thread(self._post, body, headers)
            self.answers.append(answer)
            if 200 <= answer.status < 300:
                self.lab.ledger.acknowledge([payload["key"]])
            elif insists:
                await asyncio.sleep(AGAIN)
                continue
            return

    async def add_steadily(self, types: list[str], per_second: float, stop: asyncio.Event, *, insists: bool) -> None:
        while not stop.is_set():
            began = time.monotonic()
            [key] = self.lab.keys(1)
            await self.add(self.lab.random.choice(types), {"key": key}, insists=insists)
            await asyncio.sleep(max(0.0, 1 / per_second - (time.monotonic() - began)))

    async def add_many(self, types: list[str], number: int, *, insists: bool) -> None:
        for key in self.lab.keys(number):
            await self.add(self.lab.random.choice(types), {"key": key}, insists=insists)

    def took_one_since(self, moment: float) -> bool:
        return any(answer.began >= moment and answer.status < 300 for answer in reversed(self.answers))

    def _post(self, body: dict[str, Any], headers: dict[str, str]) -> Answer:
        began, status, retry_after = time.monotonic(), NOBODY, None
        try:
            answer = self.api("POST", "/api/v1/jobs", body, headers=headers)
            status, retry_after = answer.status, answer.headers["Retry-After"]
        except (OSError, http.client.HTTPException):
            pass
        return Answer(began, time.monotonic(), status, retry_after)


def answered(verdict: "Verdict", door: Door, outages: list[tuple[float, float]]) -> None:
    """It lives, and has refused what it could not do, in the right words, and only then."""
    verdict.expect(door.alive, "the API has ended")
    odd = door.statuses.keys() - {200, 201, 503}
    verdict.expect(not odd, f"the API answered {sorted(odd)}")
    refusals = [answer for answer in door.answers if answer.status >= 500]
    verdict.expect(all(answer.retry_after for answer in refusals), "a 503 came without Retry-After")
    late = [min(max(0.0, one.ended - back, fell - one.ended) for fell, back in outages) for one in refusals]
    worst = max(late, default=0.0)
    verdict.expect(worst < RECONNECT, f"a 503 came {worst:.1f} s after the end of an outage, or before its beginning")
    verdict.figures["last_503_after_s"] = round(worst, 2)
