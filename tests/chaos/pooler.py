"""PgBouncer in transaction mode before a database. It can be killed, and is started again where it was."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psycopg

from tests.api.test_pgbouncer import BINARY, CONFIG, SERVERS
from tests.chaos.verdict import Skipped


class Pooler:
    def __init__(self, dsn: str, port: int) -> None:
        if BINARY is None:
            raise Skipped("no PgBouncer")
        self._target = urlsplit(dsn)
        self._port = port
        self._folder = Path(tempfile.mkdtemp(prefix="pgbouncer-"))
        self._folder.chmod(0o755)  # as root it runs as another user, who must get in
        self.configure(SERVERS)
        self.start()

    @classmethod
    @contextmanager
    def running(cls, dsn: str, port: int) -> Iterator["Pooler"]:
        pooler = cls(dsn, port)
        try:
            yield pooler
        finally:
            pooler.end(signal.SIGTERM)
            shutil.rmtree(pooler._folder)

    @property
    def dsn(self) -> str:
        return self._to(self._target.path)

    def configure(self, servers: int) -> None:
        """For when it starts, or is told to read it again."""
        parts = self._target
        about = {"host": parts.hostname, "port": parts.port, "user": parts.username, "password": parts.password}
        config = CONFIG.format(**about, own=self._port, servers=servers)
        self._file.write_text(f"{config}admin_users = {parts.username}\n")

    def start(self) -> None:
        assert BINARY
        user = ["-u", "nobody"] if os.geteuid() == 0 else []
        self._process = subprocess.Popen([BINARY, *user, str(self._file)], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while not self._answers():
            assert self._process.poll() is None, "PgBouncer has ended"
            assert time.monotonic() < deadline, "PgBouncer does not answer"
            time.sleep(0.01)

    def end(self, how: signal.Signals) -> None:
        self._process.send_signal(how)
        self._process.wait(30)

    def tell(self, command: str) -> None:
        """On its console. PAUSE is answered when the last transaction has ended."""
        with psycopg.connect(self._to("/pgbouncer"), autocommit=True) as console:
            console.execute(command.encode())

    @property
    def _file(self) -> Path:
        return self._folder / "pgbouncer.ini"

    def _to(self, path: str) -> str:
        return self._target._replace(netloc=f"{self._target.username}:any@127.0.0.1:{self._port}", path=path).geturl()

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0
