"""Whether the process lives, and whether it can serve."""

from __future__ import annotations

from starlette.responses import Response

from pgqueue import migrate
from pgqueue.api.calls import Call, answer, dumps
from pgqueue.api.problems import Problem
from pgqueue.errors import SchemaMismatch


async def health(call: Call) -> Response:
    """Never looks at the database: a process that lives must not be killed for a database that does not."""
    return answer(200, dumps({"status": "ok"}))


async def ready(call: Call) -> Response:
    if call.state.stopping.is_set():
        raise Problem(503, "unavailable", "this process is stopping", headers={"retry-after": "5"})
    async with call.connection() as conn:
        try:
            await migrate.check_schema(conn)
        except SchemaMismatch as error:
            raise Problem(503, "unavailable", str(error), headers={"retry-after": "10"}) from None
    return answer(200, dumps({"status": "ready"}))
