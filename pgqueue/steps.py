"""What finished parts of a job returned, kept so that a retry does only the rest."""

from __future__ import annotations

from pgqueue.db import Connection
from pgqueue.errors import LeaseLost
from pgqueue.job import Lease
from pgqueue.sql import SQL


async def load_steps(conn: Connection, id: int) -> dict[str, str | None]:
    """The JSON text that each step returned, by the step's name."""
    cursor = await conn.execute(SQL.load_steps, {"id": id}, prepare=False)
    return dict(await cursor.fetchall())


async def save_step(conn: Connection, lease: Lease, name: str, result: str | None) -> None:
    parameters = {"id": lease.id, "lease_token": lease.lease_token, "name": name, "result": result}
    cursor = await conn.execute(SQL.save_step, parameters, prepare=False)
    if await cursor.fetchone() is None:
        raise LeaseLost(f"the lease on job {lease.id} is lost")
