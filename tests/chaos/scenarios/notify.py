"""NOTIFY, when it cannot be had: a full queue, a commit that hangs, names and payloads that are too long for it."""

import threading
import time
from contextlib import suppress
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from tests.chaos.site import Site, fault, percentile, site
from tests.chaos.stalls import Stalls
from tests.chaos.verdict import Verdict
from tests.worker.processes import wait

NOTICED = 2.5
"""Seconds: two looks of every listener, and its heartbeat."""


@fault(
    "C22",
    "somebody else's listener, idle in a transaction, lets PostgreSQL's notification queue fill up",
    invariant="every enqueue goes through; workers poll; all is as before when it has gone",
    minute=True,
)
def notifications_fill_up(verdict: Verdict, small: bool) -> None:
    with site({"max_notify_queue_pages": "64"}) as at:
        at.worker("w", env={"PGQUEUE_POLL_INTERVAL": "1"})
        with psycopg.connect(at.server.dsn, autocommit=True) as listener:
            listener.execute("LISTEN elsewhere")
            listener.execute("BEGIN")
            listener.execute("SELECT 1")
            chatter = fill(at)
            usage = at.db.value("SELECT pg_notification_queue_usage()")
            refused, waits = enqueue(at, 8 if small else 100)
            listener.execute("COMMIT")
        healed = time.monotonic()
        wait(lambda: at.db.is_idle("w"), "it listens again", 40)
        wait(lambda: max(enqueue(at, 3)[1]) < 0.3, "workers are woken again", 40)
        verdict.n = 8 if small else 100
        verdict.faults = {"notifications of others": chatter}
        verdict.lost = refused
        verdict.recovery = [time.monotonic() - healed]
        verdict.expect(usage > 0.9, f"the queue was only {usage:.0%} full: nothing was tried")
        verdict.expect(max(waits) < 3, f"a job waited for {max(waits):.1f} s")
        verdict.figures |= {"usage": round(usage, 2), "refused": refused, "pickup_max": round(max(waits), 2)}


def fill(at: Site) -> int:
    """NOTIFYs on a channel that is none of ours, until PostgreSQL takes no more."""
    sent = 0
    with psycopg.connect(at.server.dsn, autocommit=True) as conn, suppress(psycopg.errors.ProgramLimitExceeded):
        while True:
            conn.execute("SELECT pg_notify('elsewhere', repeat('x', 7000) || n) FROM generate_series(1, 5) n")
            sent += 5
    with psycopg.connect(at.server.dsn, autocommit=True) as conn, suppress(psycopg.errors.ProgramLimitExceeded):
        while True:
            conn.execute("SELECT pg_notify('elsewhere', %s)", [str(sent)])
            sent += 1
    return sent


def enqueue(at: Site, jobs: int) -> tuple[int, list[float]]:
    """How many were refused, and how long the others waited for their worker."""
    refused, waits = 0, [0.0]
    for _ in range(jobs):
        try:
            id = at.db.add("nothing")
        except psycopg.errors.ProgramLimitExceeded:
            refused += 1
            continue
        job = at.db.wait_for(id, "completed")
        waits.append((job["started_at"] - job["created_at"]).total_seconds())
    return refused, waits


@fault(
    "C23",
    "a commit with a NOTIFY hangs, and holds the lock that all NOTIFYs of the server need",
    invariant="after two seconds new enqueues go through as before, without NOTIFY; a commit that waits for the lock"
    " already is given up by its lock_timeout, or waits until the end; all is as before then",
)
def commit_with_notify_hangs(verdict: Verdict, small: bool) -> None:
    seconds = 12 if small else 30
    with site() as at:
        at.db.run("ALTER SYSTEM SET synchronous_standby_names = 'ghost'")
        # Only who asks for it waits for the standby.
        at.db.run("ALTER DATABASE pgqueue SET synchronous_commit = local")
        at.db.run("SELECT pg_reload_conf()")
        at.db.run("SET synchronous_commit = local")
        workers = [at.worker(name, ready=False) for name in ("a", "b")]
        at.fleet.wait_until_idle(*workers)
        before, _ = produce_all(at, 3)
        at.fleet.wait_until_idle(*workers)
        hanging = threading.Thread(target=hang, args=[at.server.dsn], daemon=True)
        hanging.start()
        wait(lambda: at.db.value("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"), "it hangs")
        with Stalls(at.server.dsn).noted() as stalls:
            began = time.time()
            patient: list[float] = []
            waiter = threading.Thread(target=wait_for_it, args=[at.server.dsn, patient], daemon=True)
            waiter.start()
            took, stuck = produce_all(at, seconds)
            held_up_for = max(stuck, default=began) - began
            stalled = stalls.within(began, began + held_up_for)
        waiting = at.db.value(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'object' AND classid = 1262 AND NOT granted"
        )
        at.db.run("ALTER SYSTEM RESET synchronous_standby_names")
        at.db.run("SELECT pg_reload_conf()")
        hanging.join(10)
        waiter.join(10)
        at.fleet.wait_until_idle(*workers)
        healed = time.monotonic()
        wait(lambda: max(enqueue(at, 3)[1]) < 0.3, "workers are woken again", 40)
        wait(lambda: not at.db.value("SELECT count(*) FROM pgqueue.jobs_live"), "every job has ended")
        verdict.n = len(took) + len(stuck) + 1
        verdict.expect(patient, "the enqueue that has no lock_timeout is still waiting")
        verdict.faults = {"commits that hang": 1}
        verdict.recovery = [held_up_for, time.monotonic() - healed]
        verdict.expect(stuck, "nobody was held up: nothing was tried")
        verdict.expect(held_up_for - stalled < NOTICED, f"enqueues were held up for {held_up_for:.1f} s")
        usual, now = percentile(before, 0.99), percentile(took, 0.99)
        verdict.expect(now < 2 * usual + 0.02, f"p99 of an enqueue: {now:.3f} s, and {usual:.3f} s before")
        verdict.figures |= {
            "enqueue_p50_p99_max_before": [round(percentile(before, share), 3) for share in (0.5, 0.99, 1)],
            "enqueue_p50_p99_max": [round(percentile(took, share), 3) for share in (0.5, 0.99, 1)],
            "held_up": len(stuck),
            "without_lock_timeout_held_up_for": round(max(patient, default=0.0), 1),
            "held_up_for": round(held_up_for, 2),
            "machine_stalled_meanwhile": round(stalled, 2),
            "waiting_at_the_end": waiting,
        }


def hang(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("CREATE TABLE public.others (n int)")
        conn.execute("SET synchronous_commit = on")
        # Not one of ours; what writes nothing would wait for nobody.
        conn.execute("INSERT INTO public.others SELECT length(pg_notify('elsewhere', '')::text)")


def wait_for_it(dsn: str, took: list[float]) -> None:
    """An enqueue that began before anybody noticed, and has no lock_timeout."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        started = time.time()
        conn.execute("INSERT INTO pgqueue.jobs (type) VALUES ('nothing')")
        took.append(time.time() - started)


def produce_all(at: Site, seconds: float) -> tuple[list[float], list[float]]:
    """How long enqueues took, and when those were begun that were held up."""
    took: list[float] = []
    stuck: list[float] = []
    until = time.time() + seconds
    producers = [threading.Thread(target=produce, args=[at.server.dsn, until, took, stuck]) for _ in range(8)]
    for producer in producers:
        producer.start()
    for producer in producers:
        producer.join()
    return took, stuck


def produce(dsn: str, until: float, took: list[float], stuck: list[float]) -> None:
    """One job after the other; a commit that is held up is given up after a while, as a lock_timeout makes it."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("SET lock_timeout = '300ms'")
        while (started := time.time()) < until:
            try:
                conn.execute("INSERT INTO pgqueue.jobs (type) VALUES ('nothing')")
                took.append(time.time() - started)
            except psycopg.errors.LockNotAvailable:
                stuck.append(started)
            time.sleep(0.1)


@fault(
    "C24",
    "1 MB payloads, names of 300 letters, jobs in prepared transactions",
    invariant="stored or refused in plain words, never by NOTIFY's limits",
    minute=True,
)
def too_long_for_notify(verdict: Verdict, small: bool) -> None:
    with site({"max_prepared_transactions": "5"}) as at:
        at.worker("w")
        large = at.db.add("nothing", {"text": "x" * 1_000_000})
        at.db.wait_for(large, "failed")  # the handler takes no text: what counts is that it came there
        rows = {
            "queue": {"queue": "q" * 300},
            "type": {"type": "t" * 300},
            "name": {"name": "n" * 300},
            "idempotency_key": {"idempotency_key": "k" * 300},
            "payload": {"payload": Jsonb("x" * 1_100_000)},
        }
        for column, row in rows.items():
            verdict.expect(refused_for(at, {"type": "nothing"} | row) == column, f"{column}: was not refused for it")
        verdict.figures["two_phase"] = two_phase(at, verdict)
        verdict.n = len(rows) + 4


def refused_for(at: Site, row: dict[str, Any]) -> str | None:
    """The column, in the words of the refusal."""
    names = ", ".join(row)
    try:
        at.db.run(f"INSERT INTO pgqueue.jobs ({names}) VALUES ({', '.join(['%s'] * len(row))})", *row.values())
    except psycopg.errors.CheckViolation as error:
        return error.diag.column_name
    return None


def two_phase(at: Site, verdict: Verdict) -> dict[str, str]:
    """PostgreSQL prepares no transaction that has sent a NOTIFY: with the switch off, any can be."""
    outcomes = {}
    for wake in (True, False):
        at.db.run("UPDATE pgqueue.switches SET enabled = %s WHERE name = 'wake'", wake)
        at.db.wait_for(at.db.add("nothing"), "completed")
        wait(lambda: at.db.is_idle("w"))
        with psycopg.connect(at.server.dsn) as conn:
            row = conn.execute("INSERT INTO pgqueue.jobs (type) VALUES ('nothing') RETURNING id").fetchone()
            assert row is not None
            try:
                conn.execute(f"PREPARE TRANSACTION 'wake-{wake}'")
                outcomes[f"wake {'on' if wake else 'off'}"] = "prepared"
            except psycopg.errors.FeatureNotSupported:
                outcomes[f"wake {'on' if wake else 'off'}"] = "refused"
                continue
        at.db.run(f"COMMIT PREPARED 'wake-{wake}'")
        at.db.wait_for(row[0], "completed")
    verdict.expect(outcomes["wake off"] == "prepared", "two-phase commit is not possible even with the switch off")
    return outcomes
