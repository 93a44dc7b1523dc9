"""Named points at which a process can be made to die, stop, err or sleep. Nothing happens unless a test says so.

PGQUEUE_FAILPOINT is a comma-separated list of name[:nth][:kill|stop|error|sleep]: at the nth time (the first, unless
told) that the point is reached, the process kills itself (unless told otherwise).
"""

from __future__ import annotations

import os
import signal
import time

POINTS = frozenset(
    {
        "enqueue.before",
        "enqueue.after",
        "claim.before",
        "claim.after",
        "attempt.before",
        "l1.looked",
        "intent.before",
        "intent.after",
        "handler.after",
        "tx.begun",
        "tx.body_done",
        "tx.completed",
        "tx.committed",
        "finish.before",
        "finish.after",
        "fail.before",
        "fail.after",
        "l1.before_set",
        "l1.after_set",
        "heartbeat.before",
        "rescue.before",
        "rescue.after",
        "promote.after",
        "release.before",
    }
)


class FailpointError(Exception):
    """What an `error` point raises."""


class _Armed:
    def __init__(self, text: str) -> None:
        name, *rest = text.split(":")
        if name not in POINTS:
            raise ValueError(f"PGQUEUE_FAILPOINT: there is no point {name}; there are {', '.join(sorted(POINTS))}")
        self.name = name
        self.nth = next((int(part) for part in rest if part.isdecimal()), 1)
        self.action = next((part for part in rest if not part.isdecimal()), "kill")
        if self.action not in ("kill", "stop", "error", "sleep"):
            raise ValueError(f"PGQUEUE_FAILPOINT: {self.action} is none of kill, stop, error, sleep")


_armed = [_Armed(text) for text in os.environ.get("PGQUEUE_FAILPOINT", "").split(",") if text]
_reached: dict[str, int] = {}


def failpoint(name: str) -> None:
    """Marks a point."""
    if not _armed:
        return
    assert name in POINTS, name
    count = _reached[name] = _reached.get(name, 0) + 1
    for point in _armed:
        if point.name == name and point.nth == count:
            _act(point)


def _act(point: _Armed) -> None:
    if point.action == "kill":
        os._exit(137)
    elif point.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif point.action == "sleep":
        time.sleep(5)
    else:
        raise FailpointError(point.name)
