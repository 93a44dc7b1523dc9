"""CPU and memory of a tree of processes, from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def tree(roots: Iterable[int]) -> list[int]:
    """The processes and their descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, waiting = [], list(roots)
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += children.get(pid, ())
    return found


def cpu_seconds(roots: Iterable[int]) -> float:
    """Of the living, and of their children that have ended."""
    return sum(sum(int(ticks) for ticks in fields[11:15]) for pid in tree(roots) if (fields := _stat(pid))) / TICKS


def memory_mb(roots: Iterable[int]) -> float:
    """Pages that several share are counted once."""
    return sum(_proportional(pid) for pid in tree(roots)) / 1024


def parent(pid: int) -> int:
    return int(_stat(pid)[1])


def _stat(pid: int) -> list[str]:
    """From the process's state on; nothing when it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _proportional(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
