"""A process of the API among people who mean it ill: it answers 4xx or hangs up, stays small, and serves the others."""

import gzip
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pgqueue.api.protocol import PATIENCE
from tests.api.conftest import Api, Process, api_process, until

MEGABYTE = 1024 * 1024


def memory(process: Process, name: str) -> int:
    """In MB: VmRSS is now, VmHWM was most."""
    text = Path(f"/proc/{process.process.pid}/status").read_text()
    found = re.search(rf"{name}:\s+(\d+) kB", text)
    assert found
    return int(found[1]) // 1024


@contextmanager
def customer(api: Api) -> Iterator[list[float]]:
    """Goes on adding and reading jobs meanwhile; how long each took. None may fail."""
    took: list[float] = []
    wrong: list[object] = []
    stop = threading.Event()

    def shop() -> None:
        while not stop.is_set():
            begun = time.monotonic()
            try:
                for answer in (api("POST", "/submit_job", {"name": "default"}), api("GET", "/jobs?limit=5")):
                    if answer.status not in (200, 201):
                        wrong.append(answer.text)
            except OSError as error:
                wrong.append(error)
            took.append(time.monotonic() - begun)
            time.sleep(0.02)

    thread = threading.Thread(target=shop)
    thread.start()
    try:
        yield took
    finally:
        stop.set()
        thread.join()
    assert not wrong, wrong[:3]


@contextmanager
def slow_clients(api: Api) -> Iterator[None]:
    """Whose heads come a byte at a time, stop, or never begin; each is hung up on."""
    slow = [socket.create_connection(("127.0.0.1", api.port), timeout=60) for _ in range(300)]
    begun = time.monotonic()

    def drip() -> None:
        while time.monotonic() - begun < PATIENCE + 3:
            for connection in slow[1::3]:
                with suppress(OSError):
                    connection.send(b"x")
            time.sleep(0.5)

    for number, connection in enumerate(slow):
        if number % 3:
            connection.sendall(b"GET /jobs HTTP/1.1\r\nX-Slow: ")
    thread = threading.Thread(target=drip)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        for connection in slow:
            with suppress(ConnectionError):
                assert connection.recv(100) == b"", "it was hung up on"
            connection.close()


def exchange(api: Api, head: bytes, chunks: Iterator[bytes] | None = None) -> bytes:
    """Sends for as long as the other side takes it; the first line of its answer."""
    with socket.create_connection(("127.0.0.1", api.port), timeout=30) as connection:
        try:
            connection.sendall(head)
            for chunk in chunks or ():
                connection.sendall(chunk)
        except OSError:
            pass
        with suppress(OSError):
            return connection.recv(4096).partition(b"\r\n")[0]
    return b""


def refused(line: bytes) -> bool:
    """With a 4xx, or by hanging up."""
    return not line or line.split(b" ")[1].startswith(b"4")


def test_hostile_requests(dsn: str) -> None:
    with api_process(dsn, PGQUEUE_RATE_LIMIT="0") as (api, process), customer(api) as took, slow_clients(api):
        until(lambda: api.count() > 20)
        begun = memory(process, "VmRSS")
        auth = f"Host: x\r\nAuthorization: Bearer {api.token}\r\n".encode()
        post = b"POST /submit_job HTTP/1.1\r\nContent-Type: application/json\r\n" + auth
        block = b"x" * MEGABYTE
        chunk = b"%x\r\n" % MEGABYTE + block + b"\r\n"
        deep = b"[" * 10_000 + b"]" * 10_000
        bomb = gzip.compress(b'{"name": "' + b"0" * 200 * MEGABYTE + b'"}')
        many = json.dumps({"action": "cancel", "ids": list(range(1, 100_001))}).encode()
        bulk = json.dumps({"jobs": [{"type": "t"}] * 100_000}).encode()
        v1 = b"POST /api/v1/jobs/%s HTTP/1.1\r\nContent-Type: application/json\r\n" + auth

        def sized(head: bytes, body: bytes, more: bytes = b"") -> Callable[[], bytes]:
            return lambda: exchange(api, head + more + b"Content-Length: %d\r\n\r\n" % len(body), iter([body]))

        attacks: dict[str, Callable[[], bytes]] = {
            "a body of 1 GB": lambda: exchange(
                api, post + b"Content-Length: %d\r\n\r\n" % 2**30, (block for _ in range(1024))
            ),
            "a body of 1 GB for GET": lambda: exchange(
                api,
                b"GET /nowhere HTTP/1.1\r\n" + auth + b"Content-Length: %d\r\n\r\n" % 2**30,
                (block for _ in range(64)),
            ),
            "chunks without end": lambda: exchange(
                api, post + b"Transfer-Encoding: chunked\r\n\r\n", (chunk for _ in range(1024))
            ),
            "headers without end": lambda: exchange(
                api, b"GET /jobs HTTP/1.1\r\n" + auth, (b"X-Pad: " + b"x" * 8000 + b"\r\n" for _ in range(20_000))
            ),
            "a header without end": lambda: exchange(
                api, b"GET /jobs HTTP/1.1\r\n" + auth + b"X-Pad: ", (block for _ in range(200))
            ),
            "a path without end": lambda: exchange(api, b"GET /", (block for _ in range(200))),
            "a gzip bomb": sized(post, bomb, b"Content-Encoding: gzip\r\n"),
            "JSON 10,000 deep": sized(post, deep),
            "100,000 ids": sized(v1 % b"actions", many),
            "100,000 jobs": sized(v1 % b"batch", bulk),
            "two tokens": lambda: exchange(api, b"GET /jobs HTTP/1.1\r\n" + auth + auth + b"\r\n"),
            "two lengths": lambda: exchange(api, post + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}"),
            "two encodings": lambda: exchange(
                api, post + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
            ),
            "NUL in the path": lambda: exchange(api, b"GET /jobs/\0 HTTP/1.1\r\n" + auth + b"\r\n"),
            "NUL, escaped": lambda: exchange(api, b"GET /jobs/%00 HTTP/1.1\r\n" + auth + b"\r\n"),
            "NUL in the query": lambda: exchange(api, b"GET /jobs?queue=%00 HTTP/1.1\r\n" + auth + b"\r\n"),
            "a huge token": lambda: exchange(
                api, b"GET /jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + b"a.b" * 15_000 + b"\r\n\r\n"
            ),
            "HTTP/2": lambda: exchange(api, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
            "TLS": lambda: exchange(api, bytes.fromhex("16030100a5010000a10303") + b"\0" * 200),
        }
        for name, attack in attacks.items():
            line = attack()
            assert refused(line), (name, line)
        for host in (b"", b"evil.org", b"[::1", b"a b", b"\xff\xfe", b"x" * 5000):
            line = exchange(api, b"GET /health HTTP/1.1\r\nHost: " + host + b"\r\n\r\n")
            assert not line or line.split(b" ")[1][:1] in (b"2", b"4"), (host, line)
        threads = [threading.Thread(target=attacks[name]) for name in attacks for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(took)[len(took) // 2] < 5
        grown = memory(process, "VmHWM") - begun
        assert grown <= 50, f"grew by {grown} MB"
        assert not [line for line in process.lines if "Traceback" in line or " 500 " in line]
