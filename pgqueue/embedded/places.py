"""Places that PostgreSQL's user can reach."""

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pgqueue.embedded.directory import note, read_notes
from pgqueue.embedded.processes import Account, unprivileged
from pgqueue.errors import ServerUnavailable

logger = logging.getLogger("pgqueue.embedded")


def common_grounds(account: Account, *, lasting: bool) -> Iterator[Path]:
    """Folders for what the server's user must reach, their paths short enough for a socket."""
    for name in (*(["/var/lib"] if lasting else []), tempfile.gettempdir(), "/var/tmp", "/tmp"):
        place = Path(name)
        if len(name) < 50 and os.access(place, os.W_OK) and account.can_execute(place):
            yield place


def make_place(account: Account, prefix: str, *, lasting: bool = False) -> Path:
    for ground in common_grounds(account, lasting=lasting):
        place = Path(tempfile.mkdtemp(prefix=prefix, dir=ground))
        account.own(place)
        return place
    raise ServerUnavailable("there is no folder for temporary files that the server's user can reach")


def find_home(directory: Path, *, fast: bool) -> tuple[Path, Account]:
    """The folder of the data and the socket, and whose it is."""
    notes = directory / "postgres.json"
    home = Path(read_notes(notes).get("home", directory / "postgres"))
    if os.geteuid() != 0:
        home.mkdir(mode=0o700, exist_ok=True)
        if home.stat().st_uid != os.geteuid():
            raise ServerUnavailable(f"{home} belongs to another user")
        return home, Account()
    if home.exists() and (owner := home.stat()).st_uid != 0:
        return home, Account(owner.st_uid, owner.st_gid)
    account = unprivileged()
    if account.can_execute(directory):
        home = directory / "postgres"
        home.mkdir(mode=0o700, exist_ok=True)
        account.own(home)
    else:
        home = _home_elsewhere(directory, account, fast=fast)
        note(notes, home=str(home))
    return home, account


def _home_elsewhere(directory: Path, account: Account, *, fast: bool) -> Path:
    home = make_place(account, "pgqueue-data-", lasting=not fast)
    logger.warning("data_elsewhere", extra={"directory": str(directory), "data": str(home)})
    if fast:
        # Tests remove their directories and cannot know of this one: the next test does.
        for other in home.parent.glob("pgqueue-data-*/directory"):
            with suppress(FileNotFoundError):
                if other.parent.stat().st_uid == account.uid and not Path(other.read_text()).exists():
                    shutil.rmtree(other.parent, ignore_errors=True)
        (home / "directory").write_text(str(directory))
    return home
