"""A process dies at every point, once and twice in a row: the table says what becomes of the job and of its effect.

An effect in ctx.transaction, and one behind a key that its provider honours, happen exactly once, whatever dies where.
One at most once happens once or never, and if nobody can know, the job says so: in_doubt. No job is lost, and when an
operator has settled the doubt, every effect has happened exactly once. After that, a second job with the same key
changes nothing.

Each case is a database of its own with workers that are real processes and die by os._exit at their point. All cases
run at the same time, as far as the machine goes; each test looks at the outcome of one. The test declares the dead
worker's lease to be over, so that nothing waits for it: that leases end by themselves is tested elsewhere.
"""

import asyncio
import importlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import redis

from pgqueue import failpoints
from pgqueue.embedded import ValkeyServer
from tests.once.arena import ENDED, Arena, Place
from tests.once.handlers import MODES, app
from tests.once.nursery import ROOT, Nursery, Process, plain_environment

# Effects and end of the job by where its worker died; -: who has such an effect does not get there.
# * the second worker does not get there any more, because the job has ended or must not run again.
TABLE = """
                   in_transaction   keyed            at_most_once
enqueue.before     1 completed      1 completed      1 completed
enqueue.after      1 completed      1 completed      1 completed
claim.before       1 completed      1 completed      1 completed
claim.after        1 completed      1 completed      1 completed
attempt.before     1 completed      1 completed      1 completed
l1.looked          1 completed      1 completed      1 completed
intent.before      1 completed      1 completed      1 completed
intent.after       1 completed      1 completed      0 in_doubt
handler.after      1 completed*     1 completed      1 in_doubt*
tx.begun           1 completed      -                -
tx.body_done       1 completed      -                -
tx.completed       1 completed      -                -
tx.committed       1 completed*     -                -
finish.before      1 completed      1 completed      1 in_doubt*
finish.after       1 completed      1 completed      1 completed
fail.before        1 completed      1 completed      0 in_doubt
fail.after         1 completed      1 completed      1 completed
l1.before_set      1 completed      1 completed      1 completed
l1.after_set       1 completed      1 completed      1 completed
heartbeat.before   1 completed      1 completed      0 in_doubt
rescue.before      1 completed      1 completed      1 completed
rescue.after       1 completed      1 completed      1 completed
promote.after      1 completed      1 completed      1 completed
release.before     1 completed      1 completed      -
"""
AT_ONCE = 8
NOBODY = ["nobody's"]
"""The queue of a process that is to rescue or promote, and not to run anything."""


@dataclass(frozen=True)
class Case:
    point: str
    mode: str
    crashes: int
    expected: str

    def __str__(self) -> str:
        return f"{self.point}-{self.mode}-{'once' if self.crashes == 1 else 'twice'}"

    @property
    def deaths(self) -> int:
        return 0 if self.expected == "-" else 1 if self.expected.endswith("*") else self.crashes


@dataclass
class Outcome:
    deaths: int
    """Processes that died at the point."""
    effects: int
    end: str
    """The job's status, or in_doubt."""
    seconds: float
    settled_effects: int = 0
    """After an operator has settled the doubt and a duplicate was added."""
    left: int = -1
    """Jobs that have not completed then."""
    duplicates: tuple[Any, ...] = ()
    first_id: int = 0
    attempts: int = 0


def read_table() -> list[Case]:
    header, *lines = TABLE.strip("\n").splitlines()
    modes = header.split()
    assert tuple(modes) == MODES
    cases = []
    for line in lines:
        point, *cells = line.replace(" completed", "_completed").replace(" in_doubt", "_in_doubt").split()
        for mode, cell in zip(modes, cells, strict=True):
            cases += [Case(point, mode, crashes, cell.replace("_", " ", 1)) for crashes in (1, 2)]
    return cases


CASES = read_table()


def test_the_table_has_every_point() -> None:
    assert {case.point for case in CASES} == failpoints.POINTS
    assert len(CASES) == len(failpoints.POINTS) * 3 * 2


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, arena: Arena, nursery: Nursery, shared_valkey: ValkeyServer
) -> dict[Case, Outcome | BaseException]:
    wanted = [
        item.callspec.params["case"]
        for item in request.session.items
        if item.path == request.path and "case" in getattr(getattr(item, "callspec", None), "params", {})
    ]

    async def run_all() -> list[Outcome | BaseException]:
        gate = asyncio.Semaphore(AT_ONCE)

        async def run(case: Case) -> Outcome:
            async with gate, arena.place() as place:
                return await Story(case, place, nursery, shared_valkey.url).run()

        return await asyncio.gather(*map(run, wanted), return_exceptions=True)

    # Those that wait for long begin first.
    wanted.sort(key=lambda case: case.point != "heartbeat.before")
    with asyncio.Runner() as runner:
        return dict(zip(wanted, runner.run(run_all()), strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outcome(case: Case, outcomes: dict[Case, Outcome | BaseException]) -> None:
    outcome = outcomes[case]
    if isinstance(outcome, BaseException):
        raise outcome
    assert outcome.deaths == case.deaths
    expected = "1 completed" if case.expected == "-" else case.expected.rstrip("*")
    assert f"{outcome.effects} {outcome.end}" == expected
    assert outcome.settled_effects == 1
    assert outcome.left == 0
    assert outcome.duplicates
    assert all(each == f"duplicate of job {outcome.first_id}" for each in outcome.duplicates)


class Story:
    """One case, from the job's birth to its end."""

    def __init__(self, case: Case, place: Place, nursery: Nursery, redis_url: str, mutant: str | None = None) -> None:
        self.case = case
        self.mutant = mutant
        self.place = place
        self.nursery = nursery
        self.redis_url = redis_url
        self.redis = redis.Redis.from_url(redis_url)
        self.key = str(case)
        self.id = 0
        self.deaths = 0
        self.duplicates: list[int] = []
        self.processes: list[Process] = []

    async def run(self) -> Outcome:
        started = time.monotonic()
        try:
            await self.add_first()
            for round in range(self.case.crashes):
                await self.prepare(round)
                await self.crash()
            outcome = await self.end()
            outcome.seconds = time.monotonic() - started
            return outcome
        finally:
            self.redis.close()
            for process in self.processes:
                process.kill()
            for process in self.processes:
                await process.ended()

    # Before

    @property
    def payload(self) -> dict[str, Any]:
        point, crashes = self.case.point, self.case.crashes
        # What must not happen twice is started once, and then again when an operator has looked.
        starts = min(1, self.case.deaths) if self.case.mode == "at_most_once" else self.case.deaths
        return {
            "key": self.key,
            "pauses": starts if point in ("heartbeat.before", "release.before") else 0,
            "failures": crashes if point.startswith("fail.") else 0,
        }

    async def add_first(self) -> None:
        mode, point = self.case.mode, self.case.point
        if point.startswith("enqueue."):
            return  # that is what the crash is about
        delay = {"delay": "50 ms"} if point == "promote.after" else {}
        self.id = await self.place.add(mode, self.payload, queue=mode, **delay)
        if point == "l1.looked":
            self.redis.set(self.l1_name, "forged")

    @property
    def l1_name(self) -> str:
        effect = app.types[self.case.mode].effect(self.id, self.payload)
        return f"pgqueue:done:{effect.key}"

    async def prepare(self, round: int) -> None:
        """Something for this crash to hit."""
        point = self.case.point
        if point.startswith("rescue.") and (round == 0 or point == "rescue.after"):
            # Something to rescue.
            orphaning = self.worker(PGQUEUE_FAILPOINT="attempt.before")
            assert await orphaning.ended() == 137
            await self.place.declare_dead()
        if round and point == "promote.after":
            query = (
                """SELECT pgqueue.edit_job(%s, jsonb_build_object('run_at', clock_timestamp() + interval '50 ms'))"""
            )
            await self.place.value(query, self.id)
        if round and self.id and self.case.deaths > 1 and (await self.place.job(self.id))["status"] in ENDED:
            # The job has ended: the next crash hits a duplicate. Without L1 it goes the whole way.
            self.redis.delete(self.l1_name)
            self.duplicates.append(await self.place.add(self.case.mode, self.payload, queue=self.case.mode))

    # The crash

    def worker(self, queues: list[str] | None = None, **env: str) -> Process:
        env |= self.place.env | {"REDIS_URL": self.redis_url}
        # Many processes at once are slow: what is to be seen is the point, not that Redis was not waited for.
        process = self.nursery.worker(
            self.place.dsn, queues=queues or [self.case.mode], mutant=self.mutant, redis_budget=10, **env
        )
        self.processes.append(process)
        return process

    async def crash(self) -> None:
        point, expected = self.case.point, self.deaths < self.case.deaths
        if point.startswith("enqueue."):
            process = self.produce(PGQUEUE_FAILPOINT=point)
        elif point.startswith(("rescue.", "promote.")):
            process = self.worker(NOBODY, PGQUEUE_FAILPOINT=point)
        elif point == "heartbeat.before":
            # By then the job is sure to run, even here.
            process = self.worker(PGQUEUE_FAILPOINT=f"{point}:40", PGQUEUE_HEARTBEAT_INTERVAL="0.1")
        else:
            process = self.worker(PGQUEUE_FAILPOINT=point)
        if point == "release.before" and expected:
            starts = self.deaths + 1
            await until(lambda: self.place.sink.count("starts", self.key) >= starts, process)
            process.send(signal.SIGTERM)
        if expected:
            code = await process.ended()
            assert code == 137, process.told()
            self.deaths += 1
        else:
            await self.place.ended(self.id, processes=(process,))
            await asyncio.sleep(0.1)
            assert process.code is None, f"it died at {point}, which it should not reach"
            process.kill()
            await process.ended()
        await self.place.declare_dead()

    def produce(self, **env: str) -> Process:
        options = {"queue": self.case.mode, "idempotency_key": self.key}
        process = self.nursery.producer(self.place.dsn, self.case.mode, self.payload, options, **env)
        self.processes.append(process)
        return process

    # After

    async def end(self) -> Outcome:
        place, mode = self.place, self.case.mode
        if self.case.point.startswith("enqueue."):
            producer = self.produce()
            assert await producer.ended() == 0
            self.id = int(producer.told())
            assert await place.value("SELECT count(*) FROM pgqueue.jobs") == 1
        worker = self.worker()
        [job] = await place.ended(self.id, processes=(worker,))
        effects = await place.effects(mode, self.key)
        end = "in_doubt" if job["reason"] == "in_doubt" else str(job["status"])
        outcome = Outcome(self.deaths, effects, end, 0.0, first_id=self.id, attempts=job["attempt"])
        if end == "in_doubt":
            # The operator looks whether it happened.
            verdict = "completed" if effects else "retry"
            await place.value("SELECT pgqueue.resolve_job(%s, %s)", self.id, verdict)
            await place.ended(self.id, processes=(worker,))
        self.duplicates.append(await place.add(mode, self.payload, queue=mode))
        duplicates = await place.ended(*self.duplicates, processes=(worker,))
        outcome.duplicates = tuple(each["reason"] for each in duplicates)
        outcome.settled_effects = await place.effects(mode, self.key)
        outcome.left = int(await place.value("SELECT count(*) FROM pgqueue.jobs WHERE status <> 'completed'"))
        return outcome


async def until(condition: Any, process: Process, within: float = 20) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert process.code is None, process.told()
        assert time.monotonic() < deadline, process.told()
        await asyncio.sleep(0.01)


# The points themselves, and the command line


async def test_a_worker_from_the_command_line_dies_and_is_survived(arena: Arena) -> None:
    """As a user starts it, with leases that end by themselves."""
    env = plain_environment() | {
        "PGQUEUE_LEASE_TIMEOUT": "1",
        "PGQUEUE_HEARTBEAT_INTERVAL": "0.3",
        "PGQUEUE_RESCUE_INTERVAL": "0.2",
    }
    command = [sys.executable, "-m", "pgqueue", "worker", "--app", "tests.once.handlers", "--log-level", "warning"]
    async with arena.place() as place:
        env |= place.env | {"DATABASE_URL": place.dsn}
        ids = {mode: await place.add(mode, {"key": mode}) for mode in MODES}
        dies = await asyncio.create_subprocess_exec(
            *command, env=env | {"PGQUEUE_FAILPOINT": "handler.after"}, cwd=ROOT
        )
        assert await asyncio.wait_for(dies.wait(), 30) == 137
        lives = await asyncio.create_subprocess_exec(*command, env=env, cwd=ROOT)
        try:
            jobs = {job["type"]: job for job in await place.ended(*ids.values())}
        finally:
            lives.terminate()
            assert await asyncio.wait_for(lives.wait(), 30) == 0
        effects = {mode: await place.effects(mode, mode) for mode in MODES}
        assert jobs["in_transaction"]["status"] == jobs["keyed"]["status"] == "completed"
        assert effects["in_transaction"] == effects["keyed"] == 1
        # It was in doubt only if it was the one that had run when the worker died.
        assert effects["at_most_once"] <= 1
        doubt = jobs["at_most_once"]["reason"] == "in_doubt"
        assert doubt or (jobs["at_most_once"]["status"] == "completed" and effects["at_most_once"] == 1)


@pytest.fixture
def armed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    def arm(text: str) -> None:
        monkeypatch.setenv("PGQUEUE_FAILPOINT", text)
        importlib.reload(failpoints)

    yield arm
    monkeypatch.delenv("PGQUEUE_FAILPOINT", raising=False)
    importlib.reload(failpoints)


def test_nothing_happens_unless_told() -> None:
    for point in failpoints.POINTS:
        failpoints.failpoint(point)


def test_a_point_acts_at_its_nth_time_only(armed: Callable[[str], None]) -> None:
    armed("claim.after:2:error,finish.before:error")
    failpoints.failpoint("claim.after")
    with pytest.raises(failpoints.FailpointError, match=r"claim\.after"):
        failpoints.failpoint("claim.after")
    failpoints.failpoint("claim.after")
    with pytest.raises(failpoints.FailpointError, match=r"finish\.before"):
        failpoints.failpoint("finish.before")
    failpoints.failpoint("finish.after")


@pytest.mark.parametrize("text", ["nowhere", "claim.after:explode"])
def test_a_wrong_point_is_refused(armed: Callable[[str], None], text: str) -> None:
    with pytest.raises(ValueError, match="PGQUEUE_FAILPOINT"):
        armed(text)


async def test_a_process_stops_and_goes_on(nursery: Nursery, arena: Arena) -> None:
    """SIGSTOP, as by a debugger or when a virtual machine is frozen: it goes on where it was."""
    async with arena.place() as place:
        worker = nursery.worker(place.dsn, PGQUEUE_FAILPOINT="handler.after:stop", **place.env)
        id = await place.add("keyed", {"key": "stopped"})
        await until(lambda: worker.stopped, worker)
        assert (await place.job(id))["status"] == "running"
        worker.send(signal.SIGCONT)
        [job] = await place.ended(id)
        assert job["status"] == "completed"
        worker.kill()
        await worker.ended()
