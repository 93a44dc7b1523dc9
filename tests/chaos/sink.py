"""The outside world: a process with a socket and a file. It honours keys, as a payment provider does: of all calls with
one key the first has an effect. A call without a key always has one."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Sink:
    """Seen from the test: starts it, reads its file."""

    def __init__(self, folder: Path) -> None:
        self.address = folder / "sink.socket"
        self._file = folder / "sink.jsonl"
        command = [sys.executable, "-m", "tests.chaos.sink", str(self.address), str(self._file)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def calls(self) -> list[dict[str, Any]]:
        """Each with key, provider_key, attempt, and whether it was a replay."""
        return [json.loads(line) for line in self._file.read_text().splitlines()] if self._file.exists() else []

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


async def call(address: str, **what: Any) -> None:
    """Seen from a handler."""
    reader, writer = await asyncio.open_unix_connection(address)
    try:
        writer.write(json.dumps(what).encode() + b"\n")
        if await reader.readline() != b"ok\n":
            raise ConnectionError("the sink did not answer")
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def call_sync(address: str, **what: Any) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(address)
        connection.sendall(json.dumps(what).encode() + b"\n")
        if connection.recv(3) != b"ok\n":
            raise ConnectionError("the sink did not answer")


# The process


async def serve(address: str, file: str) -> None:
    taken: set[str] = set()
    output = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while line := await reader.readline():
                call = json.loads(line)
                call["replay"] = call.get("provider_key") in taken
                if call.get("provider_key") is not None:
                    taken.add(call["provider_key"])
                os.write(output, json.dumps(call).encode() + b"\n")
                writer.write(b"ok\n")
                await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, address, backlog=512)
    done = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, done.set)
    print("ready", flush=True)
    await done.wait()
    server.close()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:3]))
