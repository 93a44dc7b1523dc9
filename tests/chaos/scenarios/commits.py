"""Connections that break, at every statement and at COMMIT, and servers that restart."""

import asyncio
import math
import os
import signal
import time
from collections import Counter
from contextlib import suppress
from urllib.parse import urlsplit

import psycopg

from tests.chaos.cuts.play import play
from tests.chaos.cuts.stage import COMMIT, Theatre, head
from tests.chaos.door import answered
from tests.chaos.lab import POLL, Ground, Lab, observed, until
from tests.chaos.registry import scenario
from tests.chaos.verdict import Verdict, judge, percentile
from tests.chaos.wire import Wire

WRITES = (
    *("claim", "sweep", "mark_idle", "mark_busy", "may_sleep", "complete", "fail", "snooze", "release", "heartbeat"),
    *("tick", "promote", "rescue", "fold", "make_partitions", "drop_partitions", "register_worker", "start"),
    *("begin_effect", "effect_done", "save_step", "progress"),
)
"""What whole workers are cut at, if it comes; COMMIT is the handlers'."""


@scenario(
    "C11",
    "connections are cut at every write, before the server has it or after its answer: those who add one job or many,"
    " with keys and without, operators, handlers, each part of a worker; callers give up while they wait for COMMIT",
    invariant="each path is cut as often as the scale asks for; with a key one job, without one none or one and an"
    " error; many are all added or none; an action that took effect has one row in the audit; nothing lost, nothing"
    " twice",
    minute=True,
    budget=900,
)
async def c11(lab: Lab) -> Verdict:
    aim = lab.size(1, 8, 250)
    busy = Theatre(lab, await lab.ground(audit=False), aim)
    # A janitor comes to its last statement only by way of all the others.
    number = lab.size(1, 1, 3)
    houses = [Theatre(lab, await lab.ground(audit=False), math.ceil(aim / number)) for _ in range(number)]
    storm = Cuts(lab, await lab.ground())
    await connect_cheaply(storm.ground)
    async with asyncio.TaskGroup() as group:
        group.create_task(storm.rage(aim))
        playing = group.create_task(play(busy, houses))
    # A worker that stood still past its lease, with the machine, leaves doubts.
    verdict = await judge(lab, storm.ground, doubts=await storm.ground.value(LOST_MAILS))
    matrix = {"handlers' COMMIT": [storm.commits.before, storm.commits.after]}
    for theatre in (busy, *houses):
        verdict.problems += theatre.problems
        for path, cuts in theatre.matrix().items():
            matrix[path] = [sum(both) for both in zip(cuts, matrix.get(path, [0, 0]), strict=True)]
    for path, cuts in matrix.items():
        verdict.expect(min(cuts) >= aim, f"{path} was cut {cuts} times, not {aim} each")
    before, after = (sum(cuts) for cuts in zip(*matrix.values(), strict=True))
    verdict.faults = {"cuts before": before, "cuts after": after}
    verdict.expect(len(lab.alive) == 2, "a worker has ended")
    verdict.figures |= playing.result() | {
        "paths": len(matrix),
        "fewest_cuts_of_a_path": [min(cuts) for cuts in zip(*matrix.values(), strict=True)],
        "cuts_before_and_after": matrix,
        "of_whole_workers": dict(sorted(storm.wire.cuts.items())),
        "reconciled": lab.said("jobs.reconciled"),
    }
    return verdict


async def connect_cheaply(ground: Ground) -> None:
    """Half of what a connection costs is the hashing of its password, 4,096 times."""
    password = urlsplit(ground.dsn).password
    await ground.rows("SET scram_iterations = 1")
    await ground.rows(f"ALTER ROLE CURRENT_USER PASSWORD '{password}'")
    await ground.rows("RESET scram_iterations")


LOST_MAILS = "SELECT count(*) FROM pgqueue.jobs WHERE type = 'mail' AND lost > 0"


class Cuts:
    """Whole workers, cut at whatever they write."""

    def __init__(self, lab: Lab, ground: Ground) -> None:
        self.lab = lab
        self.ground = ground

    async def rage(self, aim: int) -> None:
        lab = self.lab
        self.wire = await lab.wire(self.ground)
        for name in WRITES:
            # After each cut a worker pauses for longer, up to two seconds.
            self.wire.cut(head(name), 0.01, name, lab.size(0, 5, 20))
        self.commits = self.wire.cut(head(COMMIT), 0.04, aim=aim)
        lab.sink()
        for _ in range(2):
            lab.worker(self.ground, dsn=self.wire.dsn, threads=8)
        await self.produce(lab.size(200, 1_500, 4_000))
        while self.commits.lacks:
            await self.produce(lab.size(50, 200, 1_000))

    async def produce(self, number: int) -> None:
        types = ["effect"] * 4 + ["keyed", "fickle", "stepped", "mail"]
        seconds = [0, 0, 0.02]
        choice = self.lab.random.choice
        jobs = [(choice(types), {"key": key, "seconds": choice(seconds)}) for key in self.lab.keys(number)]
        await self.lab.produce(self.ground, jobs)
        await self.ground.settled(within=self.lab.size(300, 300, 1_800))


TYPES = ["effect"] * 5 + ["threaded", "keyed", "mail"]
AWAY = "away for some seconds"


@scenario(
    "C13",
    "PostgreSQL restarts under load (immediate, fast, kill -9 of a backend) and is away for some seconds; jobs come by"
    " SQL and by the API, with keys and without",
    invariant="everybody comes back by itself; nothing acknowledged is lost; the API answers 503 with Retry-After while"
    " PostgreSQL is down or not connected again yet, and no other error; meanwhile nobody hammers at it",
)
async def c13(lab: Lab) -> Verdict:
    ground = await lab.ground(own=True)
    monitor = await lab.monitor(ground)
    lab.sink()
    wires = [await lab.wire(ground) for _ in range(2)]
    for wire in wires:
        lab.worker(ground, dsn=f"{wire.dsn}?sslmode=disable")
    door = await lab.door(ground.dsn)
    stop = asyncio.Event()
    faults = {
        "immediate": lab.size(1, 3, 10),
        "fast": lab.size(1, 1, 5),
        "kill -9 of a backend": lab.size(1, 2, 5),
        AWAY: lab.size(0, 1, 2),
    }
    outages: list[tuple[float, float]] = []
    claims, api, began = [], [], time.monotonic()
    async with asyncio.TaskGroup() as producing:
        producing.create_task(steadily(lab, ground, 250, stop))
        for insists in (False, True):
            producing.create_task(door.add_steadily(TYPES, 25, stop, insists=insists))
        for fault, times in faults.items():
            for _ in range(times):
                await asyncio.sleep(lab.random.uniform(0.5, 1.5))
                fell = time.monotonic()
                await restart(ground, fault, lab.size(0.0, 5.0, 20.0) if fault == AWAY else 0.0)
                await ground.value("SELECT 1")
                back = time.monotonic()
                outages.append((fell, back))
                claims.append(await first_claim(ground))
                await until(lambda back=back: door.took_one_since(back), "the API takes jobs again", 60)  # type: ignore[misc]
                api.append(time.monotonic() - back)
        stop.set()
    up = time.monotonic() - began - sum(back - fell for fell, back in outages)
    await ground.settled()
    verdict = await judge(lab, ground, doubts=sum(faults.values()))
    observed(verdict, monitor)
    verdict.faults = faults
    verdict.recovery = claims
    verdict.figures["jobs_per_s_while_up"] = round(len(lab.ledger.acknowledged()) / up)
    verdict.expect(len(lab.alive) == 2, "a worker has ended")
    verdict.expect(max(claims) < 5, f"the first claim came {max(claims):.1f} s after PostgreSQL was back")
    answered(verdict, door, outages)
    verdict.expect(503 in door.statuses, "the API refused nothing: it was not asked while PostgreSQL was down")
    hammering(verdict, wires, outages, [outages[-1 - n] for n in range(faults[AWAY])])
    verdict.figures |= {"api": door.statuses, "api_takes_jobs_after_s": [percentile(api, 50), percentile(api, 99)]}
    return verdict


THREADS, SHORT = 8, 4
"""A worker's connections for handlers: one a thread, and some for a statement or two."""
MOST = {"handlers": THREADS + SHORT, "heartbeat": 6.0}
"""Tries a second, where one and a half are too many for the others, who have one connection each: these have many,
and with a lease of two seconds a heart has no time to wait for long."""


def hammering(
    verdict: Verdict, wires: list[Wire], outages: list[tuple[float, float]], long: list[tuple[float, float]]
) -> None:
    """How often a worker tries to connect, while PostgreSQL is away and when it is back."""
    connects = sum((wanted(wire, *outage) for wire in wires for outage in long), Counter[str]())
    seconds = max(1.0, sum(back - fell for fell, back in long) * len(wires))
    rates = {kind: round(number / seconds, 1) for kind, number in sorted(connects.items())}
    hasty = {kind: rate for kind, rate in rates.items() if rate > MOST.get(kind, 1.5)}
    verdict.expect(not hasty, f"while PostgreSQL was away, a worker tried to connect so often a second: {hasty}")
    after = [wanted(wire, back, back + 1).total() for wire in wires for _, back in outages]
    verdict.figures |= {
        "connects_per_s_and_worker_while_away": rates | {"in all": round(connects.total() / seconds, 1)},
        "connects_of_a_worker_in_the_second_after": max(after),
    }


def wanted(wire: Wire, begin: float, end: float) -> Counter[str]:
    """By what for; who only wants to cancel a statement has no name."""
    return Counter(kind_of(name) for at, name in wire.opened if name and begin <= at < end)


async def restart(ground: Ground, how: str, away: float = 0.0) -> None:
    if how == "kill -9 of a backend":
        pid = await ground.value(
            "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'pgqueue-%%' ORDER BY random() LIMIT 1"
        )
        os.kill(pid, signal.SIGKILL)
        with suppress(psycopg.OperationalError):
            await ground.conn.execute("SELECT pg_sleep(60)")  # until PostgreSQL ends everybody
    else:
        await asyncio.to_thread(ground.server.stop, "fast" if how == "fast" else "immediate")
        await asyncio.sleep(away)
        await asyncio.to_thread(ground.server.restart)


async def first_claim(ground: Ground) -> float:
    """Seconds from now, when PostgreSQL answers, until a job is claimed."""
    since = await ground.value("SELECT clock_timestamp()")
    began = time.monotonic()
    query = "SELECT EXISTS (SELECT FROM pgqueue.jobs WHERE started_at > %s)"
    await until(lambda: ground.value(query, since), "something is claimed", 60)
    return time.monotonic() - began


async def steadily(lab: Lab, ground: Ground, per_second: int, stop: asyncio.Event) -> None:
    due = time.monotonic()
    while not stop.is_set():
        jobs = [(lab.random.choice(TYPES), {"key": key}) for key in lab.keys(per_second // 10)]
        await lab.produce(ground, jobs)
        due = max(due + 0.1, time.monotonic() - 1)  # what was held up is made up for, unless it was for long
        await asyncio.sleep(max(0.0, due - time.monotonic()))


@scenario(
    "C16",
    "pg_terminate_backend on connections of workers at random, whatever they are for",
    invariant="nothing lost, nothing twice; afterwards one connection of a kind for each worker, and no lock left",
    minute=True,
)
async def c16(lab: Lab) -> Verdict:
    ground = await lab.ground()
    monitor = await lab.monitor(ground)
    lab.sink()
    for _ in range(2):
        await ground.worker_of(lab.worker(ground))
    stop = asyncio.Event()
    producing = asyncio.create_task(steadily(lab, ground, 200, stop))
    await asyncio.sleep(1)
    before = await kinds(ground)
    cuts: Counter[str] = Counter()
    wanted = lab.size(30, 200, 1000)
    while sum(cuts.values()) < wanted:
        rows = await ground.rows(TERMINATE)
        cuts.update(kind_of(row["application_name"]) for row in rows)
        await asyncio.sleep(0.03)
    stop.set()
    await producing
    await ground.settled()
    verdict = await judge(lab, ground, doubts=sum(cuts.values()))
    observed(verdict, monitor)
    verdict.faults = dict(cuts)
    await asyncio.sleep(2 * POLL)
    after = await kinds(ground)
    most = len(lab.alive) * (THREADS + SHORT)
    verdict.expect(after["handlers"] <= most, f"{after['handlers']} connections for handlers, not {most}")
    verdict.figures |= {"connections_before": sum(before.values()), "connections_after": sum(after.values())}
    grown = {kind: count for kind, count in after.items() if kind != "handlers" and count > len(lab.alive)}
    verdict.expect(not grown, f"more than one connection of a kind for a worker: {grown}")
    # Those that live take one for a moment, again and again.
    free = "SELECT NOT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory')"
    await until(lambda: ground.value(free), "no advisory lock is left", 20)
    return verdict


TERMINATE = """
SELECT application_name, pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE 'pgqueue%' ORDER BY random() LIMIT 1
"""


def kind_of(application_name: str) -> str:
    return application_name.removeprefix("pgqueue-").split()[0]


async def kinds(ground: Ground) -> Counter[str]:
    query = "SELECT application_name FROM pg_stat_activity WHERE datname = current_database()"
    query += " AND application_name LIKE 'pgqueue%'"
    return Counter(kind_of(row["application_name"]) for row in await ground.rows(query))


@scenario(
    "C17",
    "32 handlers hold transactions while the server has no connection left for anybody else",
    invariant="heartbeats keep every lease, nobody waits for ever, nothing lost, nothing twice",
)
async def c17(lab: Lab) -> Verdict:
    ground = await lab.ground({"max_connections": "40", "superuser_reserved_connections": "3"})
    await ground.rows("CREATE ROLE plain LOGIN PASSWORD 'plain' IN ROLE pgqueue_worker, pgqueue_producer")
    await ground.rows("GRANT ALL ON public.effects, public.moves TO plain")
    plain = plain_dsn(ground)
    workers = [lab.worker(ground, dsn=plain, threads=16) for _ in range(2)]
    for worker in workers:
        await ground.worker_of(worker)
    number = lab.size(100, 400, 2_000)
    jobs = [("holds", {"key": key, "seconds": 0.2}) for key in lab.keys(number)]
    await lab.produce(ground, jobs)
    hogs = []
    try:
        while True:  # until there is none left
            hogs.append(await psycopg.AsyncConnection.connect(plain))
    except psycopg.OperationalError:
        pass
    await asyncio.sleep(lab.size(3.0, 6.0, 20.0))
    for hog in hogs:
        await hog.close()
    await ground.settled()
    verdict = await judge(lab, ground)
    lost = await ground.value("SELECT sum(lost)::int FROM pgqueue.jobs")
    verdict.faults = {"connections taken": len(hogs)}
    verdict.figures |= {"rescued": lost}
    verdict.expect(lost == 0, f"{lost} leases were lost")
    return verdict


def plain_dsn(ground: Ground) -> str:
    parts = urlsplit(ground.dsn)
    return parts._replace(netloc=f"plain:plain@{parts.hostname}:{parts.port}").geturl()


@scenario(
    "C20",
    "transactions of 3 leases in each isolation level; serialization failures, deadlocks, lock and statement timeouts",
    invariant="each level completes; what can be tried again is tried again without a charge; no 40001 of our making",
)
async def c20(lab: Lab) -> Verdict:
    ground = await lab.ground()
    lab.worker(ground, threads=24)
    levels = ("read committed", "repeatable read", "serializable")
    calm = [("isolated", {"key": key, "level": level, "seconds": 6.0}) for level in levels for key in lab.keys(2)]
    states = ("40001", "40P01", "55P03", "57014")
    per_state = lab.size(2, 10, 50)
    raised = [
        ("isolated", {"key": key, "level": lab.random.choice(levels), "raises": state})
        for state in states
        for key in lab.keys(per_state)
    ]
    await lab.produce(ground, calm + raised)
    await ground.settled()
    verdict = await judge(lab, ground)
    verdict.faults = dict.fromkeys(states, per_state)
    charged = {
        row["state"]: row["charged"]
        for row in await ground.rows(
            "SELECT coalesce(payload->>'raises', 'none') AS state, sum(attempt - 1)::int AS charged"
            " FROM pgqueue.jobs GROUP BY 1"
        )
    }
    verdict.figures["charged_attempts"] = charged
    verdict.expect(charged["none"] == 0, "a long transaction was disturbed by the worker itself")
    verdict.expect(charged["40001"] == charged["40P01"] == 0, "a passing failure was charged")
    verdict.expect(charged["55P03"] == charged["57014"] == per_state, "a timeout was not charged once")
    return verdict
