"""What a directory of servers holds: the lock, passwords, notes and logs."""

import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from pgqueue.errors import ServerUnavailable


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    try:
        with ExitStack() as stack:
            # A directory that someone removed can no longer be fought over, but its servers can still be stopped.
            if directory.exists():
                file = stack.enter_context((directory / "lock").open("w"))
                fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise ServerUnavailable(str(error)) from error


@contextmanager
def prepared(directory: Path) -> Iterator[Path]:
    """The directory, made if need be and locked."""
    directory = directory.resolve()
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            directory.mkdir()
            directory.chmod(0o711 if os.geteuid() == 0 else 0o700)
    except OSError as error:
        raise ServerUnavailable(str(error)) from error
    with locked(directory):
        yield directory


def write_private(path: Path, text: str) -> None:
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def password_in(path: Path) -> str:
    if not path.exists():
        write_private(path, secrets.token_hex(24))
    return path.read_text()


def read_notes(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.exists() else {}


def note(path: Path, **changes: Any) -> None:
    write_private(path, json.dumps(read_notes(path) | changes))


def open_log(path: Path) -> IO[bytes]:
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


def log_tail(path: Path, start: int = 0) -> str:
    with path.open("rb") as file:
        file.seek(max(start, path.stat().st_size - 3000))
        return file.read().decode(errors="replace").strip()
