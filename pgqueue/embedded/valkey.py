"""The Valkey of a directory."""

import signal
from pathlib import Path

from pgqueue.embedded.binaries import find_valkey
from pgqueue.embedded.directory import prepared, write_private
from pgqueue.embedded.processes import Account
from pgqueue.embedded.server import HOST, Server

CONFIG = """\
bind {host}
port {port}
requirepass {password}
save ""
appendonly no
maxmemory 256mb
maxmemory-policy allkeys-lru
"""


class ValkeyServer(Server):
    """A Valkey that keeps nothing on disk: it is only a cache."""

    _name = "valkey"
    _stop_signal = signal.SIGTERM

    @property
    def url(self) -> str:
        return f"redis://:{self._password}@{HOST}:{self.port}/0"

    def _command(self) -> list[str]:
        # In a file, since everybody can read a command line.
        config = self.directory / "valkey.conf"
        write_private(config, CONFIG.format(host=HOST, port=self.port, password=self._password))
        return [str(find_valkey()), str(config)]

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
    with prepared(directory) as directory:
        server = ValkeyServer(directory, Account(), port)
        server._start()
    return server
