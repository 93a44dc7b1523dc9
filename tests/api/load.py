"""`python -m tests.api.load`: how much the API adds to what PostgreSQL costs.

POST /addJob beside a bare Starlette route with one INSERT, in turns, on the same database; with --rows, GET /jobs and
/failedJobs on a table of that many rows.
"""

import argparse
import asyncio
import json
import multiprocessing
import socket
import statistics
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import uvicorn
from psycopg_pool import AsyncConnectionPool
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from pgqueue import migrate
from pgqueue.api.app import create_app
from pgqueue.api.auth import SCOPES, create_token
from pgqueue.embedded import start_postgres
from pgqueue.settings import Settings

SETTINGS = Settings(jwt_secret="load-0123456789-abcdefghij-0123456789", rate_limit=0)
INSERT = "INSERT INTO pgqueue.jobs (type, payload) VALUES ('t', %s) RETURNING id"


def bare(dsn: str) -> Starlette:
    pool: Any = AsyncConnectionPool(
        dsn, min_size=1, max_size=10, open=False, kwargs={"autocommit": True, "prepare_threshold": None}
    )

    async def add(request: Request) -> JSONResponse:
        body = await request.json()
        async with pool.connection() as conn:
            row = await (await conn.execute(INSERT, [json.dumps(body["payload"])])).fetchone()
        return JSONResponse({"id": row[0]})

    async def lifespan(app: Any) -> Any:
        async with pool:
            yield

    return Starlette(routes=[Route("/addJob", add, methods=["POST"])], lifespan=asynccontextmanager(lifespan))


def run(kind: str, dsn: str, listener: socket.socket) -> None:
    app = bare(dsn) if kind == "bare" else create_app(SETTINGS, dsn)
    uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False)).run([listener])


async def load(port: int, request: bytes, connections: int, seconds: float) -> list[float]:
    """The seconds that each request took."""
    taken: list[float] = []
    end = time.perf_counter() + seconds

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            while time.perf_counter() < end:
                begun = time.perf_counter()
                writer.write(request)
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.split(b" ", 2)[1] == b"200", head
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                await reader.readexactly(length)
                taken.append(time.perf_counter() - begun)
        finally:
            writer.close()

    await asyncio.gather(*[client() for _ in range(connections)])
    return taken


def request(method: str, path: str, body: bytes = b"") -> bytes:
    token = create_token(SETTINGS, "load", SCOPES, 3600)[0]
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def percentile(taken: list[float], part: float) -> float:
    return sorted(taken)[min(len(taken) - 1, int(len(taken) * part))] * 1000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pgqueue-load-") as directory:
        Path(directory).chmod(0o711)
        server = start_postgres(Path(directory))
        processes, ports = [], {}
        try:
            migrate.up(server.dsn)
            for kind in ("bare", "api"):
                with socket.create_server(("127.0.0.1", 0)) as listener:
                    ports[kind] = listener.getsockname()[1]
                    process = multiprocessing.get_context("fork").Process(target=run, args=(kind, server.dsn, listener))
                    process.start()
                    processes.append(process)
            time.sleep(2)
            post = request("POST", "/addJob", b'{"type": "t", "payload": {"n": 1}}')
            rates: dict[str, list[float]] = {"bare": [], "api": []}
            for _ in range(given.rounds):
                for kind, port in ports.items():
                    taken = asyncio.run(load(port, post, given.connections, given.seconds))
                    rates[kind].append(len(taken) / given.seconds)
                    p50, p99 = percentile(taken, 0.5), percentile(taken, 0.99)
                    print(f"{kind:5} {rates[kind][-1]:7.0f}/s  p50 {p50:6.1f} ms  p99 {p99:6.1f} ms")
            ratio = statistics.median(rates["api"]) / statistics.median(rates["bare"])
            print(f"POST /addJob at {given.connections} connections: {ratio:.2f} of the bare route")
            if given.rows:
                look(server.dsn, ports["api"], given.rows)
        finally:
            for process in processes:
                process.terminate()
                process.join()
            server.stop()


def look(dsn: str, port: int, rows: int) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(
            "INSERT INTO pgqueue.jobs_finished (type, payload, status, finished_at, started_at, result) SELECT 't',"
            " '{\"n\": 1}', 'completed', now(), now(), '{}' FROM generate_series(1, %s)",
            [rows // 2],
        )
        conn.execute(
            "INSERT INTO pgqueue.jobs_failed (type, payload, status, finished_at, error) SELECT 't', '{}', 'failed',"
            " now() - make_interval(secs => i), 'x' FROM generate_series(1, %s) i",
            [rows // 2],
        )
        conn.execute("ANALYZE")
    for path in ("/jobs", "/jobs?status=Completed", "/db/jobs", "/failedJobs", "/failedJobs?page=100&limit=50"):
        taken = asyncio.run(load(port, request("GET", path), 1, 5))
        print(f"GET {path} with {rows} rows: p50 {percentile(taken, 0.5):.1f} ms  p95 {percentile(taken, 0.95):.1f} ms")


if __name__ == "__main__":
    main()
