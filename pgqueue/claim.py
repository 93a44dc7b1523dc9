"""Claiming: lanes, floors and the sweep.

A lane is one (queue, priority). Within a lane jobs stand in the order of `seq`, and new ones are always at its end,
because a job takes a new `seq` each time it becomes ready. So a worker remembers for each lane a floor, a little below
the highest `seq` that it has claimed, and looks for more only from there on. Without floors, every claim would wade
again through the index entries of jobs that are already done, and those cannot be cleaned away while anybody holds a
snapshot open.

Below a floor, a job can stand only if its transaction committed very late or rolled back a claim. The sweep, which
looks everywhere and without floors, finds those, and the lanes that the worker does not know yet. It takes no more
than it may, but tells where each lane begins, and that is the lane's floor from then on, be it higher or lower. It runs
when a claim comes back short and at least every second; one that was not cheap has to wait until it is 5 % of the time.
Then it is better left to a scout on another connection, which claims nothing and only tells the floors: one job in
twenty would have to wait behind a sweep.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, LiteralString, NamedTuple
from uuid import UUID, uuid4

from psycopg.rows import RowMaker

from pgqueue.db import Connection
from pgqueue.sql import SQL

SWEEP_EVERY = 0.9
"""Seconds; with what a sweep and the claim after it take, nothing waits for longer than one."""
CHEAP_SWEEP = 0.005
SWEEP_SHARE = 0.05
LONGEST_PAUSE = 5.0
"""Seconds: however long a sweep takes, the next one comes this soon after it."""
OVERDUE = 2.0
"""Seconds: if the scout is so late, whoever claims sweeps again. Whoever was woken in vain does not wait for it."""
FORGET_LANE_AFTER = 60.0
BEHIND = 256
"""A floor stays so far behind the highest `seq` claimed: of producers that commit side by side, one that took a lower
number may commit later, and its job should not have to wait for a sweep."""


class Claimed(NamedTuple):
    """A job in the hands of a worker, or (parked) one that this worker met and cannot run."""

    id: int
    queue: str
    type: str
    payload: str
    """JSON text, decoded for each job alone: one that cannot be read must not take its neighbours along."""
    priority: int
    seq: int
    thread_demand: int
    timeout: float | None
    max_attempts: int
    attempt: int
    lost: int
    idempotency_key: str | None
    created: float
    """Seconds since 1970."""
    parked: bool

    @property
    def suspect(self) -> bool:
        """Whether it may be to blame: one death says nothing, as a worker dies with all that it runs."""
        return self.lost > 1


class Claim(NamedTuple):
    """What one statement brought. The token was made before it was sent, so it is known even if the answer is lost."""

    lease_token: str
    jobs: list[Claimed]


@dataclass(slots=True)
class Claimant:
    """Who claims, and what it can run."""

    worker_id: UUID
    queues: list[str] | None = None
    """NULL in the database: all queues."""
    types: list[str] | None = None
    threads: int = 1


@dataclass(slots=True)
class Lanes:
    """The lanes that this worker knows, with their floors."""

    floors: dict[tuple[str, int], int] = field(default_factory=dict)
    seen: dict[tuple[str, int], float] = field(default_factory=dict)
    turn: int = 0
    next_sweep: float = 0.0
    """Not before this, unless it is cheap."""
    last_sweep: float = 0.0
    scout_overdue: float = 0.0
    """Until then sweeps that are not cheap are left to the scout."""
    sweep_took: float = 0.0
    """Seconds, the last one."""
    sweep_cost: float = 0.0
    """The shorter of the last two: one that was held up, by a lock or by a silent network, says nothing of the next."""
    look_for_parked: bool = False
    """Once a second, or a worker that always finds something would never see what others parked for it."""
    lowest: int | None = None
    """The lowest priority of a claim that was full: what has less must wait."""

    def learn(self, jobs: Sequence[Claimed], now: float) -> None:
        """From jobs in the order in which they should run: the last of a lane has its highest `seq`."""
        for lane, seq in {(job.queue, job.priority): job.seq for job in jobs}.items():
            self.floors[lane] = max(self.floors.get(lane, 0), seq - BEHIND)
            self.seen[lane] = now

    def forget(self, now: float) -> None:
        for lane in [lane for lane, seen in self.seen.items() if now - seen > FORGET_LANE_AFTER]:
            del self.floors[lane], self.seen[lane]

    def arrays(self) -> dict[str, Any]:
        """Highest priority first; queues of the same priority take turns to be first."""
        self.turn += 1
        lanes = sorted(self.floors)
        turn = self.turn % len(lanes) if lanes else 0
        lanes = sorted(lanes[turn:] + lanes[:turn], key=lambda lane: -lane[1])
        return {
            "queues": [queue for queue, _ in lanes],
            "priorities": [priority for _, priority in lanes],
            "floors": [self.floors[lane] for lane in lanes],
        }

    def sweep_is_due(self, now: float) -> bool:
        return now - self.last_sweep >= SWEEP_EVERY and self.may_sweep(now)

    def may_sweep(self, now: float, *, woken: bool = False) -> bool:
        return self.sweep_cost < CHEAP_SWEEP or now >= self.may_sweep_at(woken=woken)

    def may_sweep_at(self, *, woken: bool) -> float:
        return self.next_sweep if woken else max(self.next_sweep, self.scout_overdue)

    def swept(self, started: float, ended: float) -> None:
        self.last_sweep = ended
        self.sweep_cost = min(ended - started, self.sweep_took)
        self.sweep_took = ended - started
        self.next_sweep = ended + self.pause_after_sweep()
        self.forget(ended)

    def pause_after_sweep(self) -> float:
        return min(self.sweep_cost * (1 / SWEEP_SHARE - 1), LONGEST_PAUSE)

    def needs_scout(self) -> bool:
        return self.sweep_cost >= CHEAP_SWEEP

    def scouted(self, firsts: Sequence[Claimed], now: float) -> bool:
        """From the first jobs of all lanes as they were a moment ago; whether there are some that we would not see."""
        news = False
        for first in firsts:
            lane = (first.queue, first.priority)
            self.seen[lane] = now
            floor = self.floors.get(lane)
            if floor is None or first.seq < floor:
                self.floors[lane] = first.seq
                news = True
            else:
                self.floors[lane] = max(floor, first.seq - BEHIND)
        return news


async def claim_next(
    conn: Connection, who: Claimant, lanes: Lanes, limit: int, *, quick: bool = False, woken: bool = False
) -> list[Claim]:
    """Up to `limit` jobs: from the known lanes, and from a sweep when those do not fill it or one is due. `quick`
    leaves out what is not due: whoever is about to sleep must not be quick. `woken`: for what it has not found."""
    now = time.monotonic()
    found: list[Claim] = []
    if lanes.look_for_parked:
        lanes.look_for_parked = False
        found.append(await claim_parked(conn, who, (limit + 1) // 2, lanes.lowest))
    if (missing := limit - count(found)) > 0:
        if lanes.sweep_is_due(now) or (quick and not lanes.floors):
            found.append(await sweep(conn, who, lanes, missing))
            lanes.look_for_parked = count(found) > 0
        else:
            if lanes.floors:
                found.append(await claim(conn, who, lanes, missing))
            if not quick and lanes.may_sweep(now, woken=woken) and (missing := limit - count(found)) > 0:
                found.append(await sweep(conn, who, lanes, missing))
    lanes.lowest = min(job.priority for one in found for job in one.jobs) if count(found) == limit else None
    if not quick and not any(job for one in found for job in one.jobs if not job.parked):
        found.append(await claim_parked(conn, who, limit))
    return [one for one in found if one.jobs]


def count(claims: Sequence[Claim]) -> int:
    return sum(len(one.jobs) for one in claims)


async def claim(conn: Connection, who: Claimant, lanes: Lanes, limit: int) -> Claim:
    taken = await take(conn, SQL.claim, who, limit, lanes.arrays())
    lanes.learn(taken.jobs, time.monotonic())
    return taken


async def sweep(conn: Connection, who: Claimant, lanes: Lanes, limit: int) -> Claim:
    started = time.monotonic()
    token, rows = await take(conn, SQL.sweep, who, limit, {"queues": who.queues})
    ended = time.monotonic()
    for first in rows:
        if not first.id:
            lanes.floors[(first.queue, first.priority)] = first.seq
    lanes.learn(rows, ended)
    lanes.swept(started, ended)
    return Claim(token, [job for job in rows if job.id])


async def scout(conn: Connection, who: Claimant, lanes: Lanes) -> bool:
    """Looks where a sweep would and takes nothing; whether there is something to claim that we would not have seen."""
    started = time.monotonic()
    _, firsts = await take(conn, SQL.sweep, who, 0, {"queues": who.queues})
    ended = time.monotonic()
    lanes.swept(started, ended)
    lanes.scout_overdue = lanes.next_sweep + OVERDUE
    lanes.look_for_parked = True
    return lanes.scouted(firsts, ended)


async def claim_parked(conn: Connection, who: Claimant, limit: int, lowest: int | None = None) -> Claim:
    """What others parked and this worker can run, of the priority `lowest` or higher."""
    return await take(conn, SQL.claim_parked, who, limit, {"queues": who.queues, "lowest": lowest})


async def take(conn: Connection, statement: LiteralString, who: Claimant, limit: int, lanes: dict[str, Any]) -> Claim:
    token = str(uuid4())
    cursor = conn.cursor(row_factory=claimed_row)
    await cursor.execute(
        statement,
        {
            **lanes,
            "types": who.types,
            "threads": who.threads,
            "limit": limit,
            "worker_id": who.worker_id,
            "lease_token": token,
        },
        prepare=False,
    )
    jobs = await cursor.fetchall()
    # RETURNING has no order of its own.
    jobs.sort(key=attrgetter("seq"))
    jobs.sort(key=attrgetter("priority"), reverse=True)
    return Claim(token, jobs)


def claimed_row(_: Any) -> RowMaker[Claimed]:
    return Claimed._make
