"""The job types that ship do real work: real threads, files, HTTP and SMTP."""

import asyncio
import json
import logging
import os
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes, policy
from email.header import decode_header, make_header
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult

from pgqueue import Context, GiveUp, JobCancelled, Settings
from pgqueue.outcome import Retry, Undecodable, failure
from pgqueue.worker.jobs import app, base, network, welcome

ANY_JSON = ["test task", "", {}, {"some": ["thing"]}, [1, "two"], 7, 1.5, True, None]
S1_TYPES = ["cpu_intensive", "io_intensive", "mixed_workload", "network_task", "default", "test_job"]


@dataclass
class FakeHost:
    """Runs chunks in threads, as the worker does, and remembers them."""

    chunks: list[Sequence[Any]] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)
    on_progress: Callable[[Context], None] = lambda _: None

    def report_progress(self, ctx: Context, progress: dict[str, Any]) -> None:
        self.reports.append(progress)
        self.on_progress(ctx)

    def map_chunks_sync(self, ctx: Context, fn: Callable[..., Any], items: Sequence[Any], executor: str) -> list[Any]:
        count = max(1, min(ctx.threads, len(items)))
        chunks = [items[i * len(items) // count : (i + 1) * len(items) // count] for i in range(count)]
        self.chunks += chunks
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(fn, chunks))

    async def map_chunks(self, ctx: Context, fn: Callable[..., Any], items: Sequence[Any], executor: str) -> list[Any]:
        return await asyncio.to_thread(self.map_chunks_sync, ctx, fn, items, executor)

    async def enqueue(self, ctx: Context, job: Any) -> Any:
        raise AssertionError("no built-in type adds jobs")

    def enqueue_sync(self, ctx: Context, job: Any) -> Any:
        raise AssertionError("no built-in type adds jobs")


def context(
    type: str, host: FakeHost | None = None, *, threads: int = 1, key: str | None = None, id: int = 7
) -> Context:
    return Context(
        host or FakeHost(),
        id=id,
        type=type,
        queue="default",
        attempt=1,
        max_attempts=5,
        timeout=None,
        idempotency_key=key or f"pgqueue:{id}",
        lease_token=str(uuid4()),
        payload=None,
        threads=threads,
        started=time.monotonic(),
    )


async def run(type: str, payload: Any, ctx: Context | None = None, **about: Any) -> Any:
    """From the payload as PostgreSQL stores it to the result as it will be stored."""
    handler = app.types[type]
    _, arguments = handler.decode(json.dumps(payload))
    ctx = ctx or context(type, **about)
    if handler.executor == "async":
        result = await handler.fn(ctx, **arguments)
    else:
        result = await asyncio.to_thread(handler.fn, ctx, **arguments)
    text = handler.encode_result(result)
    return None if text is None else json.loads(text)


@pytest.fixture(autouse=True)
def fresh_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No variables of this machine, no .env, and a folder for temporary files that must be empty in the end."""
    for name in ("SMTP_HOST", "SMTP_PORT", "SMTP_EMAIL", "SMTP_PASSWORD", "PGQUEUE_NETWORK_TASK_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    base.settings.cache_clear()
    yield
    base.settings.cache_clear()
    assert os.listdir(tmp_path / "tmp") == []


def test_every_type_is_there() -> None:
    small = {"add_numbers", "reverse_string", "resize_image", "large_array_sum"}
    assert set(app.types) == {*small, *S1_TYPES, "send_welcome_email"}


# Small computations


@pytest.mark.parametrize(
    ("x", "y", "total"),
    [
        (5, 7, 12),
        (-5, 5, 0),
        (2**63, 10**40, 2**63 + 10**40),
        (0.1, 0.2, 0.1 + 0.2),
        (1, 0.5, 1.5),
    ],
)
async def test_add_numbers(x: float, y: float, total: float) -> None:
    result = await run("add_numbers", {"x": x, "y": y})
    assert result == {"sum": total}
    assert type(result["sum"]) is type(total)


@pytest.mark.parametrize(
    "payload", [{"x": "notanumber", "y": 1}, {"x": "5", "y": 1}, {"x": True, "y": 1}, {"x": 1}, "x", None]
)
async def test_add_numbers_takes_numbers_only(payload: Any) -> None:
    with pytest.raises(Undecodable):
        await run("add_numbers", payload)


@pytest.mark.parametrize(("x", "y"), [(1e308, 1e308), (10**400, 0.5)])
async def test_a_sum_that_no_float_can_hold(x: float, y: float) -> None:
    with pytest.raises(GiveUp, match="too large"):
        await run("add_numbers", {"x": x, "y": y})


@pytest.mark.parametrize(
    ("text", "expected"), [("héllo", "olléh"), ("", ""), ("日本語", "語本日"), ("a😀b", "b😀a"), ("x", "x")]
)
async def test_reverse_string(text: str, expected: str) -> None:
    assert await run("reverse_string", {"text": text}) == {"reversed": expected}


async def test_resize_image() -> None:
    started = time.monotonic()
    result = await run("resize_image", {"url": "https://x.org/é.png", "width": 640, "height": 480})
    assert result == {"resized_url": "https://x.org/é.png_resized_640x480"}
    assert time.monotonic() - started >= 0.1


@pytest.mark.parametrize(
    "size", [{"width": 0, "height": 1}, {"width": 1, "height": -1}, {"width": "1", "height": 1}, {"width": 1}]
)
async def test_resize_image_needs_a_size(size: dict[str, Any]) -> None:
    with pytest.raises(Undecodable):
        await run("resize_image", {"url": "u", **size})


@pytest.mark.parametrize("name", ["numbers", "array"])
@pytest.mark.parametrize(
    ("numbers", "threads", "chunks"),
    [(list(range(1, 11)), 4, 4), ([1, 2, 3, 4, 5], 10, 5), ([], 4, 1), ([3], 1, 1), ([2**62] * 8, 4, 4)],
)
async def test_large_array_sum(name: str, numbers: list[int], threads: int, chunks: int) -> None:
    host = FakeHost()
    result = await run("large_array_sum", {name: numbers}, host=host, threads=threads)
    assert result == {"sum": sum(numbers)}
    assert type(result["sum"]) is int
    assert len(host.chunks) == chunks
    assert [each for chunk in host.chunks for each in chunk] == numbers


async def test_large_array_sum_of_a_million() -> None:
    host = FakeHost()
    assert await run("large_array_sum", {"numbers": list(range(10**6))}, host=host, threads=4) == {"sum": 499999500000}
    assert [len(chunk) for chunk in host.chunks] == [250_000] * 4


async def test_large_array_sum_rounds_floats_once() -> None:
    assert await run("large_array_sum", {"numbers": [0.1] * 10}) == {"sum": 1.0}


@pytest.mark.parametrize(
    "payload", [{}, {"numbers": [1], "array": [1]}, {"numbers": ["1"]}, {"numbers": 1}, {"array": None}, [1]]
)
async def test_large_array_sum_needs_numbers(payload: Any) -> None:
    with pytest.raises(Undecodable):
        await run("large_array_sum", payload)


# Work to keep a worker busy


@pytest.mark.parametrize("payload", ANY_JSON)
@pytest.mark.parametrize("type", S1_TYPES)
async def test_any_payload_will_do(type: str, payload: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.randint", lambda low, high: 3)
    monkeypatch.setattr("random.uniform", lambda low, high: low / 10)
    assert "message" in await run(type, payload)


@pytest.mark.parametrize(
    "payload", ["invalid_job_content_1", {"job": "an invalid_job"}, {"a": [{"invalid_job": 1}]}, ["é invalid_job"]]
)
@pytest.mark.parametrize("type", S1_TYPES)
async def test_invalid_job_fails_and_is_tried_again(type: str, payload: Any) -> None:
    with pytest.raises(ValueError, match=r"^Invalid job content$") as raised:
        await run(type, payload)
    outcome = failure(raised.value, Retry(), 1)
    assert (outcome.reason, outcome.error) == ("error", "Invalid job content")
    assert outcome.delay is not None


async def test_cpu_intensive() -> None:
    host = FakeHost()
    result = await run("cpu_intensive", {"rounds": 250}, host=host)
    assert result == {"message": "Computed 250 hashes"}
    assert [(each["done"], each["total"]) for each in host.reports] == [(0, 250), (100, 250), (200, 250)]


def test_cpu_intensive_runs_in_a_process_of_its_own() -> None:
    assert app.types["cpu_intensive"].executor == app.types["mixed_workload"].executor == "process"


@pytest.mark.parametrize("type", S1_TYPES)
def test_the_usual_amount(type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def first(low: float, high: float) -> None:
        asked.append((low, high))
        raise InterruptedError

    monkeypatch.setattr("random.randint", first)
    monkeypatch.setattr("random.uniform", first)
    with pytest.raises(InterruptedError):
        asyncio.run(run(type, "test task"))
    ranges = {"io_intensive": (1_000, 9_999), "network_task": (1, 5), "default": (0.1, 1.0), "test_job": (0.1, 1.0)}
    assert asked == [ranges.get(type, (5_000, 15_000))]


def test_io_intensive_leaves_no_file(tmp_path: Path) -> None:
    result = asyncio.run(run("io_intensive", {"lines": 1234}))
    text, _, path = result["message"].partition(": ")
    assert text == "Processed 1234 lines from file"
    assert Path(path).parent == tmp_path / "tmp"
    assert not Path(path).exists()


async def test_io_intensive_leaves_no_file_when_it_is_cancelled() -> None:
    ctx = context("io_intensive")
    ctx._stop = JobCancelled("no longer needed")
    with pytest.raises(JobCancelled):
        await run("io_intensive", {"lines": 5000}, ctx)


async def test_io_intensive_leaves_no_file_when_the_disk_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        await run("io_intensive", "test task")


async def test_mixed_workload() -> None:
    message = (await run("mixed_workload", {"rounds": 2, "lines": 3}))["message"]
    assert "Computed 2 hashes" in message
    assert "Processed 3 lines from file: " in message


async def test_a_cancelled_cpu_job_ends_soon() -> None:
    def cancel(ctx: Context) -> None:
        ctx._stop = JobCancelled("enough")

    host = FakeHost(on_progress=cancel)
    with pytest.raises(JobCancelled):
        await run("cpu_intensive", {"rounds": 10_000_000}, host=host)
    assert len(host.reports) == 1


@pytest.mark.parametrize(
    ("type", "payload", "message"),
    [
        ("cpu_intensive", {"rounds": 0}, "rounds must be a whole number from 1 to 10000000"),
        ("cpu_intensive", {"rounds": True}, "rounds"),
        ("mixed_workload", {"rounds": 1, "lines": "2"}, "lines"),
        ("io_intensive", {"lines": 10**9}, "lines must be a whole number from 1 to 1000000"),
        ("network_task", {"requests": 101}, "requests must be a whole number from 1 to 100"),
        ("default", {"seconds": -1}, "seconds must be a number from 0 to 86400"),
        ("default", {"seconds": "1"}, "seconds"),
        ("default", {"speed": "warp"}, "speed must be one of fast, medium, slow"),
        ("default", {"speed": ["fast"]}, "speed"),
    ],
)
async def test_a_bad_amount_is_named(type: str, payload: Any, message: str) -> None:
    with pytest.raises(GiveUp, match=message):
        await run(type, payload)


async def test_default_sleeps_as_long_as_it_is_told() -> None:
    started = time.monotonic()
    assert await run("default", {"seconds": 0.2}) == {"message": "timed task completed in 0.20 s"}
    assert 0.2 <= time.monotonic() - started < 10


@pytest.mark.parametrize(("speed", "low", "high"), [("fast", 0.1, 1.0), ("medium", 1.0, 10.0), ("slow", 10.0, 50.0)])
async def test_default_speeds(speed: str, low: float, high: float, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    assert (await run("default", {"speed": speed}))["message"].startswith(f"{speed} task completed in ")
    assert low <= slept[0] <= high


async def test_default_can_be_cancelled() -> None:
    task = asyncio.create_task(run("default", {"seconds": 3600}))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 10)


# Network


class Web(BaseHTTPRequestHandler):
    """Answers as the path says, and remembers what it was asked."""

    asked: ClassVar[list[tuple[str, str | None]]] = []
    together: ClassVar[threading.Barrier]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers["Host"]))
        body = b"x" * 200_000
        match self.path.partition("?")[0]:
            case "/together":
                self.together.wait(5)
            case "/chunked":
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self.wfile.write(b"5\r\nhello\r\n3;x=y\r\nyou\r\n0\r\n\r\n")
                return
            case "/cut":
                self.send_response(200)
                self.send_header("Content-Length", "100")
                self.end_headers()
                self.wfile.write(b"only this")
                self.close_connection = True
                return
            case "/junk":
                self.wfile.write(b"220 mail.example.org ESMTP\r\n")
                self.close_connection = True
                return
            case "/sometimes" if len(self.asked) % 2:
                self.send_error(503)
                return
            case "/empty":
                self.send_response(204)
                self.end_headers()
                return
            case "/announced":
                self.send_response_only(103)
                self.end_headers()
            case path if path[1:].isdecimal():
                self.send_response(int(path[1:]))
                self.send_header("Location", "/")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving(certificate: Path | None = None) -> Iterator[str]:
    Web.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Web)
    scheme = "http"
    if certificate:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate)
        server.socket = tls.wrap_socket(server.socket, server_side=True)
        scheme = "https"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"{scheme}://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def web() -> Iterator[str]:
    with serving() as url:
        yield url


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a certificate for localhost and 127.0.0.1 in one file."""
    file = tmp_path_factory.mktemp("tls") / "both.pem"
    key = file.with_name("key.pem")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(file)]
    try:
        subprocess.run([*command.split(), *names], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    file.write_text(file.read_text() + key.read_text())
    return file


async def test_network_task_asks_its_own_endpoint() -> None:
    assert await run("network_task", {"requests": 5}) == {"message": "Network task: 5/5 requests successful"}


async def test_network_task_sends_its_requests_at_the_same_time(web: str) -> None:
    Web.together = threading.Barrier(5)
    result = await run("network_task", {"url": f"{web}/together", "requests": 5})
    assert result == {"message": "Network task: 5/5 requests successful"}


@pytest.mark.parametrize("path", ["", "/", "/chunked", "/empty", "/announced", "/201"])
async def test_network_task_reads_any_answer(web: str, path: str) -> None:
    result = await run("network_task", {"url": web + path, "requests": 2})
    assert result == {"message": "Network task: 2/2 requests successful"}


async def test_network_task_sends_the_url_as_it_should(web: str) -> None:
    await run("network_task", {"url": f"{web}/ü/a%20b?q=é&r=1#part", "requests": 1})
    assert Web.asked == [("/%C3%BC/a%20b?q=%C3%A9&r=1", web.removeprefix("http://"))]


async def test_network_task_takes_its_url_from_the_settings(web: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGQUEUE_NETWORK_TASK_URL", f"{web}/from-settings")
    assert await run("network_task", "api_calls_task_1")
    assert {path for path, _ in Web.asked} == {"/from-settings"}


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/500", "answered 500"),
        ("/404", "answered 404"),
        ("/302", "answered 302"),
        ("/cut", "bytes read on a total of 100 expected"),
        ("/junk", "the answer is not HTTP"),
    ],
)
async def test_network_task_fails_unless_all_succeed(web: str, path: str, told: str) -> None:
    with pytest.raises(RuntimeError, match=f"^0/3 requests successful: .*{told}"):
        await run("network_task", {"url": web + path, "requests": 3})


async def test_network_task_fails_if_some_fail(web: str) -> None:
    with pytest.raises(RuntimeError, match=r"^2/4 requests successful: 127\.0\.0\.1:\d+ answered 503$"):
        await run("network_task", {"url": f"{web}/sometimes", "requests": 4})


async def test_network_task_fails_if_nobody_listens() -> None:
    with serving() as url:
        pass
    with pytest.raises(RuntimeError, match=r"^0/2 requests successful: 127\.0\.0\.1:\d+: .*onnect"):
        await run("network_task", {"url": url, "requests": 2})


@asynccontextmanager
async def silence() -> AsyncIterator[tuple[str, asyncio.Event]]:
    """A server that never answers, and the event that somebody came."""
    connected, gone = asyncio.Event(), asyncio.Event()

    class Silent(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            connected.set()

        def connection_lost(self, error: Exception | None) -> None:
            gone.set()

    server = await asyncio.get_running_loop().create_server(Silent, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", connected
        await asyncio.wait_for(gone.wait(), 20)


async def test_network_task_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "TIMEOUT", 0.2)
    async with silence() as (url, _):
        with pytest.raises(RuntimeError, match=r"^0/2 requests successful: .* did not answer within 0\.2 s$"):
            await run("network_task", {"url": url, "requests": 2})


async def test_network_task_can_be_cancelled() -> None:
    async with silence() as (url, connected):
        task = asyncio.create_task(run("network_task", {"url": url, "requests": 3}))
        await asyncio.wait_for(connected.wait(), 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 1)


async def test_network_task_over_tls(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(certificate) as url:
        with pytest.raises(RuntimeError, match=r"^0/1 requests successful: .*certificate verify failed"):
            await run("network_task", {"url": url, "requests": 1})
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert await run("network_task", {"url": url, "requests": 2}) == {
            "message": "Network task: 2/2 requests successful"
        }


@pytest.mark.parametrize(
    "url",
    ["file:///etc/passwd", "ftp://x.org/", "x.org", "http://", "http://user:secret@x.org/", "http://x.org:99999/",
     "http://x.org/a\r\nHost: y", "http://x.org/a b", f"http://{'a' * 64}.org/", 7, ""],
)  # fmt: skip
async def test_network_task_refuses_other_urls(url: Any) -> None:
    with pytest.raises(GiveUp, match=r"^url must be http") as raised:
        await run("network_task", {"url": url})
    assert "secret" not in str(raised.value)


# The welcome e-mail


@dataclass
class Mailbox:
    """An SMTP server's handler: keeps what it gets, and answers as the test says."""

    answers: dict[str, str] = field(default_factory=dict)
    contents: list[bytes] = field(default_factory=list)
    messages: list[EmailMessage] = field(default_factory=list)
    envelopes: list[tuple[str, list[str], bool]] = field(default_factory=list)

    async def handle_RCPT(self, server: Any, session: Any, envelope: Any, address: str, options: list[str]) -> str:
        envelope.rcpt_tos.append(address)
        return self.answers.get("RCPT", "250 OK")

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        answer = self.answers.get("DATA", "250 OK")
        if answer.startswith("250"):
            message = message_from_bytes(envelope.original_content, policy=policy.default)
            assert isinstance(message, EmailMessage)
            self.contents.append(envelope.original_content)
            self.messages.append(message)
            self.envelopes.append((envelope.mail_from, envelope.rcpt_tos, session.ssl is not None))
        return answer

    async def handle_QUIT(self, server: Any, session: Any, envelope: Any) -> str:
        return self.answers.get("QUIT", "221 Bye")


class Server(Controller):
    """Finds a free port by itself."""

    def __init__(self, mailbox: Mailbox, **options: Any) -> None:
        super().__init__(mailbox, hostname="127.0.0.1", port=0, **options)

    def _trigger_server(self) -> None:
        assert isinstance(self.server, asyncio.Server)
        self.port = self.server.sockets[0].getsockname()[1]
        super()._trigger_server()  # type: ignore[no-untyped-call]


@pytest.fixture
def smtp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Mailbox]]:
    """Starts a server, and points the settings at it."""
    servers = []

    def start(answers: dict[str, str] | None = None, environ: dict[str, str] | None = None, **options: Any) -> Mailbox:
        mailbox = Mailbox(answers or {})
        servers.append(server := Server(mailbox, **options))
        server.start()
        variables = {"SMTP_HOST": "127.0.0.1", "SMTP_PORT": str(server.port), "SMTP_EMAIL": "queue@example.org"}
        for name, value in (variables | (environ or {})).items():
            monkeypatch.setenv(name, value)
        return mailbox

    yield start
    for server in servers:
        server.stop()


ANA = {"email": "ana@example.com", "name": "Ana"}


async def test_welcome_email(smtp: Callable[..., Mailbox], caplog: pytest.LogCaptureFixture) -> None:
    mailbox = smtp()
    with caplog.at_level(logging.INFO, "pgqueue.job"):
        result = await run("send_welcome_email", ANA)
    [message] = mailbox.messages
    assert mailbox.envelopes == [("queue@example.org", ["ana@example.com"], False)]
    assert (message["To"], message["From"]) == ("Ana <ana@example.com>", "queue@example.org")
    assert message["Subject"] == "Welcome"
    assert message.get_content().strip() == "Welcome Ana!"
    assert message["Date"].datetime.tzinfo is not None
    assert result == {
        "message": "Successfully sent welcome email to ana@example.com",
        "message_id": message["Message-ID"],
    }
    assert [each.getMessage() for each in caplog.records] == ["Successfully sent welcome email to ana@example.com"]


async def test_the_message_id_tells_repetitions(smtp: Callable[..., Mailbox]) -> None:
    mailbox = smtp()
    for about in ({"id": 1}, {"id": 1}, {"id": 2}, {"id": 3, "key": "w-7"}, {"id": 4, "key": "w-7"}):
        await run("send_welcome_email", ANA, **about)
    await run("send_welcome_email", {**ANA, "email": "bob@example.com"}, id=1)
    ids = [message["Message-ID"] for message in mailbox.messages]
    assert ids[0] == ids[1]
    assert ids[3] == ids[4]
    assert len(set(ids)) == 4
    assert all(each.endswith("@example.org>") for each in ids)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("Zoë Ångström", "Zoë Ångström"),
        ("日本 太郎", "日本 太郎"),
        ("👩‍👩‍👧 家", "👩‍👩‍👧 家"),
        ('Smith, "Bob" <x@y.org>', 'Smith, "Bob" <x@y.org>'),
        ("Bob\r\nBcc: eve@example.org", "Bob Bcc: eve@example.org"),
        ("Bob\n\nAnother body\u2028\x0b\x85x", "Bob Another body x"),
        ("nul\x00l\x07", "null"),
        ("", ""),
    ],
)
async def test_any_name_is_safe(smtp: Callable[..., Mailbox], name: str, shown: str) -> None:
    mailbox = smtp()
    await run("send_welcome_email", {"email": "ana@example.com", "name": name})
    [message], [(_, recipients, _)] = mailbox.messages, mailbox.envelopes
    assert recipients == ["ana@example.com"]
    assert mailbox.contents[0].isascii()
    assert message["Bcc"] is None
    [to] = message["To"].addresses
    assert (to.display_name, to.addr_spec) == (shown, "ana@example.com")
    assert message.get_content().strip() == (f"Welcome {shown}!" if shown else "Welcome!")


async def test_a_long_name_is_folded(smtp: Callable[..., Mailbox]) -> None:
    mailbox = smtp()
    await run("send_welcome_email", {"email": "ana@example.com", "name": "é" * 200})
    assert max(map(len, mailbox.contents[0].splitlines())) < 100
    # Python 3.11's newer parser puts blanks between the parts of such a name.
    to = message_from_bytes(mailbox.contents[0])["To"]
    assert str(make_header(decode_header(to))) == "é" * 200 + " <ana@example.com>"


@pytest.mark.parametrize("email", ["o'hara+news@mail.example.co.uk", "a@localhost", "x@" + "b" * 60 + ".example.org"])
async def test_addresses(smtp: Callable[..., Mailbox], email: str) -> None:
    mailbox = smtp(environ={"SMTP_EMAIL": "queue@" + "c" * 60 + ".example.org"})
    await run("send_welcome_email", {"email": email, "name": "X"})
    assert mailbox.envelopes[0][1] == [email]
    assert mailbox.messages[0]["Message-ID"].count("@") == 1


async def test_a_domain_with_other_letters(smtp: Callable[..., Mailbox]) -> None:
    mailbox = smtp()
    await run("send_welcome_email", {"email": "ana@bücher.example", "name": "Ana"})
    assert mailbox.envelopes[0][1] == ["ana@xn--bcher-kva.example"]


BAD_ADDRESSES = ["", "ana", "@x.org", "ana@", "a b@x.org", "a@x.org, b@x.org", "a@x.org\r\nBcc: b@x.org", "a@x.org\n",
                 "Ana <a@x.org>", "a@x..org", "a@-x.org", ".a@x.org", "a@[1.2.3.4]", "jörg@x.org", "a" * 65 + "@x.org",
                 "a@" + ".".join(["b" * 60] * 5), "a@x.org>", "a\x00@x.org"]  # fmt: skip


@pytest.mark.parametrize("email", BAD_ADDRESSES)
async def test_bad_addresses_are_refused(smtp: Callable[..., Mailbox], email: str) -> None:
    mailbox = smtp()
    with pytest.raises(Undecodable, match=r"email: .*must be an e-mail address"):
        await run("send_welcome_email", {"email": email, "name": "Ana"})
    # And also when somebody calls the function itself.
    with pytest.raises(GiveUp, match="email must be an e-mail address"):
        welcome.send_welcome_email(context("send_welcome_email"), email, "Ana")
    assert mailbox.messages == []


@pytest.mark.parametrize(
    "payload", [{"email": "a@x.org"}, {"email": 7, "name": "x"}, {"email": "a@x.org", "name": "x" * 201}]
)
async def test_bad_payloads_are_refused(payload: Any) -> None:
    with pytest.raises(Undecodable):
        await run("send_welcome_email", payload)


async def test_settings_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GiveUp, match="set SMTP_HOST"):
        await run("send_welcome_email", ANA)
    monkeypatch.setenv("SMTP_HOST", "127.0.0.1")
    base.settings.cache_clear()
    with pytest.raises(GiveUp, match="set SMTP_EMAIL"):
        await run("send_welcome_email", ANA)
    monkeypatch.setenv("SMTP_EMAIL", "not an address")
    base.settings.cache_clear()
    with pytest.raises(GiveUp, match="SMTP_EMAIL must be an e-mail address"):
        await run("send_welcome_email", ANA)


@pytest.mark.parametrize("command", ["RCPT", "DATA"])
async def test_a_refusal_for_now_is_tried_again(smtp: Callable[..., Mailbox], command: str) -> None:
    smtp({command: "451 4.3.0 try again later"})
    with pytest.raises(Exception, match="try again later") as raised:
        await run("send_welcome_email", ANA)
    assert failure(raised.value, Retry(), 1).delay is not None


@pytest.mark.parametrize("command", ["RCPT", "DATA"])
async def test_a_refusal_for_good_is_not(smtp: Callable[..., Mailbox], command: str) -> None:
    smtp({command: "550 5.1.1 no such user"})
    with pytest.raises(GiveUp, match=r"127\.0\.0\.1 refused for good: 550 5\.1\.1 no such user"):
        await run("send_welcome_email", ANA)


@pytest.mark.parametrize("answer", ["421 closing", "500 what?"])
async def test_a_rude_goodbye_does_not_send_it_twice(smtp: Callable[..., Mailbox], answer: str) -> None:
    mailbox = smtp({"QUIT": answer})
    await run("send_welcome_email", ANA)
    assert len(mailbox.messages) == 1


async def test_a_server_that_is_down_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as url:
        port = url.rpartition(":")[2]
    monkeypatch.setenv("SMTP_HOST", "127.0.0.1")
    monkeypatch.setenv("SMTP_PORT", port)
    monkeypatch.setenv("SMTP_EMAIL", "queue@example.org")
    with pytest.raises(ConnectionRefusedError) as raised:
        await run("send_welcome_email", ANA)
    assert failure(raised.value, Retry(), 1).delay is not None


def authenticator(server: Any, session: Any, envelope: Any, mechanism: str, data: Any) -> AuthResult:
    return AuthResult(success=(data.login, data.password) == (b"queue@example.org", b"s3cret"), handled=False)


def tls_context(certificate: Path) -> ssl.SSLContext:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    return tls


async def test_tls_and_password(
    smtp: Callable[..., Mailbox], certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"tls_context": tls_context(certificate), "require_starttls": True}
    options |= {"authenticator": authenticator, "auth_required": True}
    mailbox = smtp(environ={"SMTP_PASSWORD": "s3cret"}, **options)
    with pytest.raises(ssl.SSLCertVerificationError):
        await run("send_welcome_email", ANA)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    await run("send_welcome_email", ANA)
    assert mailbox.envelopes == [("queue@example.org", ["ana@example.com"], True)]


async def test_a_wrong_password(smtp: Callable[..., Mailbox]) -> None:
    smtp(environ={"SMTP_PASSWORD": "wr0ng"}, authenticator=authenticator, auth_require_tls=False)
    with pytest.raises(GiveUp, match="refused for good: 535") as raised:
        await run("send_welcome_email", ANA)
    assert "wr0ng" not in str(raised.value)


async def test_a_password_that_nobody_asks_for(smtp: Callable[..., Mailbox]) -> None:
    mailbox = smtp(environ={"SMTP_PASSWORD": "s3cret"})
    with pytest.raises(GiveUp, match="AUTH"):
        await run("send_welcome_email", ANA)
    assert mailbox.messages == []


async def test_the_password_never_crosses_a_network_in_the_clear(
    smtp: Callable[..., Mailbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(welcome, "LOOPBACK", ())
    mailbox = smtp(environ={"SMTP_PASSWORD": "s3cret"}, authenticator=authenticator, auth_require_tls=False)
    with pytest.raises(GiveUp, match="offers no STARTTLS"):
        await run("send_welcome_email", ANA)
    assert mailbox.messages == []


def test_the_settings_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []

    def from_env() -> Settings:
        reads.append(1)
        return Settings()

    monkeypatch.setattr(Settings, "from_env", from_env)
    assert base.settings() is base.settings()
    assert reads == [1]
