"""`--processes N`: keeps N worker processes running, restarts one that dies, and passes signals on."""

from __future__ import annotations

import logging
import signal
import subprocess
import time
from dataclasses import dataclass, field
from types import FrameType

from pgqueue.log import say

logger = logging.getLogger("pgqueue.supervisor")

SETTLED = 10.0
"""One that ran for so many seconds is restarted at once; one that dies sooner waits, longer each time."""
LONGEST_PAUSE = 30.0
MARGIN = 5.0
"""Seconds after the grace, for a worker that was told to stop, until it is killed."""
NEVER = float("inf")
ORDERLY = 83
"""The exit code of a worker that ended because it was told to. Not 0: any handler can end its process with that."""


@dataclass
class Member:
    name: str
    command: list[str]
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    pause: float = 0.0
    restart_at: float = field(default=0.0)


def supervise(commands: dict[str, list[str]], grace: float) -> int:
    """Runs them until SIGTERM or SIGINT; answers with the exit code of this process."""
    members = [Member(name, command) for name, command in commands.items()]
    signals: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    passed = 0
    kill_at = NEVER
    while True:
        for member in members:
            if not signals:
                _keep_running(member)
        while passed < len(signals):
            passed += 1
            kill_at = min(kill_at, time.monotonic() + grace + MARGIN)
            for member in members:
                if member.process is not None and member.process.poll() is None:
                    member.process.send_signal(signal.SIGTERM)
        if time.monotonic() > kill_at:
            # It has been told, and knows the grace: something keeps its interpreter.
            for member in members:
                if member.process is not None:
                    member.process.kill()
        over = signals or all(member.restart_at == NEVER for member in members)
        if over and all(member.process is None or member.process.poll() is not None for member in members):
            codes = [member.process.returncode for member in members if member.process is not None]
            # One that was stopped before it could listen to signals ended as it should, too.
            return max((abs(code) for code in codes if code not in (-signal.SIGTERM, ORDERLY)), default=0)
        time.sleep(0.05)


def _keep_running(member: Member) -> None:
    now = time.monotonic()
    if member.process is not None and member.process.poll() is not None:
        code, member.process = member.process.returncode, None
        if code == ORDERLY:
            # It was told to drain: that is not a death.
            member.restart_at = NEVER
            say(logger, logging.INFO, "worker.ended", f"{member.name} has ended", name=member.name)
            return
        member.pause = 0.0 if now - member.started > SETTLED else min(max(member.pause * 2, 0.5), LONGEST_PAUSE)
        member.restart_at = now + member.pause
        text = f"{member.name} ended with {code}; it is started again" + (
            f" in {member.pause:g} s" if member.pause else ""
        )
        say(logger, logging.ERROR, "worker.died", text, name=member.name, code=code)
    if member.process is None and now >= member.restart_at:
        # A group of its own: Ctrl-C in the terminal reaches this process, which passes it on once.
        try:
            member.process = subprocess.Popen(member.command, start_new_session=True)
        except OSError as error:  # no memory, or too many processes, for now
            member.pause = min(max(member.pause * 2, 0.5), LONGEST_PAUSE)
            member.restart_at = now + member.pause
            text = f"{member.name} cannot be started: {error}; tried again in {member.pause:g} s"
            say(logger, logging.ERROR, "worker.died", text, name=member.name)
        member.started = now
