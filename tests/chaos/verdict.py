"""What became of every job, in four buckets."""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.chaos.monitor import illegal_moves

if TYPE_CHECKING:
    from tests.chaos.lab import Ground, Lab

ENDS = ("completed", "failed", "cancelled")


class Skipped(Exception):
    """This machine lacks what the fault needs; that is never a pass."""


@dataclass
class Verdict:
    n: int = 0
    """Jobs that producers tried to add, or whatever else was tried so often."""
    faults: dict[str, int] = field(default_factory=dict)
    lost: int = 0
    """Acknowledged, without an effect, and neither in doubt, nor cancelled by an operator, nor meant to fail."""
    duplicated: int = 0
    unexpected: int = 0
    """Effects that nobody asked for."""
    recovered: int = 0
    """Not acknowledged, yet done: allowed."""
    recovery: list[float] = field(default_factory=list)
    """Seconds that each fault took to be noticed and repaired."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Whatever else was measured."""
    problems: list[str] = field(default_factory=list)
    skipped: str | None = None

    @property
    def ok(self) -> bool | None:
        if self.skipped is not None:
            return None
        return not (self.lost or self.duplicated or self.unexpected or self.problems)

    def expect(self, condition: object, problem: str) -> None:
        if not condition:
            self.problems.append(problem)

    def line(self) -> dict[str, Any]:
        return {
            "n": self.n,
            "faults": self.faults,
            "lost": self.lost,
            "duplicated": self.duplicated,
            "unexpected": self.unexpected,
            "recovered": self.recovered,
            "recovery_p50": percentile(self.recovery, 50),
            "recovery_p99": percentile(self.recovery, 99),
            **self.figures,
            "problems": self.problems,
            "skipped": self.skipped,
        }


def percentile(values: list[float], percent: float) -> float | None:
    if not values:
        return None
    return round(sorted(values)[math.ceil(len(values) * percent / 100) - 1], 3)


# What an operator cancelled has an entry in the audit; a worker that cancels by itself loses the job.
JOBS = """
SELECT j.payload->>'key' AS key, j.type, j.status::text AS status, j.reason,
       EXISTS (SELECT FROM pgqueue.audit a WHERE a.job_id = j.id AND a.action = 'cancel') AS by_operator
FROM pgqueue.jobs j WHERE j.payload ? 'key'
"""
AT_MOST_ONCE = "mail"
# A row and the completion of its job are committed together.
HALF_DONE = """
SELECT e.job FROM public.effects e LEFT JOIN pgqueue.jobs j ON j.id = e.job WHERE j.status IS DISTINCT FROM 'completed'
"""


async def judge(lab: "Lab", ground: "Ground", *, failures: tuple[str, ...] = (), doubts: int = 0) -> Verdict:
    """Compares the ledger with the jobs and their effects. Every job must have ended; `failures` are the reasons for
    which one may be in the dead letter queue, and so many that must not happen twice may be in doubt."""
    verdict = Verdict()
    attempted, acknowledged = lab.ledger.attempted(), lab.ledger.acknowledged()
    jobs = await ground.rows(JOBS)
    fates = {job["key"]: job["status"] for job in jobs}
    effects = Counter(row["key"] for row in await ground.rows("SELECT key FROM public.effects"))
    effects.update(call["key"] for call in lab.sink_calls() if not call["replay"])
    in_doubt = {job["key"] for job in jobs if job["type"] == AT_MOST_ONCE and job["reason"] == "in_doubt"}
    cancelled = {job["key"] for job in jobs if job["status"] == "cancelled" and job["by_operator"]}
    excused = in_doubt | cancelled | {job["key"] for job in jobs if job["reason"] in failures}
    verdict.n = len(attempted)
    verdict.lost = len(acknowledged - effects.keys() - excused)
    verdict.duplicated = sum(count > 1 for count in effects.values()) + len(jobs) - len(fates)
    verdict.unexpected = len((effects.keys() | fates.keys()) - attempted)
    verdict.recovered = len((effects.keys() & attempted) - acknowledged)
    statuses = Counter(job["status"] for job in jobs)
    reasons = Counter(job["reason"] for job in jobs if job["status"] == "failed")
    verdict.figures |= {"statuses": dict(statuses), "failed_for": dict(reasons)}
    verdict.expect(acknowledged <= fates.keys(), f"{len(acknowledged - fates.keys())} acknowledged jobs have no row")
    verdict.expect(set(statuses) <= set(ENDS), f"jobs that have not ended: {dict(statuses)}")
    verdict.expect(set(reasons) <= {*failures, "in_doubt"}, f"in the dead letter queue: {dict(reasons)}")
    verdict.expect(len(in_doubt) <= doubts, f"{len(in_doubt)} jobs are in doubt, for {doubts} faults")
    silent = {key for key, status in fates.items() if status == "completed"} - effects.keys()
    verdict.expect(not silent, f"{len(silent)} jobs are completed without an effect")
    half_done = await ground.rows(HALF_DONE)
    verdict.expect(not half_done, f"{len(half_done)} effects are there, and their jobs are not completed")
    if ground.audited:
        verdict.problems += await illegal_moves(ground.rows)
    return verdict
