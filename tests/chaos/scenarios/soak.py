"""Hours of ordinary life: nothing may grow."""

import asyncio
import signal
import time
from collections.abc import Iterator

from tests.chaos.lab import Ground, Lab, observed
from tests.chaos.monitor import usage
from tests.chaos.registry import scenario
from tests.chaos.verdict import Verdict, judge, percentile
from tests.once.nursery import Process

PER_SECOND = 200
FAILING = 0.05
BACKLOG = 2_000
"""Of jobs, beyond which nothing is added: it is not the speed of the machine that is tested."""
Samples = list[tuple[float, float]]
ALLOWED = {
    "fds": (90, 3),
    "threads": (90, 2),
    "connections": (90, 6),
    "live": (50, 100),
    "jobs_live_mb": (90, 2),
    "oldest_wait_s": (50, 0.1),
}
"""By how much that percentile may be higher in the second half than in the first."""


@scenario(
    "C36",
    f"{PER_SECOND} jobs/s, {FAILING:.0%} of them failing once; a worker is stopped or killed every 20 s",
    invariant="memory, file handles, threads and connections of the others stay flat; jobs start as soon as at first",
    alone=True,
    named_only=True,
    budget=24 * 3600,
)
async def c36(lab: Lab) -> Verdict:
    ground = await lab.ground(own=True, audit=False)
    monitor = await lab.monitor(ground)
    lab.sink()
    lasting = [lab.worker(ground) for _ in range(2)]
    soak = Soak(lab, ground, lasting, time.monotonic() + lab.suite.minutes * 60)
    async with asyncio.TaskGroup() as together:
        for part in (soak.produce(), soak.restart(), soak.measure()):
            together.create_task(part)
    await ground.settled()
    verdict = await judge(lab, ground, doubts=soak.restarts)
    observed(verdict, monitor)
    soak.tell(verdict)
    verdict.expect(all(worker.code is None for worker in lasting), "a worker has ended")
    return verdict


class Soak:
    def __init__(self, lab: Lab, ground: Ground, lasting: list[Process], until: float) -> None:
        self.lab = lab
        self.ground = ground
        self.lasting = lasting
        self.began = time.monotonic()
        self.until = until
        self.restarts = 0
        self.backlog = 0
        self.series: dict[str, Samples] = {}

    async def produce(self) -> None:
        types = ["effect"] * 14 + ["threaded"] * 2 + ["keyed"] * 3 + ["mail"]
        # A ledger that is synced more often would be what sets the pace.
        for moment in self.every(0.25):
            await asyncio.sleep(max(0.0, moment - time.monotonic()))
            if self.backlog > BACKLOG:
                continue
            jobs = []
            for key in self.lab.keys(PER_SECOND // 4):
                type = self.lab.random.choice(types)
                fails = type == "effect" and self.lab.random.random() < FAILING * len(types) / 14
                jobs.append((type, {"key": key} | ({"fail": 1} if fails else {})))
            await self.lab.produce(self.ground, jobs)

    async def restart(self) -> None:
        worker = self.lab.worker(self.ground)
        for moment in self.every(20):
            await asyncio.sleep(max(0.0, moment + 20 - time.monotonic()))
            worker.send(self.lab.random.choice([signal.SIGTERM, signal.SIGKILL]))
            await worker.ended()
            self.restarts += 1
            worker = self.lab.worker(self.ground)

    async def measure(self) -> None:
        for moment in self.every(2):
            await asyncio.sleep(max(0.0, moment - time.monotonic()))
            used = usage(worker.pid for worker in self.lasting)
            self.note("rss_mb", used["rss"] / 1024)
            self.note("fds", used["fds"])
            self.note("threads", sum(threads(worker.pid) for worker in self.lasting))
            [row] = await self.ground.rows(DATABASE)
            for name, value in row.items():
                self.note(name, value)
            self.backlog = row["live"]

    def every(self, seconds: float) -> Iterator[float]:
        moment = self.began
        while max(moment, time.monotonic()) < self.until:
            yield moment
            moment += seconds

    def note(self, name: str, value: float) -> None:
        self.series.setdefault(name, []).append((time.monotonic() - self.began, value))

    def tell(self, verdict: Verdict) -> None:
        """Slopes an hour, from the second half: the first fills caches and pools."""
        verdict.faults = {"restarts of a worker": self.restarts}
        minutes = (self.until - self.began) / 60
        verdict.figures |= {"minutes": round(minutes, 1), "jobs_per_s": round(verdict.n / minutes / 60)}
        for name, samples in self.series.items():
            half = samples[len(samples) // 2 :]
            verdict.figures[f"{name}_end"] = round(half[-1][1], 3)
            verdict.figures[f"{name}_per_hour"] = round(slope(half) * 3600, 2)
        for name, (percent, allowed) in ALLOWED.items():
            samples = self.series[name]
            halves = samples[: len(samples) // 2], samples[len(samples) // 2 :]
            first, second = (percentile([value for _, value in half], percent) or 0 for half in halves)
            verdict.expect(second <= first + allowed, f"{name} grew from {first:g} to {second:g}")
        if minutes >= 10:
            grown = verdict.figures["rss_mb_per_hour"]
            verdict.expect(grown < 5, f"memory grows by {grown} MB an hour")
            reached = verdict.figures["jobs_per_s"]
            verdict.expect(reached > 0.9 * PER_SECOND, f"{reached} jobs/s are too few to say anything")


DATABASE = """
SELECT (SELECT count(*) FROM pg_stat_activity WHERE datname = current_database())::int AS connections,
       (SELECT count(*) FROM pgqueue.jobs_live)::int AS live,
       (SELECT pg_total_relation_size('pgqueue.jobs_live') / 1048576.0)::float AS jobs_live_mb,
       (SELECT coalesce(extract(epoch FROM max(clock_timestamp() - created_at)), 0) FROM pgqueue.jobs_live
        WHERE status = 'pending' AND attempt = 0 AND lost = 0)::float AS oldest_wait_s
"""


def threads(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("Threads:"))
    except OSError:
        return 0


def slope(samples: Samples) -> float:
    """Of the line through them, by least squares."""
    mean_x = sum(x for x, _ in samples) / len(samples)
    mean_y = sum(y for _, y in samples) / len(samples)
    spread = sum((x - mean_x) ** 2 for x, _ in samples)
    return sum((x - mean_x) * (y - mean_y) for x, y in samples) / spread if spread else 0.0
