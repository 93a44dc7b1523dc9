"""The slots of a worker: all at once or not at all, small ones may pass for a while, suspects run one at a time."""

import asyncio
import itertools
import random
from collections import deque
from typing import Any

from pgqueue.claim import Claimed
from pgqueue.worker.slots import PASS_FOR, Slots

_ids = itertools.count(1)


def job(demand: int = 1, *, lost: int = 0, priority: int = 0) -> Claimed:
    values: dict[str, Any] = dict.fromkeys(Claimed._fields)
    return Claimed(**values | {"id": next(_ids), "thread_demand": demand, "lost": lost, "priority": priority})


def age(pool: Slots, seconds: float) -> None:
    """As if the big ones and the suspects had waited for so much longer."""
    pool.big = deque((job, token, since - seconds) for job, token, since in pool.big)
    pool.suspects = deque((job, token, since - seconds) for job, token, since in pool.suspects)


def offered(threads: int, *jobs: Claimed) -> Slots:
    pool = Slots(threads)
    pool.offer(jobs, "token")
    return pool


def taken(pool: Slots) -> tuple[int, int] | None:
    """The job and its slots."""
    entry = pool.take()
    return (entry[0].id, entry[2]) if entry else None


def test_small_jobs_come_in_order_until_the_pool_is_full() -> None:
    jobs = [job() for _ in range(3)]
    pool = offered(2, *jobs)
    assert [taken(pool), taken(pool), taken(pool)] == [(jobs[0].id, 1), (jobs[1].id, 1), None]
    assert (pool.free, pool.used, len(pool)) == (0, 2, 1)
    pool.give_back(jobs[0], 1)
    assert taken(pool) == (jobs[2].id, 1)


def test_a_job_takes_all_its_slots_at_once_or_none() -> None:
    small, big = job(), job(4)
    pool = offered(4, small)
    assert taken(pool) == (small.id, 1)
    pool.offer([big], "token")
    assert taken(pool) is None
    assert pool.free == 3
    pool.give_back(small, 1)
    assert taken(pool) == (big.id, 4)
    assert pool.free == 0
    pool.give_back(big, 4)
    assert pool.free == 4


def test_a_demand_that_no_worker_meets_gets_one_slot() -> None:
    huge = job(100)
    pool = offered(4, huge)
    assert taken(pool) == (huge.id, 1)


def test_small_jobs_pass_a_big_one_for_a_while() -> None:
    first, big = job(), job(2)
    small = [job() for _ in range(3)]
    pool = offered(2, first)
    assert taken(pool) == (first.id, 1)
    pool.offer([big, *small], "token")
    assert taken(pool) == (small[0].id, 1)
    pool.give_back(small[0], 1)
    age(pool, PASS_FOR / 2)
    assert taken(pool) == (small[1].id, 1)
    pool.give_back(small[1], 1)
    # Now it has waited for long enough, and what gets free is kept for it.
    age(pool, PASS_FOR / 2)
    assert taken(pool) is None
    pool.give_back(first, 1)
    assert taken(pool) == (big.id, 2)
    assert taken(pool) is None
    pool.give_back(big, 2)
    assert taken(pool) == (small[2].id, 1)


def test_a_small_job_of_higher_priority_goes_before_a_big_one_that_fits() -> None:
    big, small = job(2), job(priority=1)
    pool = offered(2, big, small)
    assert taken(pool) == (small.id, 1)
    assert taken(pool) is None
    pool.give_back(small, 1)
    assert taken(pool) == (big.id, 2)


def test_suspects_do_not_run_beside_each_other() -> None:
    suspects = [job(lost=2), job(lost=3)]
    innocent = job()
    pool = offered(4, *suspects, innocent)
    assert taken(pool) == (suspects[0].id, 1)
    # Others may run beside it, but not the second suspect.
    assert taken(pool) == (innocent.id, 1)
    assert taken(pool) is None
    assert pool.free == 2
    pool.give_back(innocent, 1)
    assert taken(pool) is None
    pool.give_back(suspects[0], 1)
    assert taken(pool) == (suspects[1].id, 1)


def test_a_suspect_may_be_big() -> None:
    small, suspect = job(), job(3, lost=2)
    pool = offered(3, small)
    assert taken(pool) == (small.id, 1)
    pool.offer([suspect], "token")
    assert taken(pool) is None
    pool.give_back(small, 1)
    assert taken(pool) == (suspect.id, 3)


def test_a_big_suspect_is_not_passed_for_ever() -> None:
    first, suspect = job(), job(2, lost=2)
    small = [job() for _ in range(2)]
    pool = offered(2, first)
    assert taken(pool) == (first.id, 1)
    pool.offer([suspect, *small], "token")
    assert taken(pool) == (small[0].id, 1)
    pool.give_back(small[0], 1)
    age(pool, PASS_FOR + 1)
    assert taken(pool) is None
    assert pool.room < 0
    pool.give_back(first, 1)
    assert taken(pool) == (suspect.id, 2)


def test_whoever_waits_can_be_sent_away() -> None:
    jobs = [job(), job(2), job(lost=2)]
    pool = offered(4, *jobs)
    assert pool.waiting_ids() == {each.id for each in jobs}
    assert {each.id for each, token in pool.clear() if token == "token"} == {each.id for each in jobs}
    assert (len(pool), pool.free, taken(pool)) == (0, 4, None)


def test_what_waits_too_long_can_be_sent_away_without_the_big_ones() -> None:
    small, big, suspect = job(), job(2), job(lost=2)
    pool = offered(4, small, big, suspect)
    assert {each.id for each, _ in pool.clear(big=False)} == {small.id, suspect.id}
    assert taken(pool) == (big.id, 2)


def test_those_that_wait_can_be_taken_out() -> None:
    jobs = [job(), job(2), job(lost=2), job()]
    pool = offered(4, *jobs)
    assert pool.remove({999}) == []
    assert {each.id for each, _ in pool.remove({jobs[0].id, jobs[1].id, jobs[2].id, 999})} == {j.id for j in jobs[:3]}
    assert pool.waiting_ids() == {jobs[3].id}
    assert taken(pool) == (jobs[3].id, 1)


def test_room() -> None:
    running, bigs = job(), [job(4), job(4)]
    pool = offered(4, running)
    assert pool.room == 3
    assert taken(pool) == (running.id, 1)
    assert pool.room == 3
    pool.offer(bigs[:1], "token")
    assert pool.room == 3, "it may be passed"
    pool.offer(bigs[1:], "token")
    assert pool.room == 2
    pool.offer([job(), job(lost=2)], "token")
    assert pool.room == 0
    age(pool, PASS_FOR + 1)
    assert pool.room == -3, "what is free is kept"


async def test_sleepers_are_woken_for_what_they_can_take() -> None:
    pool = Slots(2)
    runs: list[int] = []

    async def runner() -> None:
        while True:
            if (entry := pool.take()) is None:
                await pool.something_to_do()
                continue
            await asyncio.sleep(0)
            runs.append(entry[0].id)
            pool.give_back(entry[0], entry[2])

    runners = [asyncio.create_task(runner()) for _ in range(2)]
    await asyncio.sleep(0)
    chosen = random.Random(1)
    jobs = [job(chosen.choice([1, 1, 2, 5]), lost=chosen.choice([0, 1, 0, 2])) for _ in range(300)]
    for start in range(0, 300, 7):
        pool.offer(jobs[start : start + 7], "token")
        await asyncio.sleep(0)
    async with asyncio.timeout(10):
        while len(runs) < 300:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert sorted(runs) == sorted(each.id for each in jobs)
    assert (pool.free, len(pool), pool.suspect_runs) == (2, 0, False)
    for task in runners:
        task.cancel()
    await asyncio.gather(*runners, return_exceptions=True)
