"""Wake-ups that are lost, and how soon the dead are noticed."""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from psycopg.types.json import Jsonb

from tests.chaos.lab import HEARTBEAT, LEASE, POLL, RESCUE, Ground, Lab, connected, until
from tests.chaos.registry import scenario
from tests.chaos.scenarios.commits import first_claim, restart
from tests.chaos.stalls import Stalls
from tests.chaos.verdict import Verdict, judge, percentile

SLACK = 0.1
"""Seconds, beyond those for which the machine stood still."""
STARTED = """
SELECT payload->>'key' AS key, extract(epoch FROM started_at)::float AS started
FROM pgqueue.jobs WHERE type = 'effect' AND attempt = 1 AND lost = 0
"""
TERMINATE_LISTENER = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE 'pgqueue-listen%' ORDER BY random() LIMIT 1
"""
RECONNECTED = 3.0
WOKEN = 1.0
"""Seconds: one that committed late beside others is found by a sweep, a second later at most."""
INSERT = "INSERT INTO pgqueue.jobs (type, payload) VALUES ('effect', %s)"
NO_WAKE = "UPDATE pgqueue.switches SET enabled = false WHERE name = 'wake'"


@dataclass
class Wait:
    """How long a job waited after its producer knew of its commit, or anybody for anything."""

    seconds: float
    stalled: float
    """So much of it the machine stood still."""


@scenario(
    "C21",
    "single inserts while idle workers lose their listeners at random, then with NOTIFY switched off; then by several"
    " producers at once, in transactions of up to 50 ms, beside workers that poll once a minute",
    invariant="every job starts within a poll interval and a little; where nobody polls, because it was notified",
)
async def c21(lab: Lab) -> Verdict:
    ground = await lab.ground()
    for _ in range(2):
        await ground.worker_of(lab.worker(ground, threads=4, level="info"))
    await asyncio.sleep(1)
    cuts = 0
    with Stalls(ground.dsn).noted() as stalls:
        acknowledged: dict[str, float] = {}
        for key in lab.keys(lab.size(60, 400, 10_000)):
            if lab.random.random() < 0.2:
                cuts += len(await ground.rows(TERMINATE_LISTENER))
            await produce(lab, ground, key, acknowledged)
            await asyncio.sleep(lab.random.choice([0, 0.001, 0.01, 0.1]))
        await ground.settled()
        deaf = await waits(ground, acknowledged, stalls)
        silent = await silently(lab, ground, lab.size(10, 60, 300), stalls)
        patient = await without_polls(lab, ground, lab.size(30, 200, 3_000), stalls)
    verdict = await judge(lab, ground)
    verdict.faults = {"listeners cut": cuts, "inserts without NOTIFY": len(silent), "without polls": len(patient)}
    verdict.figures |= {
        **told("start_delay", deaf),
        **told("start_delay_without_notify", silent),
        **told("start_delay_without_polls", patient),
        **stood_still(stalls),
    }
    verdict.expect(worst(deaf + silent) < POLL + SLACK, f"a job waited for {worst(deaf + silent):.2f} s")
    verdict.expect(worst(patient) < WOKEN, f"a wake-up was lost: a job waited for {worst(patient):.2f} s")
    return verdict


async def without_polls(lab: Lab, ground: Ground, number: int, stalls: Stalls) -> list[Wait]:
    """How long single jobs wait when only a NOTIFY can wake who sleeps, a late commit beside another."""
    await ground.settled()
    lab.kill_all()
    await ground.rows(NO_WAKE.replace("false", "true"))
    pollers = [lab.worker(ground, threads=4, PGQUEUE_POLL_INTERVAL="60") for _ in range(2)]
    ids = [await ground.worker_of(each) for each in pollers]
    # Until the leases of those that were killed are over, wake-ups may go to them.
    asleep = "SELECT bool_and(idle_since IS NOT NULL AND listening AND id = ANY (%s)) FROM pgqueue.workers"
    await until(lambda: ground.value(asleep + " WHERE expires_at > now()", ids), "both sleep, and nobody else is there")
    acknowledged: dict[str, float] = {}

    async def some(keys: list[str]) -> None:
        conn = await connected(ground.dsn)
        for key in keys:
            lab.ledger.attempt([key])
            await conn.execute(INSERT.encode(), [Jsonb({"key": key})])
            await asyncio.sleep(lab.random.choice([0, lab.random.uniform(0, 0.05)]))
            await conn.commit()
            acknowledged[key] = time.time()
            lab.ledger.acknowledge([key])
            await asyncio.sleep(lab.random.choice([0, 0.02, 0.3]))
        await conn.close()

    await asyncio.gather(*(some(lab.keys(number // 3)) for _ in range(3)))
    await ground.settled()
    return await waits(ground, acknowledged, stalls)


async def produce(lab: Lab, ground: Ground, key: str, acknowledged: dict[str, float]) -> None:
    lab.ledger.attempt([key])
    await ground.rows(INSERT, Jsonb({"key": key}))
    acknowledged[key] = time.time()
    lab.ledger.acknowledge([key])


async def silently(lab: Lab, ground: Ground, number: int, stalls: Stalls) -> list[Wait]:
    """How long single jobs wait when nobody is told of them."""
    await ground.settled()
    await ground.rows(NO_WAKE)
    acknowledged: dict[str, float] = {}
    for key in lab.keys(number):
        await produce(lab, ground, key, acknowledged)
        await asyncio.sleep(lab.random.uniform(POLL, 2 * POLL))
    await ground.settled()
    return await waits(ground, acknowledged, stalls)


async def waits(ground: Ground, acknowledged: dict[str, float], stalls: Stalls) -> list[Wait]:
    found = []
    for row in await ground.rows(STARTED):
        if (since := acknowledged.get(row["key"])) is not None:
            found.append(Wait(max(0.0, row["started"] - since), stalls.within(since, row["started"])))
    return found


def worst(found: list[Wait]) -> float:
    """The longest that a job waited while the machine went on."""
    return max(each.seconds - each.stalled for each in found)


def stood_still(stalls: Stalls) -> dict[str, float]:
    return {"machine_stalled_longest": round(stalls.longest, 3), "machine_stalled": round(stalls.total, 1)}


def told(name: str, found: list[Wait]) -> dict[str, dict[str, float | None]]:
    values = [each.seconds for each in found]
    return {name: {"p50": percentile(values, 50), "p99": percentile(values, 99), "max": percentile(values, 100)}}


@scenario(
    "B1",
    "the bounds: kill -9 of workers, restarts of PostgreSQL and lost NOTIFYs, one at a time, with nothing else wrong",
    invariant="all that a dead worker ran starts again within lease timeout + rescue interval; claimed again within a"
    " reconnect; started within a poll",
)
async def b1(lab: Lab) -> Verdict:
    ground = await lab.ground(own=True)
    with Stalls(ground.dsn).noted() as stalls:
        dead = [await notice_death(lab, ground, stalls) for _ in range(lab.size(2, 12, 50))]
        lab.worker(ground)
        back = [await come_back(lab, ground, stalls) for _ in range(lab.size(1, 6, 25))]
        silent = await silently(lab, ground, lab.size(10, 40, 200), stalls)
    verdict = await judge(lab, ground)
    verdict.faults = {"kill -9": len(dead), "immediate restarts": len(back), "lost NOTIFYs": len(silent)}
    verdict.recovery = [each.seconds for each in dead]
    verdict.figures |= {
        "bound_dead_worker": f"lease timeout {LEASE:g} + rescue interval {RESCUE:g} = {LEASE + RESCUE:g} s",
        **told("dead_worker", dead),
        **told("postgres_back_to_first_claim", back),
        "bound_lost_notify": f"poll interval {POLL:g} s",
        **told("lost_notify", silent),
        **stood_still(stalls),
    }
    verdict.expect(worst(dead) < LEASE + RESCUE + SLACK, f"a dead worker's last job waited for {worst(dead):.2f} s")
    verdict.expect(worst(back) < RECONNECTED, f"claimed again only after {worst(back):.2f} s")
    verdict.expect(worst(silent) < POLL + SLACK, f"a job waited for {worst(silent):.2f} s")
    return verdict


async def notice_death(lab: Lab, ground: Ground, stalls: Stalls) -> Wait:
    """From kill -9 until the last of its eight jobs has started again, on another worker."""
    victim = lab.worker(ground)
    await ground.worker_of(victim)
    marks = {key: str(lab.folder / key) for key in lab.keys(8)}
    jobs = [("effect", {"key": key, "marker": mark, "seconds": 30}) for key, mark in marks.items()]
    await lab.produce(ground, jobs)
    await until(lambda: all(Path(mark).exists() for mark in marks.values()), "they all run")
    other = lab.worker(ground)
    await ground.worker_of(other)
    await asyncio.sleep(lab.random.uniform(0, HEARTBEAT))
    began = time.time()
    victim.kill()
    await ground.settled()
    last = "SELECT max(extract(epoch FROM started_at))::float FROM pgqueue.jobs WHERE payload->>'key' = ANY (%s)"
    ended = await ground.value(last, list(marks))
    other.kill()
    return Wait(ended - began, stalls.within(began, ended))


async def come_back(lab: Lab, ground: Ground, stalls: Stalls) -> Wait:
    """From the moment when PostgreSQL answers again until a job is claimed."""
    await ground.settled()
    await lab.produce(ground, [("effect", {"key": key, "seconds": 0.05}) for key in lab.keys(400)])
    await restart(ground, "immediate")
    seconds = await first_claim(ground)
    return Wait(seconds, stalls.within(time.time() - seconds, time.time()))
