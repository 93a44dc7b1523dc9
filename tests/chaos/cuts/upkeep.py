"""What a janitor does for all, with work for each of its statements, and what must be so however often it is broken
off."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import uuid4

from pgqueue import tally
from pgqueue.db import Connection
from pgqueue.prune import PARTITIONS_AHEAD
from pgqueue.worker.janitor import Janitor
from pgqueue.worker.link import Link
from tests.chaos.cuts.stage import OUTAGES, Stage, Theatre
from tests.chaos.lab import RESCUE

RETENTION = 30
KEPT = 20
"""Days: a partition that must stay."""
GONE = 40
"""… and one that must go."""

PATHS: dict[str, tuple[str, ...]] = {
    "tick": ("tick",),
    "promote": ("promote",),
    "rescue": ("expire_workers", "rescue"),
    "fold": ("fold",),
    "make partitions": ("make_partitions",),
    "drop partitions": ("drop_partitions",),
    "prune": ("prune_keys", "prune_effects", "prune_steps", "prune_series", "prune_workers", "prune_access"),
}
"""In the order in which a janitor that has just started does them."""

SCHEDULED = "INSERT INTO pgqueue.jobs (queue, type, status, run_at) VALUES ('house', 'due', 'scheduled', now())"
LOST = """
UPDATE pgqueue.jobs_live SET status = 'running', worker_id = gen_random_uuid(), lease_token = gen_random_uuid(),
    started_at = now()
WHERE type = 'lost' AND status = 'pending' AND lost = 0
"""
PAST_THEIR_TIME = """
INSERT INTO pgqueue.idempotency_keys (key, fingerprint, job_id, expires_at)
VALUES ({key}, '', 0, now() - interval '1 s');
INSERT INTO pgqueue.effects (key, job_id, begun_at, done_at, expires_at)
VALUES ({key}, 0, now() - interval '2 s', now(), now() - interval '1 s');
INSERT INTO pgqueue.steps (job_id, name, created_at) VALUES (0, {key}, now() - interval '31 days');
INSERT INTO pgqueue.series (step, at, queue, name, bucket, value)
VALUES (60, now() - interval '2 days', 'house', {key}, 0, 1);
INSERT INTO pgqueue.workers (id, name, host, pid, version, threads, expires_at)
VALUES (gen_random_uuid(), 'long gone', 'house', 1, '0', 1, now() - interval '2 days')
"""
"""All of it goes."""
STILL_NEEDED = """
INSERT INTO pgqueue.jobs (queue, type, status, run_at) VALUES ('house', 'waits', 'scheduled', now() + interval '1 day');
INSERT INTO pgqueue.idempotency_keys (key, fingerprint, job_id, expires_at)
SELECT 'of a job that waits', '', id, now() - interval '1 s' FROM pgqueue.jobs_live WHERE type = 'waits';
INSERT INTO pgqueue.idempotency_keys (key, fingerprint, job_id, expires_at)
VALUES ('not yet', '', 0, now() + interval '1 day');
INSERT INTO pgqueue.effects (key, job_id, expires_at) VALUES ('in doubt', 0, now() - interval '1 s');
INSERT INTO pgqueue.steps (job_id, name, created_at)
SELECT id, 'of a job that waits', now() - interval '31 days' FROM pgqueue.jobs_live WHERE type = 'waits'
"""
"""None of it goes."""
ENDED = """
INSERT INTO pgqueue.jobs_finished (queue, type, status, finished_at, result)
VALUES ('house', 'old', 'completed', current_date + {days} + interval '1 hour', '"kept"') RETURNING id
"""
LEAVES = """
SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'pgqueue' AND c.relkind = 'r' AND c.relname ~ '_[0-9]{{8}}$' AND EXISTS (
    SELECT FROM pg_inherits i WHERE i.inhrelid = c.oid) IS {attached} ORDER BY 1
"""
DAY = "to_char(current_date + {days}, '_YYYYMMDD')"


class House:
    """A database with something to do for each statement of a janitor."""

    def __init__(self, conn: Connection) -> None:
        self.conn = conn
        self.due = self.lost = self.old = 0
        self.added = 1
        self.caught = False
        """Whether the default partition has had a job that belongs elsewhere."""

    async def prepare(self) -> None:
        await self.conn.execute("SET TimeZone = 'UTC'")
        await self._run(STILL_NEEDED)
        await self._leaf(-KEPT)
        await self._run(ENDED.format(days=-KEPT))

    async def soil(self, paths: Iterable[str]) -> None:
        """Makes work for these."""
        if "promote" in paths:
            await self._run(SCHEDULED)
            self.due += 1
        if "rescue" in paths:
            await self._run("INSERT INTO pgqueue.jobs (queue, type) VALUES ('house', 'lost')")
            await self._run(LOST)
            self.lost += 1
        if "prune" in paths:
            await self._run(PAST_THEIR_TIME.format(key=f"'{uuid4()}'"))
        if "make partitions" in paths:
            await self._lose_a_leaf()
        if "drop partitions" in paths:
            await self._leaf(-GONE)
            [id] = await self._values(ENDED.format(days=-GONE))
            await self._run(
                "INSERT INTO pgqueue.idempotency_keys (key, fingerprint, job_id, expires_at)"
                f" VALUES ('asked again {id}', '', {id}, now() + interval '1 day')"
            )
            self.old += 1

    async def _lose_a_leaf(self) -> None:
        """As if nobody had made the partitions of the last day; a job that ends then is caught by the default one."""
        for parent in ("jobs_finished", "attempts"):
            [leaf] = await self._values(f"SELECT '{parent}' || {DAY.format(days=PARTITIONS_AHEAD)}")
            # What it holds stays in the history.
            if await self._values(f"SELECT 1 WHERE to_regclass('pgqueue.{leaf}') IS NOT NULL"):
                await self._run(f"ALTER TABLE pgqueue.{parent} DETACH PARTITION pgqueue.{leaf}")
                await self._run(f"INSERT INTO pgqueue.{parent} SELECT * FROM pgqueue.{leaf}; DROP TABLE pgqueue.{leaf}")
        if not self.caught:
            self.caught = True
            await self._run(ENDED.format(days=PARTITIONS_AHEAD))

    async def _leaf(self, days: int) -> None:
        for parent in ("jobs_finished", "attempts"):
            await self._run(
                f"""DO $$ BEGIN EXECUTE format('CREATE TABLE IF NOT EXISTS pgqueue.%I PARTITION OF pgqueue.{parent}'
                ' FOR VALUES FROM (%L) TO (%L)', '{parent}' || {DAY.format(days=days)}, current_date + {days},
                current_date + {days + 1}); END $$"""
            )

    async def half_made(self) -> list[str]:
        """Partitions that are not part of anything: whoever made or dropped them was broken off, and it showed."""
        found: list[str] = await self._values(LEAVES.format(attached="false"))
        return found

    async def problems(self) -> list[str]:
        """After a janitor has done everything undisturbed."""
        await tally.fold(self.conn)
        found = {name: (await self._values(query))[0] for name, query in CHECKS.items()}
        days = [-KEPT, *range(-1, PARTITIONS_AHEAD + 1)]
        leaves = [
            leaf
            for parent in ("attempts", "jobs_finished")
            for leaf in await self._values(
                f"SELECT '{parent}' || to_char(current_date + d, '_YYYYMMDD') FROM unnest(ARRAY{days}) d"
            )
        ]
        wanted = {
            "promoted": [self.due, 0],
            "rescued": [self.lost, self.lost, self.lost],
            "needed": [2, 1, 1, self.old],
            "not needed": [0, 0, 0, 0, 0],
            "history": ["future", "kept"] if self.caught else ["kept"],
            "caught by the default": 0,
            "tallies": 0,
            "enqueued": self.added + self.due + self.lost,
            "total of lost": self.lost,
            "series": self.added + self.due + self.lost,
        }
        problems = [f"{name}: {found[name]}, not {wanted[name]}" for name in wanted if found[name] != wanted[name]]
        attached: list[str] = await self._values(LEAVES.format(attached="true"))
        if attached != sorted(leaves):
            problems.append(f"partitions {attached}, not {sorted(leaves)}")
        return problems + [f"{leaf} is half made" for leaf in await self.half_made()]

    async def _values(self, query: str) -> list[Any]:
        return [row[0] for row in await (await self.conn.execute(query.encode())).fetchall()]

    async def _run(self, statements: str) -> None:
        await self.conn.execute(statements.encode())


CHECKS = {
    "promoted": "SELECT ARRAY[count(*), count(*) FILTER (WHERE status <> 'pending')]::int[] FROM pgqueue.jobs_live"
    " WHERE type = 'due'",
    # Once each: lost once, charged once in the history.
    "rescued": "SELECT ARRAY[count(*), sum(lost), (SELECT count(*) FROM pgqueue.attempts WHERE reason = 'worker_lost')]"
    "::int[] FROM pgqueue.jobs_live WHERE type = 'lost' AND status = 'pending'",
    # A key of a job whose history was dropped has its result, for whoever asks again.
    "needed": "SELECT ARRAY["
    "(SELECT count(*) FROM pgqueue.idempotency_keys WHERE key IN ('of a job that waits', 'not yet')),"
    " (SELECT count(*) FROM pgqueue.effects), (SELECT count(*) FROM pgqueue.steps),"
    " (SELECT count(*) FROM pgqueue.idempotency_keys WHERE key LIKE 'asked again%' AND result = '\"kept\"')]::int[]",
    "not needed": "SELECT ARRAY["
    "(SELECT count(*) FROM pgqueue.idempotency_keys WHERE expires_at < now() AND job_id = 0),"
    " (SELECT count(*) FROM pgqueue.effects WHERE done_at IS NOT NULL),"
    " (SELECT count(*) FROM pgqueue.steps WHERE job_id = 0),"
    " (SELECT count(*) FROM pgqueue.series WHERE at < now() - interval '30 hours'),"
    " (SELECT count(*) FROM pgqueue.workers WHERE name = 'long gone')]::int[]",
    "history": "SELECT array_agg(CASE WHEN finished_at > now() THEN 'future'"
    " WHEN finished_at > now() - interval '30 days' THEN 'kept' ELSE 'gone' END ORDER BY finished_at DESC)"
    " FROM pgqueue.jobs WHERE type = 'old'",
    "caught by the default": "SELECT (SELECT count(*) FROM pgqueue.jobs_finished_default)::int"
    " + (SELECT count(*) FROM pgqueue.attempts_default)::int",
    "tallies": "SELECT count(*)::int FROM pgqueue.tallies",
    "enqueued": "SELECT sum(value)::int FROM pgqueue.totals WHERE name = 'enqueued'",
    "total of lost": "SELECT coalesce(sum(value), 0)::int FROM pgqueue.totals WHERE name = 'lost'",
    "series": "SELECT sum(value)::int FROM pgqueue.series WHERE step = 3600 AND name = 'enqueued'",
}


def janitor(link: Link) -> Janitor:
    """One that has just started, and has everything to do."""
    return Janitor(
        link,
        uuid4(),
        poll_interval=1,
        rescue_interval=RESCUE,
        retention_days=RETENTION,
        known=set,
        cancel=lambda ids: None,
        ready=lambda: None,
    )


async def keep_house(theatre: Theatre) -> None:
    """One janitor after the other, each broken off at one of its statements."""
    first = await theatre.stage("tick", *PATHS["tick"])
    stages: list[Stage] = [first]
    for path in list(PATHS)[1:]:
        stages.append(await theatre.stage(path, *PATHS[path], wire=first.wire))
    link = first.link()
    async with first.direct() as conn:
        house = House(conn)
        await house.prepare()
        while paths := {stage.path for stage in stages if stage.goes_on}:
            # Those before have their cuts, and those behind are not reached: work for the next one will do.
            await house.soil([next(path for path in PATHS if path in paths)])
            await pass_by(link)
        await house.soil(PATHS)
        await pass_by(link)
        theatre.problems += [f"after the cuts of janitors, {problem}" for problem in await house.problems()]
    await link.close()


async def pass_by(link: Link) -> None:
    try:
        await janitor(link).run_once(await link.get())
    except OUTAGES as error:
        await link.failed(error, "the next one goes on")
