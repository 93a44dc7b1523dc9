"""Processes, and the user that they run as."""

import os
import pwd
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pgqueue.errors import ServerUnavailable


@dataclass(frozen=True)
class Account:
    """The user that PostgreSQL runs as, since it refuses root; without a uid, the one who calls."""

    uid: int | None = None
    gid: int | None = None

    def can_execute(self, path: Path) -> bool:
        # Asked of the system rather than read from the modes: it also knows access lists and mounts.
        command = ["/bin/sh", "-c", 'test -x "$0"', str(path)]
        return self.uid is None or spawn(command, subprocess.DEVNULL, self).wait() == 0

    def own(self, path: Path) -> None:
        if self.uid is not None and self.gid is not None:
            os.chown(path, self.uid, self.gid, follow_symlinks=False)


def unprivileged() -> Account:
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            entry = pwd.getpwnam(name)
            return Account(entry.pw_uid, entry.pw_gid)
    raise ServerUnavailable("PostgreSQL does not run as root, and there is no user `postgres` or `nobody` to run it as")


def environment() -> dict[str, str]:
    # LANG may name a locale that is not installed, logs are searched for English, and PGDATA and the like mislead.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_", "LANG"))}
    return kept | {"LC_ALL": "C"}


def spawn(
    command: list[str], output: IO[bytes] | int, account: Account, *, session: bool = False
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd="/",
            env=environment(),
            user=account.uid,
            group=account.gid,
            extra_groups=None if account.uid is None else [],
            umask=0o077,
            start_new_session=session,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ServerUnavailable(f"cannot run {command[0]}: {error}") from error


def command_lines() -> dict[int, str]:
    """The command line of every process, its words divided by NUL or, from ps, by blanks; zombies have none."""
    if not Path("/proc/self/cmdline").exists():
        listing = subprocess.run(["ps", "-axwwo", "pid=,command="], capture_output=True, text=True).stdout
        words = (line.strip().partition(" ") for line in listing.splitlines())
        return {int(pid): command for pid, _, command in words}
    commands = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            commands[int(entry.name)] = os.fsdecode((entry / "cmdline").read_bytes())
    return commands
