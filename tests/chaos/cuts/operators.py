"""What operators do, by the Python API; each that took effect has one row in the audit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from pgqueue import PgQueue, control
from pgqueue.db import Connection
from pgqueue.errors import DatabaseUnavailable, JobNotFound, WrongStatus
from tests.chaos.cuts.stage import COMMIT, Theatre, counted, nonzero, values

BATCH = 40
FAILED = """
INSERT INTO pgqueue.jobs (queue, type, status, finished_at, attempt, reason)
SELECT %s, 'part', 'failed', now(), 1, 'error' FROM generate_series(1, %s) RETURNING id
"""
PENDING = "INSERT INTO pgqueue.jobs (queue, type) SELECT %s, 'part' FROM generate_series(1, %s) RETURNING id"
IN_DOUBT = """
WITH jobs AS (
    INSERT INTO pgqueue.jobs (queue, type, status, finished_at, attempt, reason)
    SELECT %s, 'part', 'failed', now(), 1, 'in_doubt' FROM generate_series(1, %s) RETURNING id
)
INSERT INTO pgqueue.effects (key, job_id, expires_at)
SELECT 'effect of ' || id, id, now() + interval '1 day' FROM jobs RETURNING job_id
"""


@dataclass(frozen=True)
class Action:
    statement: str
    jobs: str
    """Makes so many of them in a queue."""
    act: Callable[[Connection, Sequence[int]], Awaitable[object]]
    logged: str
    fates: dict[str, int]
    """The statuses afterwards, as shares."""
    size: int = 1
    once: bool = True
    """Whether it cannot happen to a job again."""

    def done_to(self, ids: Sequence[int], happened: Counter[int]) -> list[int]:
        """Of many, those that it was done to before have a problem each."""
        return [id for id in ids if not (self.once and happened[id])]


async def retry(conn: Connection, ids: Sequence[int]) -> None:
    await control.retry_job(conn, ids[0], actor="chaos", reason="cut")


async def cancel(conn: Connection, ids: Sequence[int]) -> None:
    await control.cancel_job(conn, ids[0], actor="chaos")


async def delete(conn: Connection, ids: Sequence[int]) -> None:
    await control.delete_job(conn, ids[0], actor="chaos")


async def edit(conn: Connection, ids: Sequence[int]) -> None:
    await control.edit_job(conn, ids[0], {"priority": 7, "payload": {"edited": True}}, actor="chaos")


async def resolve(conn: Connection, ids: Sequence[int]) -> None:
    await control.resolve_job(conn, ids[0], "retry" if ids[0] % 2 else "completed", actor="chaos")


async def retry_many(conn: Connection, ids: Sequence[int]) -> None:
    await control.act_on_jobs(conn, ids, "retry", actor="chaos")


async def cancel_many(conn: Connection, ids: Sequence[int]) -> None:
    await control.act_on_jobs(conn, ids, "cancel", actor="chaos")


ACTIONS: dict[str, Action] = {
    "retry": Action("retry_job", FAILED, retry, "retry", {"pending": 1}),
    "retry many": Action("act_on_jobs", FAILED, retry_many, "retry", {"pending": 1}, size=5),
    "cancel": Action("cancel_job", PENDING, cancel, "cancel", {"cancelled": 1}),
    "cancel many": Action("act_on_jobs", PENDING, cancel_many, "cancel", {"cancelled": 1}, size=5),
    "delete": Action("delete_job", FAILED, delete, "delete", {}),
    "edit": Action("edit_job", PENDING, edit, "edit", {"pending": 1}, once=False),
    "resolve": Action("resolve_job", IN_DOUBT, resolve, "resolve", {"pending": 1, "completed": 1}),
}


async def operate(theatre: Theatre, path: str) -> None:
    action = ACTIONS[path]
    stage = await theatre.stage(path, action.statement, COMMIT)
    queue = path.replace(" ", "_")
    happened, ids, waiting = Counter[int](), [], list[int]()
    async with PgQueue(stage.wire.dsn) as app, stage.direct() as direct:
        while stage.goes_on:
            if len(waiting) < action.size:
                waiting += await values(direct, action.jobs, queue, BATCH)
                ids += waiting
            some = [waiting.pop() for _ in range(action.size)]
            while True:  # until the caller knows
                try:
                    async with app.pools.connection() as conn:
                        await action.act(conn, some)
                except DatabaseUnavailable:
                    if stage.happened(COMMIT):
                        happened.update(action.done_to(some, happened))
                except (WrongStatus, JobNotFound):
                    break  # it was done the last time
                else:
                    happened.update(action.done_to(some, happened))
                    break
        for id in waiting:
            ids.remove(id)
        await direct.execute("DELETE FROM pgqueue.jobs WHERE id = ANY(%s)", [waiting])
    if action.once:
        theatre.expect(all(happened[id] == 1 for id in ids), f"{path}: it did not happen once")
    logged = "SELECT job_id, count(*)::int FROM pgqueue.audit WHERE action = %s AND job_id = ANY(%s) GROUP BY 1"
    found = counted(await theatre.ground.rows(logged, action.logged, ids))
    theatre.same(found, nonzero(happened), f"{path}: rows of the audit")
    places = "SELECT count(*)::int, count(DISTINCT id)::int, array_agg(DISTINCT status::text) AS statuses"
    [row] = await theatre.ground.rows(f"{places} FROM pgqueue.jobs WHERE id = ANY(%s)", ids)
    theatre.same(row["count"], len(ids) if action.fates else 0, f"{path}: jobs in one place")
    theatre.same(set(row["statuses"] or ()) <= action.fates.keys(), True, f"{path}: {row['statuses']}")
    if path == "resolve":
        effects = "SELECT count(*)::int FROM pgqueue.effects WHERE done_at IS NOT NULL AND job_id = ANY(%s)"
        theatre.same(await theatre.ground.value(effects, ids), sum(id % 2 == 0 for id in ids), "effects that are done")


async def pause(theatre: Theatre) -> None:
    stage = await theatre.stage("pause and resume", "pause_queue", "resume_queue", COMMIT)
    acts = {"pause": control.pause_queue, "resume": control.resume_queue}
    happened, state = Counter[str](), ""
    async with PgQueue(stage.wire.dsn) as app:
        while stage.goes_on:
            state = "resume" if state == "pause" else "pause"
            while True:
                try:
                    async with app.pools.connection() as conn:
                        await acts[state](conn, "halted", actor="chaos")
                except DatabaseUnavailable:
                    happened[state] += stage.happened(COMMIT)
                else:
                    happened[state] += 1
                    break
            paused = await theatre.ground.value("SELECT paused_at FROM pgqueue.queues WHERE name = 'halted'")
            theatre.expect((paused is not None) == (state == "pause"), f"the queue is not as after {state}")
    logged = "SELECT action, count(*)::int FROM pgqueue.audit WHERE queue = 'halted' GROUP BY 1"
    theatre.same(counted(await theatre.ground.rows(logged)), nonzero(happened), "rows of the audit for pauses")
