"""Which worker gets which job: once each, least recently used first, by priority, where there are threads enough."""

import time

import pytest

from tests.worker.processes import Database, Fleet, wait

pytestmark = pytest.mark.parametrize("server", ["pg18"], indirect=True)

SLEEPY = {"PGQUEUE_POLL_INTERVAL": "30"}
"""Only a NOTIFY wakes it."""
BY_WORKER = (
    "SELECT w.name, count(*) FROM pgqueue.jobs j JOIN pgqueue.workers w ON w.id = j.worker_id"
    " WHERE j.id = ANY (%s) GROUP BY w.name ORDER BY w.name"
)
QUIET = (
    "SELECT bool_and(a.state = 'idle' AND (clock_timestamp() - a.state_change > interval '3 s'"
    " OR clock_timestamp() - a.state_change > interval '0.3 s' AND a.query_start > w.idle_since"
    " AND a.query LIKE '%AND j.parked%'))"
    " FROM pgqueue.workers w LEFT JOIN pg_stat_activity a"
    " ON a.application_name = 'pgqueue-claim ' || w.name AND a.datname = current_database()"
)
"""Each has looked everywhere since it said that it is idle; the last look is at what is parked."""
DOER = "SELECT w.name FROM pgqueue.jobs j JOIN pgqueue.workers w ON w.id = j.worker_id WHERE j.id = %s"


def shares(db: Database, ids: list[int]) -> dict[str, int]:
    return {row["name"]: row["count"] for row in db.rows(BY_WORKER, ids)}


def one_by_one(db: Database, names: list[str], count: int) -> list[str]:
    """Adds jobs, each when everybody sleeps; answers with who did them."""
    doers = []
    for _ in range(count):
        wait(lambda: all(db.is_idle(name) for name in names), "all are idle")
        # One that has just said so looks once more before it sleeps, and may take what comes in that moment.
        wait(lambda: db.value(QUIET), "all are asleep")
        job = db.add("nap")
        db.wait_for(job, "completed")
        doers.append(db.value(DOER, job))
    return doers


def in_turn(db: Database, names: list[str], rounds: int) -> list[str]:
    """Who did them, the same in each round. Where looking takes long, one may get up once more after its last look and
    take what was not for it: then they are counted anew, but not for a third time."""
    for _ in range(3):
        doers = one_by_one(db, names, rounds * len(names))
        if sorted(doers) == sorted(names * rounds) and doers == doers[: len(names)] * rounds:
            break
    else:
        pytest.fail(f"they are not used in turn: {doers}")
    return doers


def test_five_workers_share_2000_jobs_once_each(db: Database, fleet: Fleet) -> None:
    names = [f"w{number}" for number in range(1, 6)]
    workers = fleet.start_all(names)
    assert db.value("SELECT count(DISTINCT (host, pid)) FROM pgqueue.workers WHERE state = 'available'") == 5
    ids: list[int] = []
    # A worker that stands still for as long as the others need has no share: then there are some more.
    while len(ids) < 2000 or (sorted(shares(db, ids)) != names and len(ids) < 6000):
        ids += [id for _ in range(4) for id in db.add_many("work", [{}] * 500)]
        db.wait_for_all(ids, "completed", 60)
    assert db.how_often() == dict.fromkeys(ids, 1)
    assert sorted(shares(db, ids)) == names
    assert sum(shares(db, ids).values()) == len(ids)
    assert db.value("SELECT count(*) FROM pgqueue.attempts") == 0
    for worker in workers:
        wait(
            lambda worker=worker: (  # type: ignore[misc]
                len({event["job"] for event in worker.events("job.completed")}) == shares(db, ids)[worker.name]
            ),
            f"{worker.name} says so, too",
        )

    # Three of them leave under load: nothing is lost.
    more = db.add_many("work", [{"seconds": 0.02}] * 400)
    wait(lambda: db.statuses(more).get("completed", 0) > 50, "some are done")
    workers[0].signal_to_stop()
    workers[1].signal_to_stop()
    workers[2].kill()
    db.bury()
    db.wait_for_all(more, "completed", 60)
    assert workers[0].wait() == workers[1].wait() == 0
    effects = db.how_often()
    assert all(effects[id] >= 1 for id in more)
    # Only what the killed one had in its hands may have run twice.
    assert sum(effects[id] > 1 for id in more) <= db.value("SELECT count(*) FROM pgqueue.attempts")


def test_idle_workers_are_used_in_turn(db: Database, fleet: Fleet) -> None:
    names = ["w1", "w2", "w3"]
    fleet.start_all(names, **SLEEPY)
    # The one that was idle for longest is next, so the order repeats.
    doers = in_turn(db, names, 3)

    # A new one takes its turn, not everything.
    fleet.start("w4", **SLEEPY)
    four = one_by_one(db, [*names, "w4"], 5)
    assert four == [*doers[:3], "w4", doers[0]] or in_turn(db, [*names, "w4"], 2)


def test_priority_then_order_of_arrival(db: Database, fleet: Fleet) -> None:
    fleet.start("w", threads=1)
    path = fleet.directory / "end"
    holder = db.add("hold", {"path": str(path)})
    db.wait_for(holder, "running")
    low = db.add_many("hold", [{"seconds": 0.2}] * 60, priority=1)
    five_a = db.add("hold", {"seconds": 0.2}, priority=5)
    ten = db.add("hold", {"seconds": 0.2}, priority=10)
    five_b = db.add("hold", {"seconds": 0.2}, priority=5)
    path.touch()
    wait(lambda: db.job(low[0])["status"] != "pending", "the low ones have their turn")
    # Of a new priority a worker with much to do learns within a second.
    overtaker = db.add("hold", {"seconds": 0}, priority=1000)
    db.wait_for(overtaker, "completed")
    assert db.statuses(low).get("pending", 0) > 10
    started = "SELECT id FROM pgqueue.jobs WHERE started_at IS NOT NULL AND status = 'completed' ORDER BY started_at"
    order = db.values(started)
    order.remove(overtaker)
    assert order == [holder, ten, five_a, five_b, *low][: len(order)]


def test_threads_decide_where_a_job_runs(db: Database, fleet: Fleet) -> None:
    fleet.start("small", threads=4, ready=False)
    fleet.start("large", threads=8, ready=False)
    # Larger than both, but of no use for this queue.
    fleet.start("elsewhere", threads=16, queues="other", ready=False)
    fleet.wait_until_idle(*fleet.workers)
    path = fleet.directory / "end"
    six = db.add_many("hold", [{"path": str(path)}] * 4, thread_demand=6)
    wait(lambda: db.statuses(six).get("running"), "the large one is busy")
    # Meanwhile the others wait and the small ones go on.
    ones = db.add_many("hold", [{"seconds": 0.1}] * 20)
    db.wait_for_all(ones, "completed")
    assert db.statuses(six).get("completed", 0) == 0
    more = db.add_many("hold", [{"path": str(path)}] * 6)
    wait(lambda: "small" in shares(db, more), "the small one does its part")
    path.touch()
    db.wait_for_all(six + more, "completed")
    assert shares(db, six) == {"large": 4}
    assert db.values("SELECT DISTINCT threads_used FROM pgqueue.jobs WHERE id = ANY (%s)", six) == [6]

    # More than anybody has who serves the queue: one thread, and the wish is kept.
    for demand in (9, 100):
        job = db.wait_for(db.add("hold", {"seconds": 0}, thread_demand=demand), "completed")
        assert (job["thread_demand"], job["threads_used"], job["result"]["threads"]) == (demand, 1, 1)

    # The only large one dies: what waited for it falls back, too.
    fleet.workers[1].kill()
    orphan = db.add("hold", {"seconds": 0}, thread_demand=6)
    time.sleep(0.5)
    assert db.job(orphan)["status"] == "pending"
    db.bury()
    job = db.wait_for(orphan, "completed")
    assert (job["thread_demand"], job["threads_used"]) == (6, 1)
    assert db.value(DOER, orphan) == "small"


def test_a_pool_is_never_exceeded(db: Database, fleet: Fleet) -> None:
    fleet.start("w", threads=6)
    ids = []
    for demand in (1, 2, 3, 1, 6, 4, 1, 5):
        ids += db.add_many("hold", [{"seconds": 0.04}] * 6, thread_demand=demand)
    peak = 0
    while db.statuses(ids) != {"completed": len(ids)}:
        peak = max(peak, (db.worker("w") or {})["threads_used"])
        time.sleep(0.05)
    held = db.values("SELECT (result ->> 'held')::int FROM pgqueue.jobs WHERE id = ANY (%s)", ids)
    assert max(held) <= 6
    assert max(held) > 4  # it was used well
    assert peak <= 6
    assert db.value("SELECT bool_and(threads_used = thread_demand) FROM pgqueue.jobs WHERE id = ANY (%s)", ids)

    # Jobs that want the whole pool do not block each other, as they would if they took their threads one by one.
    whole = db.add_many("hold", [{"seconds": 0.05}] * 10, thread_demand=6)
    db.wait_for_all(whole, "completed")


def test_a_big_job_is_passed_for_a_while_but_not_for_ever(db: Database, fleet: Fleet) -> None:
    fleet.start("quick", queues="quick", threads=2, ready=False)
    fleet.start("slow", queues="slow", threads=2, ready=False)
    fleet.wait_until_idle(*fleet.workers)
    # More small jobs than they can do for a long time, of the kind that ends often and of the kind that does not; never
    # two of them at the same time.
    db.add_many("hold", [{"seconds": 0.07 + number % 7 / 50} for number in range(300)], queue="quick")
    db.add_many("hold", [{"seconds": 1.1 + number % 5 / 7} for number in range(30)], queue="slow")
    wait(lambda: db.statuses().get("running", 0) >= 4, "both are busy")
    queues = ("quick", "slow")
    big = {queue: db.add("hold", {"seconds": 0}, queue=queue, thread_demand=2, priority=1) for queue in queues}
    passed = {}
    for queue, id in big.items():
        job = db.wait_for(id, "completed")
        assert job["threads_used"] == 2
        # It is passed for five seconds, and the longest of the small ones takes 1.7; all of them would take twenty.
        assert (job["started_at"] - job["created_at"]).total_seconds() < 5 + 1.7 + 6
        passed[queue] = db.value(
            "SELECT count(*) FROM pgqueue.jobs WHERE queue = %s AND started_at BETWEEN %s AND %s",
            queue,
            job["created_at"],
            job["started_at"],
        )
    # The rest of the pool was not idle while the big ones waited.
    assert passed["quick"] > 5
    assert passed["slow"] > 1


def test_small_jobs_run_beside_a_big_one_that_waits(db: Database, fleet: Fleet) -> None:
    fleet.start("w", threads=2)
    path = fleet.directory / "end"
    holder = db.add("hold", {"path": str(path)})
    db.wait_for(holder, "running")
    big = db.add("hold", {"seconds": 0}, thread_demand=2, priority=1)
    db.wait_for(big, "running")  # in its worker's hands, where it waits for the second thread
    ones = db.add_many("hold", [{"seconds": 0.05}] * 10)
    db.wait_for_all(ones, "completed")
    assert db.job(holder)["status"] == "running", "they had to wait for the big one"
    path.touch()
    assert db.wait_for(big, "completed")["threads_used"] == 2


def test_a_job_that_waits_for_threads_can_be_cancelled(db: Database, fleet: Fleet) -> None:
    fleet.start("w", threads=2)
    holder = db.add("begin", {"seconds": 60})
    db.wait_for_effect(holder)
    big = db.add("begin", thread_demand=2)
    db.wait_for(big, "running")
    db.cancel(big)
    db.wait_for(big, "cancelled", 10)
    assert db.effects(big) == []
    # Nothing is kept for it any more.
    db.wait_for_all(db.add_many("begin", [{}] * 4), "completed")
    assert db.job(holder)["status"] == "running"


def test_a_worker_with_much_to_do_does_not_forget_what_others_left_for_it(db: Database, fleet: Fleet) -> None:
    """The one that does not know the type meets the job first; the only one that knows it is never without work."""
    fleet.start("all", app="sample_app other_app", threads=1, ready=False)
    fleet.start("some", threads=1, ready=False)
    fleet.wait_until_idle(*fleet.workers)
    db.add_many("nap", [{"seconds": 0.05}] * 800)
    wait(lambda: db.statuses().get("completed", 0) > 10, "both are busy")
    rare = db.add_many("rare", [{}] * 3, priority=10)
    db.wait_for_all(rare, "completed", 15)
    assert db.statuses().get("pending", 0) > 0
