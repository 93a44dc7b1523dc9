"""Workers that die, stop, and come back."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import cycle
from pathlib import Path

from tests.chaos.lab import LEASE, RESCUE, Ground, Lab, observed, until
from tests.chaos.registry import scenario
from tests.chaos.verdict import Verdict, judge
from tests.once.nursery import Process

MAX_LOST = 3


@scenario("C0", "nothing goes wrong", invariant="the harness itself: every job once", minute=True)
async def c0(lab: Lab) -> Verdict:
    ground = await lab.ground()
    lab.sink()
    lab.worker(ground)
    types = ("effect", "threaded", "keyed", "mail")
    await lab.produce(ground, [(types[n % 4], {"key": key}) for n, key in enumerate(lab.keys(200))])
    await ground.settled()
    return await judge(lab, ground)


@scenario(
    "C3",
    "workers are frozen while they run jobs; others have finished them, or are about to, when the zombies wake up and"
    " complete, fail, snooze, add jobs, store steps and progress",
    invariant="every write of a zombie is refused, and no owner notices: one effect a job, no job that a zombie added",
    minute=True,
)
async def c3(lab: Lab) -> Verdict:
    ground = await lab.ground()
    monitor = await lab.monitor(ground)
    zombies, threads = lab.size(20, 60, 200), 20
    does = cycle([*(("zombie", what) for what in ("complete", "fail", "snooze", "enqueue", "step")), *THREADS])
    for _ in range(zombies // threads):
        frozen, marks = await freeze(lab, ground, threads, does)
        go_on(marks, ".heir")
        healthy = lab.worker(ground, threads=threads)
        await ground.settled()
        healthy.kill()
        go_on(marks, ".zombie")
        frozen.send(signal.SIGCONT)
        await until(lambda: len(frozen.said("job.lease_lost")) >= threads, "all of them are refused")  # noqa: B023
        frozen.send(signal.SIGTERM)
        await frozen.ended()
    owners = [await wake_beside_its_heir(lab, ground, threads) for _ in range(lab.size(1, 2, 5))]
    zombies += threads * len(owners)
    verdict = await judge(lab, ground)
    observed(verdict, monitor)
    disturbed = sum(len(owner.said("job.lease_lost")) for owner in owners)
    fenced = lab.said("job.lease_lost") - disturbed
    verdict.faults = {"zombies": zombies}
    verdict.figures |= {"effects": await ground.value("SELECT count(*)::int FROM public.effects"), "fenced": fenced}
    left = await ground.value(
        "SELECT count(*) + (SELECT count(*) FROM pgqueue.jobs WHERE type = 'effect') FROM pgqueue.steps"
    )
    verdict.expect(left == 0, f"{left} steps or jobs of zombies are left")
    verdict.expect(fenced == zombies, f"{fenced} were fenced")
    verdict.expect(disturbed == 0, f"{disturbed} owners lost their leases to zombies")
    spoilt = "SELECT count(*) FROM pgqueue.jobs WHERE attempt > 1 OR progress->>'message' LIKE 'a zombie%%'"
    verdict.expect(await ground.value(spoilt) == 0, "zombies charged attempts or told progress")
    return verdict


async def wake_beside_its_heir(lab: Lab, ground: Ground, number: int) -> Process:
    """Its zombies wake up while the jobs run elsewhere. The heir, which must not notice."""
    what = cycle([("zombie", does) for does in ("fail", "snooze", "enqueue", "step", "complete")])
    frozen, marks = await freeze(lab, ground, number, what)
    dead = await ground.worker_of(frozen)
    heir = lab.worker(ground, threads=number)
    others = f"{RUNNING} AND worker_id <> '{dead}'"
    await until(lambda: is_number(ground, others, number), "the heir runs all of them")
    go_on(marks, ".zombie")
    frozen.send(signal.SIGCONT)
    await until(lambda: len(frozen.said("job.lease_lost")) >= number, "all of them are refused")
    go_on(marks, ".heir")
    await ground.settled()
    heir.kill()
    frozen.send(signal.SIGTERM)
    await frozen.ended()
    return heir


async def freeze(lab: Lab, ground: Ground, number: int, does: Iterator[tuple[str, str]]) -> tuple[Process, list[str]]:
    """A worker that is frozen while it runs so many jobs, and the markers that let them go on."""
    frozen = lab.worker(ground, threads=number)
    await ground.worker_of(frozen)
    marks = {key: str(lab.folder / key) for key in lab.keys(number)}
    some = zip(marks.items(), does, strict=False)
    await lab.produce(
        ground, [(type, {"key": key, "marker": mark, "does": what}) for (key, mark), (type, what) in some]
    )
    await until(lambda: all(Path(mark).exists() for mark in marks.values()), "they all run")
    frozen.send(signal.SIGSTOP)
    return frozen, list(marks.values())


def go_on(marks: list[str], who: str) -> None:
    for mark in marks:
        Path(mark + who).touch()


THREADS = [("zombie_thread", "complete"), ("zombie_thread", "fail")]


async def is_number(ground: Ground, query: str, number: int) -> bool:
    return bool(await ground.value(query) == number)


@scenario(
    "C5",
    "a handler blocks the event loop for 3 leases, another one keeps the interpreter for 2",
    invariant="the first keeps its lease, the second is fenced; never two effects",
)
async def c5(lab: Lab) -> Verdict:
    ground = await lab.ground()
    jobs = lab.size(1, 3, 10)
    figures = {}
    for holds, leases in (("loop", 3), ("gil", 2)):
        workers = [lab.worker(ground, threads=1) for _ in range(2)]
        marks = [str(lab.folder / f"{holds}-{number}") for number in range(jobs)]
        payloads = [{"holds": holds, "seconds": leases * LEASE, "marker": mark} for mark in marks]
        keys = lab.keys(jobs)
        await lab.produce(
            ground, [("blocks", {"key": key} | payload) for key, payload in zip(keys, payloads, strict=True)]
        )
        await ground.settled()
        await asyncio.sleep(leases * LEASE if holds == "gil" else 0)  # the zombie's turn
        for worker in workers:
            worker.send(signal.SIGTERM)
        for worker in workers:
            await worker.ended()
        figures[f"lost_by_{holds}"] = await ground.value(
            "SELECT coalesce(sum(lost), 0)::int FROM pgqueue.jobs WHERE payload->>'holds' = %s", holds
        )
    verdict = await judge(lab, ground)
    verdict.faults = {"blocked loops": jobs, "held interpreters": jobs}
    verdict.figures |= figures | {"fenced": lab.said("job.lease_lost")}
    verdict.expect(figures["lost_by_loop"] == 0, "a blocked loop cost a lease")
    verdict.expect(figures["lost_by_gil"] > 0, "nothing was tried: the heartbeat went on")
    verdict.expect(verdict.figures["fenced"] > 0, "nobody was fenced")
    return verdict


@scenario(
    "C7",
    "a worker is killed, its row is deleted, and a new one has its name, host and process id",
    invariant="the jobs of the dead are rescued in time, none of the living's",
)
async def c7(lab: Lab) -> Verdict:
    ground = await lab.ground()
    monitor = await lab.monitor(ground)
    rounds = lab.size(1, 3, 20)
    for number in range(rounds):
        old = lab.worker(ground, threads=8)
        dead = await ground.worker_of(old)
        await lab.produce(ground, [("effect", {"key": key, "seconds": 1.5}) for key in lab.keys(8)])
        await until(lambda: is_number(ground, OWNED.format(dead), 8), "the old one runs them")  # noqa: B023
        old.kill()
        monitor.died(dead)
        new = lab.worker(ground, threads=16)
        living = await ground.worker_of(new)
        await lab.produce(ground, [("effect", {"key": key, "seconds": LEASE * 2}) for key in lab.keys(8)])
        if number % 2 == 0:
            query = "UPDATE pgqueue.workers n SET name = o.name, host = o.host, pid = o.pid FROM pgqueue.workers o"
            await ground.rows(query + " WHERE n.id = %s AND o.id = %s", living, dead)
        await ground.rows("DELETE FROM pgqueue.workers WHERE id = %s", dead)
        await ground.settled()
        new.send(signal.SIGTERM)
        await new.ended()
    verdict = await judge(lab, ground)
    observed(verdict, monitor)
    verdict.faults = {"kill -9 and row deleted": rounds}
    lost = await ground.value("SELECT sum(lost)::int FROM pgqueue.jobs")
    verdict.expect(lost == 8 * rounds, f"{lost} jobs were rescued, not {8 * rounds}")
    bound = LEASE + RESCUE + 1.0
    verdict.figures["bound"] = f"{bound:g} s"
    verdict.expect(max(monitor.recovery) < bound, f"rescued after {max(monitor.recovery):.1f} s")
    return verdict


RUNNING = "SELECT count(*) FROM pgqueue.jobs_live WHERE status = 'running'"
OWNED = "SELECT count(*) FROM pgqueue.jobs_live WHERE status = 'running' AND worker_id = '{}'"


@scenario(
    "C8",
    "batches of 50 with a job in each that aborts its worker or takes memory until the kernel kills it; the workers are"
    " started again as they die",
    invariant="the poison goes to the dead letter queue after 3 deaths, its batch mates complete, charged at most once",
)
async def c8(lab: Lab) -> Verdict:
    ground = await lab.ground()
    batches = lab.size(1, 4, 20)
    with limited_memory() as limit:
        kinds = cycle(["poison", "glutton"] if limit else ["poison"])
        for _ in range(batches):
            keys, kind = lab.keys(50), next(kinds)
            poison = lab.random.randrange(50)
            jobs = [(kind if n == poison else "effect", {"key": key}) for n, key in enumerate(keys)]
            await lab.produce(ground, jobs)
        keeping = asyncio.create_task(keep_running(lab, ground, 2, limit))
        try:
            await ground.settled()
        finally:
            keeping.cancel()
            lab.kill_all()
            for process in lab.processes:
                await process.ended()
    verdict = await judge(lab, ground, failures=("poison",))
    deaths = sum(process.code is not None for process in lab.processes)
    charged = await ground.value("SELECT max(attempt)::int FROM pgqueue.jobs WHERE type = 'effect'")
    poisoned = await ground.value("SELECT count(*)::int FROM pgqueue.jobs_failed WHERE type <> 'effect'")
    innocent = await ground.value("SELECT count(*)::int FROM pgqueue.jobs_failed WHERE type = 'effect'")
    gluttons = batches // 2 if limit else 0
    verdict.faults = {"aborts": batches - gluttons, "out of memory": gluttons}
    if not limit:
        verdict.figures["not_tried"] = "out of memory: no cgroups, or not root"
    verdict.figures |= {"deaths": deaths, "attempts_of_innocents": charged}
    verdict.expect(poisoned == batches, f"{poisoned} of {batches} poisons are in the dead letter queue")
    verdict.expect(innocent == 0, f"{innocent} innocents are in the dead letter queue")
    verdict.expect(deaths <= (MAX_LOST + 2) * batches, f"{deaths} workers died")
    verdict.expect(charged <= 1, f"an innocent was charged {charged} attempts")
    return verdict


async def keep_running(lab: Lab, ground: Ground, number: int, limit: Path | None) -> None:
    """As a supervisor would."""
    while True:
        for _ in range(number - len(lab.alive)):
            worker = lab.worker(ground, threads=8)
            if limit:
                (limit / "cgroup.procs").write_text(str(worker.pid))
        await asyncio.sleep(0.1)


@contextmanager
def limited_memory(megabytes: int = 400) -> Iterator[Path | None]:
    """A group of processes that get no more than that, where such groups can be made."""
    group = None
    for folder, setting in (("memory/", "memory.limit_in_bytes"), ("", "memory.max")):
        made = Path(f"/sys/fs/cgroup/{folder}pgqueue-{os.getpid()}")
        with suppress(OSError):
            made.mkdir()
            (made / setting).write_text(str(megabytes << 20))
            group = made
            break
    try:
        yield group
    finally:
        if group is not None:
            group.rmdir()


@scenario(
    "X1",
    "SIGTERM under load, and kill -9 at a random moment of the shutdown; PostgreSQL restarts during some of them",
    invariant="nothing lost, nothing twice",
)
async def x1(lab: Lab) -> Verdict:
    ground = await lab.ground(own=True)
    monitor = await lab.monitor(ground)
    lab.sink()
    rounds = lab.size(3, 6, 60)
    types = ("effect", "threaded", "keyed", "mail")
    restarts = 0
    for _ in range(rounds):
        worker = lab.worker(ground, threads=8)
        jobs = [(lab.random.choice(types), {"key": key, "seconds": 0.05}) for key in lab.keys(100)]
        await lab.produce(ground, jobs)
        dead = await ground.worker_of(worker)
        await asyncio.sleep(lab.random.uniform(0, 0.5))
        worker.send(signal.SIGTERM)
        if lab.random.random() < 0.3:
            restarts += 1
            await asyncio.to_thread(ground.server.stop, "immediate")
            await asyncio.to_thread(ground.server.restart)
        await asyncio.sleep(lab.random.uniform(0, 0.3))
        monitor.died(dead)
        worker.kill()
    lab.worker(ground, threads=8)
    await ground.settled()
    verdict = await judge(lab, ground, doubts=8 * rounds)  # as many as run at once
    observed(verdict, monitor)
    verdict.faults = {"SIGTERM, then kill -9": rounds, "restarts of PostgreSQL": restarts}
    return verdict


@scenario(
    "X2",
    "handlers run in child processes, which are killed at random; then the worker itself",
    invariant="nothing lost, nothing twice, and no child outlives its worker",
)
async def x2(lab: Lab) -> Verdict:
    ground = await lab.ground()
    lab.sink()
    worker = lab.worker(ground, threads=4)
    await ground.worker_of(worker)
    kills, number = 0, lab.size(40, 150, 1000)
    await lab.produce(ground, [("in_process", {"key": key, "seconds": 0.1}) for key in lab.keys(number)])
    seen: set[int] = set()
    deadline = time.monotonic() + 60
    while kills < number // 10 and time.monotonic() < deadline:
        seen |= set(offspring := children_of(worker))
        if offspring:
            kills += 1
            with suppress(ProcessLookupError):
                os.kill(lab.random.choice(offspring), signal.SIGKILL)
        await asyncio.sleep(0.2)
    seen |= set(children_of(worker))
    worker.kill()
    await until(lambda: not any(is_running(pid) for pid in seen), "its children have ended", 10)
    lab.worker(ground, threads=4)
    await ground.settled()
    verdict = await judge(lab, ground)
    verdict.faults = {"kill -9 of a child": kills, "kill -9 of the worker": 1}
    died = "SELECT count(*)::int FROM pgqueue.attempts WHERE error_type = 'ChildDied'"
    verdict.figures |= {"attempts_lost_with_a_child": await ground.value(died)}
    verdict.expect(kills >= number // 10, f"only {kills} children were killed")
    return verdict


def children_of(process: Process) -> list[int]:
    found = Path(f"/proc/{process.pid}/task").glob("*/children")
    return [int(pid) for file in found for pid in file.read_text().split()]


def is_running(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False
