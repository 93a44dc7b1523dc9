"""The PostgreSQL of a directory."""

import hashlib
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from pgqueue.embedded.binaries import binaries_for, major_version, reachable_binaries
from pgqueue.embedded.directory import locked, log_tail, note, open_log, prepared, read_notes, write_private
from pgqueue.embedded.places import find_home, make_place
from pgqueue.embedded.processes import Account, command_lines, spawn
from pgqueue.embedded.server import HOST, Server
from pgqueue.errors import ServerUnavailable

NAME = "pgqueue"
"""The superuser and the database."""
# macOS allows 103 bytes, Linux 107.
LONGEST_SOCKET_PATH = 103
DEFAULTS = {"max_connections": "200", "shared_buffers": "128MB", "unix_socket_permissions": "0700"}
FAST = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
STOP_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}


class PostgresServer(Server):
    """A PostgreSQL with a superuser and a database, both named pgqueue."""

    _name = "postgres"
    _stop_signal = signal.SIGINT

    def __init__(
        self,
        directory: Path,
        home: Path,
        account: Account,
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
        with locked(self.directory):
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
        write_private(secret, self._password)
        for path in (fresh, secret):
            self._account.own(path)
        command = [f"{self.bin_dir}/initdb", "-D", f"{fresh}/data", f"--username={NAME}", f"--pwfile={secret}"]
        command += ["--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-instructions"]
        if major_version(self.bin_dir) >= 17:
            command += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        if fast:
            command.append("--no-sync")
        with open_log(self._log) as log:
            start = log.tell()
            status = spawn(command, log, self._account).wait()
        if status != 0:
            raise ServerUnavailable(f"initdb failed:\n{log_tail(self._log, start)}")
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
            noted = read_notes(self._notes).get("socket_dir")
            if noted and Path(noted).is_dir():
                return Path(noted)
            place = make_place(self._account, "pgqueue-")
            note(self._notes, socket_dir=str(place))
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

        return [pid for pid, command in command_lines().items() if is_member(command)]

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
    with prepared(directory) as directory:
        home, account = find_home(directory, fast=fast)
        binaries = reachable_binaries(binaries_for(home / "data", bin_dir), account)
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
        home = Path(read_notes(directory / "postgres.json").get("home", directory / "postgres"))
        server = PostgresServer(directory, home, Account(), Path(), {}, None)
        return server if server._answers() else None
    except PermissionError:
        return None
