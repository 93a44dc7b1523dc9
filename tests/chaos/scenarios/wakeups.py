"""Wake-ups that are lost, and how soon the dead are noticed."""

import asyncio

from tests.chaos.lab import HEARTBEAT, LEASE, POLL, RESCUE, Ground, Lab, until
from tests.chaos.registry import scenario
from tests.chaos.scenarios.commits import first_claim, restart
from tests.chaos.verdict import Verdict, judge, percentile

SLACK = 4.0
"""Seconds, for a machine on which other things run."""
DELAYS = """
SELECT extract(epoch FROM started_at - created_at)::float AS delay FROM pgqueue.jobs
WHERE id > %s AND type = 'effect' AND attempt = 1 AND lost = 0
"""
TERMINATE_LISTENER = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE 'pgqueue-listen%' ORDER BY random() LIMIT 1
"""
NO_WAKE = "UPDATE pgqueue.switches SET enabled = false WHERE name = 'wake'"


@scenario(
    "C21",
    "single inserts while idle workers lose their listeners at random, then with NOTIFY switched off",
    invariant="every job starts within a poll interval and a little; none waits for the next insert",
)
async def c21(lab: Lab) -> Verdict:
    ground = await lab.ground()
    for _ in range(2):
        await ground.worker_of(lab.worker(ground, threads=4))
    await asyncio.sleep(1)
    cuts = 0
    for key in lab.keys(lab.size(60, 400, 10_000)):
        if lab.random.random() < 0.2:
            cuts += len(await ground.rows(TERMINATE_LISTENER))
        await lab.produce(ground, [("effect", {"key": key})])
        await asyncio.sleep(lab.random.choice([0, 0.001, 0.01, 0.1]))
    await ground.settled()
    deaf = await delays_since(ground, 0)
    silent = await silently(lab, ground, lab.size(10, 60, 300))
    verdict = await judge(lab, ground)
    verdict.faults = {"listeners cut": cuts, "inserts without NOTIFY": len(silent)}
    verdict.figures |= told("start_delay", deaf) | told("start_delay_without_notify", silent)
    worst = max(*deaf, *silent)
    verdict.expect(worst < POLL + SLACK, f"a job waited for {worst:.2f} s")
    return verdict


async def silently(lab: Lab, ground: Ground, number: int) -> list[float]:
    """How long single jobs wait when nobody is told of them."""
    await ground.settled()
    last = await ground.value("SELECT max(id) FROM pgqueue.jobs") or 0
    await ground.rows(NO_WAKE)
    for key in lab.keys(number):
        await lab.produce(ground, [("effect", {"key": key})])
        await asyncio.sleep(lab.random.uniform(POLL, 2 * POLL))
    await ground.settled()
    return await delays_since(ground, last)


async def delays_since(ground: Ground, id: int) -> list[float]:
    return [row["delay"] for row in await ground.rows(DELAYS, id)]


def told(name: str, values: list[float]) -> dict[str, float | None]:
    return {
        f"{name}_p50": percentile(values, 50),
        f"{name}_p99": percentile(values, 99),
        f"{name}_max": percentile(values, 100),
    }


@scenario(
    "B1",
    "the bounds: kill -9 of workers, restarts of PostgreSQL and lost NOTIFYs, one at a time, with nothing else wrong",
    invariant="noticed within lease timeout + rescue interval; claimed again within a reconnect; started within a poll",
)
async def b1(lab: Lab) -> Verdict:
    ground = await lab.ground(own=True)
    dead = [await notice_death(lab, ground) for _ in range(lab.size(2, 12, 50))]
    lab.worker(ground)
    back = [await come_back(lab, ground) for _ in range(lab.size(1, 6, 25))]
    silent = await silently(lab, ground, lab.size(10, 40, 200))
    verdict = await judge(lab, ground)
    verdict.faults = {"kill -9": len(dead), "immediate restarts": len(back), "lost NOTIFYs": len(silent)}
    verdict.recovery = dead
    verdict.figures |= {
        "bound_dead_worker": f"lease timeout {LEASE:g} + rescue interval {RESCUE:g} = {LEASE + RESCUE:g} s",
        **told("dead_worker", dead),
        **told("postgres_back_to_first_claim", back),
        "bound_lost_notify": f"poll interval {POLL:g} s",
        **told("lost_notify", silent),
    }
    verdict.expect(max(dead) < LEASE + RESCUE + SLACK, f"a death was noticed after {max(dead):.2f} s")
    verdict.expect(max(silent) < POLL + SLACK, f"a job waited for {max(silent):.2f} s")
    return verdict


async def notice_death(lab: Lab, ground: Ground) -> float:
    """Seconds from kill -9 until its jobs are ready again; another worker, which has no slot to spare, notices."""
    victim, other = lab.worker(ground, queues=["default"]), lab.worker(ground, queues=["none"])
    dead = await ground.worker_of(victim)
    await ground.worker_of(other)
    keys = lab.keys(8)
    await lab.produce(ground, [("effect", {"key": key, "seconds": 30}) for key in keys[:4]])
    running = "SELECT count(*) FROM pgqueue.jobs_live WHERE status = 'running' AND worker_id = %s"
    await until(lambda: ground.value(f"SELECT ({running}) = 4", dead), "they run")
    await asyncio.sleep(lab.random.uniform(0, HEARTBEAT))
    began = asyncio.get_running_loop().time()
    victim.kill()
    await until(lambda: ground.value(f"SELECT ({running}) = 0", dead), "they are rescued", 30, 0.01)
    seconds = asyncio.get_running_loop().time() - began
    await ground.rows("UPDATE pgqueue.jobs_live SET payload = payload - 'seconds'")
    other.kill()
    return seconds


async def come_back(lab: Lab, ground: Ground) -> float:
    """Seconds from the moment when PostgreSQL answers again until a job is claimed."""
    await ground.settled()
    await lab.produce(ground, [("effect", {"key": key, "seconds": 0.05}) for key in lab.keys(400)])
    await restart(ground, "immediate")
    return await first_claim(ground)
