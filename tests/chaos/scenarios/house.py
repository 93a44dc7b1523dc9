"""Those who keep the house for all are broken off, at each of their statements."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Literal

import psycopg

from pgqueue.db import connect
from pgqueue.worker.link import Link
from tests.chaos.cuts.play import quiet
from tests.chaos.cuts.stage import head
from tests.chaos.cuts.upkeep import GONE, PATHS, House, pass_by
from tests.chaos.lab import Ground, Lab, until
from tests.chaos.registry import scenario
from tests.chaos.verdict import Verdict
from tests.chaos.wire import Ambush, When, Wire

STATEMENTS = [statement for path in PATHS.values() for statement in path]
OLD = f"jobs_finished' || to_char(current_date - {GONE}, '_YYYYMMDD"
HELD_BY = {
    "tick": "jobs_live IN ACCESS EXCLUSIVE MODE",
    "promote": "jobs_live IN SHARE MODE",
    "expire_workers": "workers IN SHARE MODE",
    "rescue": "jobs_live IN SHARE MODE",
    # When the tallies are deleted, and the totals not written yet.
    "fold": "totals IN SHARE MODE",
    # When a partition of the jobs is made, and one of the attempts is not.
    "make_partitions": "attempts_default IN ACCESS SHARE MODE",
    # When a partition of the attempts is dropped, and one of the jobs is not.
    "drop_partitions": "{old} IN ACCESS SHARE MODE",
    "prune_keys": "idempotency_keys IN SHARE MODE",
    "prune_effects": "effects IN SHARE MODE",
    "prune_steps": "steps IN SHARE MODE",
    "prune_series": "series IN SHARE MODE",
    "prune_workers": "workers IN SHARE MODE",
    "prune_access": "refresh_tokens IN SHARE MODE",
}
"""What each of them waits for, in its middle if it has one."""


@scenario(
    "X5",
    "whoever keeps the house (promotes, rescues, folds the tallies, makes and drops partitions, prunes) is killed with"
    " -9, or its connection or its backend is: before, in the middle of and after each of its statements",
    invariant="the next one goes on where it stopped: totals are exact, no partition is half made, no history and no"
    " key goes early, nothing that is past its time stays",
)
async def x5(lab: Lab) -> Verdict:
    with quiet():
        return await break_the_house(lab)


async def break_the_house(lab: Lab) -> Verdict:
    ground = await lab.ground(audit=False)
    wire = await lab.wire(ground)
    verdict = Verdict()
    async with await connect(ground.dsn) as conn:
        house = House(conn)
        await house.prepare()
        scene = Scene(lab, ground, wire, house, verdict)
        for _ in range(lab.size(1, 1, 10)):
            for statement in STATEMENTS:
                await scene.cut(statement, "before")
                await scene.cut(statement, "after")
                await scene.break_in_the_middle(statement, "its connection")
                await scene.break_in_the_middle(statement, "its backend")
                moments: list[When | Literal["middle"]] = ["before", "middle", "after"]
                for moment in lab.size([], lab.random.sample(moments, 1), moments):
                    await scene.kill(statement, moment)
    verdict.n = sum(scene.faults.values())
    verdict.faults = dict(scene.faults)
    verdict.figures = {"statements": len(STATEMENTS), "rescued": house.lost, "partitions_dropped": 2 * house.old}
    return verdict


class Scene:
    def __init__(self, lab: Lab, ground: Ground, wire: Wire, house: House, verdict: Verdict) -> None:
        self.lab = lab
        self.ground = ground
        self.wire = wire
        self.house = house
        self.verdict = verdict
        self.faults = Counter[str]()

    async def cut(self, statement: str, when: When) -> None:
        await self.house.soil(PATHS)
        ambush = self.wire.ambush(head(statement), when, lambda: None)
        await self._pass()
        await self._judge(ambush, f"its connection cut {when}", statement)

    async def break_in_the_middle(self, statement: str, what: str) -> None:
        await self.house.soil(PATHS)
        ambush = self.wire.ambush(head(statement), None, lambda: None)
        passing = asyncio.create_task(self._pass())
        async with self._held_up(ambush, statement):
            if what == "its backend":
                await self.ground.rows(TERMINATE)
            elif ambush.link is not None:
                ambush.link.client.abort()
        await passing
        await self._judge(ambush, f"{what} cut in the middle", statement)

    async def kill(self, statement: str, moment: When | Literal["middle"]) -> None:
        """A real worker, which does all of it when it starts; the jobs are none of its business."""
        await self.house.soil(PATHS)
        worker = self.lab.worker(self.ground, dsn=self.wire.dsn, queues=["elsewhere"], threads=1)
        kill = partial(os.kill, worker.pid, signal.SIGKILL)
        if moment == "middle":
            async with self._held_up(self.wire.ambush(head(statement), None, kill), statement) as ambush:
                kill()
        else:
            ambush = self.wire.ambush(head(statement), moment, kill)
            await asyncio.wait_for(ambush.reached.wait(), 60)
        await until(lambda: worker.code is not None, "it is dead")
        await self._judge(ambush, f"kill -9 {moment}", statement)

    @asynccontextmanager
    async def _held_up(self, ambush: Ambush, statement: str) -> AsyncIterator[Ambush]:
        """The statement is with the server, and waits for a lock."""
        await asyncio.wait_for(ambush.reached.wait(), 60)
        table = HELD_BY[statement].format(old=await self.ground.value(f"SELECT '{OLD}')"))
        async with await psycopg.AsyncConnection.connect(self.ground.dsn) as holder:
            await holder.execute(f"LOCK TABLE pgqueue.{table}".encode())
            ambush.let_go()
            await until(lambda: self.ground.value(WAITS), f"{statement} waits for {table}", 10, every=0.005)
            yield ambush
            await holder.rollback()

    async def _pass(self) -> None:
        link = Link(self.wire.dsn, "pgqueue-janitor x5", longest_pause=0.01)
        await pass_by(link)
        await link.close()

    async def _judge(self, ambush: Ambush, fault: str, statement: str) -> None:
        """What is left of it ends; then another one passes by, undisturbed."""
        self.verdict.expect(ambush.reached.is_set(), f"{statement}: nobody came by")
        self.faults[fault] += 1
        await until(lambda: self.ground.value(NOBODY), "its sessions have ended")
        link = Link(self.ground.dsn, "pgqueue-janitor x5")
        half_made = await self.house.half_made()
        await pass_by(link)
        await link.close()
        problems = [f"{leaf} is half made" for leaf in half_made] + await self.house.problems()
        self.verdict.problems += [f"{statement}, {fault}: {problem}" for problem in problems]


WAITS = """
SELECT EXISTS (SELECT FROM pg_locks l JOIN pg_stat_activity a USING (pid)
               WHERE a.datname = current_database() AND a.application_name LIKE 'pgqueue-janitor%' AND NOT l.granted)
"""
TERMINATE = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE 'pgqueue-janitor%'
"""
NOBODY = """
SELECT NOT EXISTS (SELECT FROM pg_stat_activity
                   WHERE datname = current_database() AND application_name LIKE 'pgqueue-%')
"""
