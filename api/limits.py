"""How often one token may ask, in windows of a minute.

Each process counts for itself: to share the counts would cost a write for every request, and a limit that keeps one
client from taking all there is need not be exact. Behind a balancer, n processes let n times as much through.
"""

from __future__ import annotations

import time

from pgqueue.api.problems import Problem

WINDOW = 60


class Limiter:
    def __init__(self, quota: int, name: str = "default") -> None:
        self._quota = quota
        self._name = name
        self._window = 0
        self._counts: dict[str, int] = {}

    def count(self, who: str) -> dict[str, str]:
        """The headers that tell how much is left; a Problem when nothing is."""
        if not self._quota:
            return {}
        window, passed = divmod(time.monotonic(), WINDOW)
        if window != self._window:
            self._window = int(window)
            self._counts.clear()
        rest = max(1, int(WINDOW - passed))
        count = self._counts.get(who, 0) + 1
        headers = {
            "ratelimit-policy": f'"{self._name}";q={self._quota};w={WINDOW}',
            "ratelimit": f'"{self._name}";r={max(0, self._quota - count)};t={rest}',
        }
        if count > self._quota:
            headers["retry-after"] = str(rest)
            raise Problem(429, "rate-limited", f"more than {self._quota} requests a minute", headers=headers)
        self._counts[who] = count
        return headers
