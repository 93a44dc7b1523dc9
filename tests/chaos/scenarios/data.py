"""What is stored, and under which settings: keys that several jobs share, and databases whose owner has ideas."""

import asyncio
from collections import Counter

from tests.chaos.lab import LEASE, Ground, Lab, observed, until
from tests.chaos.registry import scenario
from tests.chaos.verdict import Verdict, judge


@scenario(
    "X3",
    "three jobs for each effect, while workers are killed and frozen, PostgreSQL crashes and Redis is killed",
    invariant="one effect a key, and every job ends as completed",
)
async def x3(lab: Lab) -> Verdict:
    ground = await lab.ground(own=True)
    monitor = await lab.monitor(ground)
    valkey = await lab.valkey()

    def start() -> None:
        lab.worker(ground, threads=8, REDIS_URL=valkey.url)

    for _ in range(3):
        start()
    groups = lab.size(200, 600, 10_000)
    keys = iter(lab.keys(3 * groups))
    jobs = [
        ("twin", {"key": next(keys), "group": f"g{number}", "seconds": lab.random.choice([0, 0, 0.05])})
        for number in range(groups)
        for _ in range(3)
    ]
    lab.random.shuffle(jobs)
    producing = asyncio.create_task(lab.produce(ground, jobs))
    faults: Counter[str] = Counter()
    for _ in range(lab.size(4, 8, 60)):
        await asyncio.sleep(lab.random.uniform(0.2, 1))
        fault = lab.random.choice(["kill -9", "kill -9", "SIGSTOP", "PostgreSQL", "Redis"])
        faults[fault] += 1
        if fault == "kill -9":
            lab.random.choice(lab.alive).kill()
            start()
        elif fault == "SIGSTOP":
            await lab.freeze(lab.random.choice(lab.alive), LEASE * 1.3)
        elif fault == "PostgreSQL":
            await asyncio.to_thread(ground.server.stop, "immediate")
            await asyncio.to_thread(ground.server.restart)
        else:
            await asyncio.to_thread(valkey.kill)
            await asyncio.to_thread(valkey.restart)
    await producing
    await ground.settled()
    verdict = Verdict(n=len(jobs), faults=dict(faults))
    observed(verdict, monitor)
    effects = Counter(row["key"] for row in await ground.rows("SELECT key FROM public.effects"))
    there = await ground.rows("SELECT payload->>'key' AS key, payload->>'group' AS \"group\" FROM pgqueue.jobs")
    groups_there = {row["group"] for row in there}
    verdict.lost = len(lab.ledger.acknowledged() - {row["key"] for row in there}) + len(groups_there - effects.keys())
    verdict.duplicated = sum(count > 1 for count in effects.values())
    verdict.unexpected = len(effects.keys() - groups_there)
    statuses = await ground.statuses()
    verdict.figures |= {"effects": len(effects), "statuses": statuses}
    verdict.expect(set(statuses) == {"completed"}, f"not all are completed: {statuses}")
    return verdict


STRICT = {
    "statement_timeout": "2s",
    "lock_timeout": "300ms",
    "idle_in_transaction_session_timeout": "1s",
    "idle_session_timeout": "3s",
    "default_transaction_isolation": "serializable",
    "timezone": "Pacific/Chatham",
    "datestyle": "SQL, DMY",
    "intervalstyle": "postgres_verbose",
    "bytea_output": "escape",
    "extra_float_digits": "-10",
    "search_path": "nowhere",
    "row_security": "off",
    "jit": "on",
    "jit_above_cost": "0",
    "plan_cache_mode": "force_custom_plan",
    "enable_indexscan": "off",
}


@scenario(
    "X4",
    "a database with odd settings (serializable by default, short timeouts, no index scans, rare styles of dates and"
    " intervals), and statements of workers cancelled at random",
    invariant="nothing lost, nothing twice, nothing stuck",
)
async def x4(lab: Lab) -> Verdict:
    ground = await lab.ground()
    await set_defaults(ground, STRICT)
    lab.sink()
    for _ in range(2):
        await ground.worker_of(lab.worker(ground))
    types = ["effect", "threaded", "keyed", "mail", "fickle"]
    jobs = [(lab.random.choice(types), {"key": key}) for key in lab.keys(lab.size(200, 1_000, 10_000))]
    producing = asyncio.create_task(lab.produce(ground, jobs, batch=10))
    cancelled = 0
    for _ in range(lab.size(60, 300, 2_000)):
        cancelled += len(await ground.rows(CANCEL))
        await asyncio.sleep(0.02)
    await producing
    await ground.settled()
    verdict = await judge(lab, ground, doubts=cancelled)
    verdict.faults = {"statements cancelled": cancelled, "odd settings": len(STRICT)}
    verdict.figures["producers_refused"] = dict(lab.refused)
    verdict.expect(len(lab.alive) == 2, "a worker has ended")
    asleep = "SELECT count(*) = 2 FROM pgqueue.workers WHERE expires_at > now() AND idle_since IS NOT NULL"
    await until(lambda: ground.value(asleep), "both workers are idle", 20)
    return verdict


CANCEL = """
SELECT pg_cancel_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE 'pgqueue%' AND state <> 'idle' LIMIT 1
"""


async def set_defaults(ground: Ground, settings: dict[str, str]) -> None:
    database = await ground.value("SELECT current_database()")
    for name, value in settings.items():
        await ground.rows(f"ALTER DATABASE {database} SET {name} = {value if name == 'search_path' else repr(value)}")
