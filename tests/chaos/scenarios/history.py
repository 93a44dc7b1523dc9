"""PostgreSQL loses its latest commits, and Redis does not: failover, restore, recovery to a point in time."""

import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import redis

from pgqueue.embedded import start_valkey
from pgqueue.embedded.server import _free_port
from pgqueue.idempotency import _name
from tests.chaos.site import Site, fault, site
from tests.chaos.site_app import write_once
from tests.chaos.verdict import Verdict
from tests.worker.processes import Database, wait

REPLICA = {"wal_level": "replica", "max_wal_senders": "5", "wal_keep_size": "256MB", "hot_standby": "on"}
ARCHIVE = {"archive_mode": "on", "archive_command": "mkdir -p kept && cp %p kept/%f"}


class Twin:
    """A second server, made from the first by its own programs."""

    def __init__(self, at: Site, name: str) -> None:
        self.at = at
        self.data = at.folder / name
        self.port = _free_port(None)
        self.bin = at.server.bin_dir
        self.process: subprocess.Popen[bytes] | None = None
        self.log = (at.folder / f"{name}.log").open("ab")

    @property
    def dsn(self) -> str:
        first = urlsplit(self.at.server.dsn)
        return first._replace(netloc=f"{first.username}:{first.password}@127.0.0.1:{self.port}").geturl()

    def copy(self) -> None:
        """A base backup; it follows the first server when it is started with a standby's settings."""
        self.at.folder.chmod(0o777)  # the server's own user makes the folder
        command = [
            f"{self.bin}/pg_basebackup",
            "-D",
            str(self.data),
            "-d",
            self.at.server.dsn,
            "-c",
            "fast",
            "-X",
            "stream",
        ]
        subprocess.run(self.command(command), check=True, stdout=self.log, stderr=self.log)

    def start(self, *settings: str, signal_file: str | None = None) -> None:
        if signal_file:
            (self.data / signal_file).touch()
            os.chown(self.data / signal_file, *owner(self.data))
        command = [f"{self.bin}/postgres", "-D", str(self.data), "-p", str(self.port), "-k", str(self.data)]
        for setting in ("listen_addresses=127.0.0.1", "max_connections=200", *settings):
            command += ["-c", setting]
        self.process = subprocess.Popen(self.command(command), stdout=self.log, stderr=self.log, start_new_session=True)

    def answers(self, query: str) -> object:
        with suppress(psycopg.OperationalError), psycopg.connect(self.dsn, autocommit=True, connect_timeout=5) as conn:
            row = conn.execute(query).fetchone()
            return row[0] if row else None
        return None

    def command(self, command: list[str]) -> list[str]:
        """As the user whose server it is: PostgreSQL refuses to be root."""
        uid, gid = owner(self.at.server.data_dir)
        if uid == os.getuid():
            return command
        return ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", *command]

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGQUIT)
            self.process.wait(30)
        self.log.close()


def owner(path: Path) -> tuple[int, int]:
    about = path.stat()
    return about.st_uid, about.st_gid


@contextmanager
def twin(at: Site, name: str) -> Iterator[Twin]:
    made = Twin(at, name)
    try:
        yield made
    finally:
        made.stop()


def senders(at: Site) -> list[int]:
    return at.db.values("SELECT pid FROM pg_stat_replication")


def add(db: Database, kind: str, keys: list[str], *, seconds: float | None = None, **columns: int) -> dict[str, int]:
    """Committed one by one, as producers would."""
    more = {} if seconds is None else {"seconds": seconds}
    return {key: db.add(kind, {"key": key} | more, **columns) for key in keys}


def either(at: Site, standby: Twin) -> str:
    """Both servers in one DSN: whoever can be written to is meant."""
    first = urlsplit(at.server.dsn)
    hosts = f"127.0.0.1:{standby.port},127.0.0.1:{at.server.port}"
    address = f"{first.username}:{first.password}@{hosts}"
    return f"postgresql://{address}{first.path}?target_session_attrs=read-write"


@fault(
    "C14",
    "failover: the standby has not got the last commits, Redis has; then the same with a synchronous standby",
    invariant="jobs and effects agree, nothing is skipped because Redis remembers it; synchronous: nothing lost",
    budget=180,
)
def failover(verdict: Verdict, small: bool) -> None:
    for synchronous in (False, True):
        lose_primary(verdict, synchronous, 20 if small else 60)


def lose_primary(verdict: Verdict, synchronous: bool, number: int) -> None:
    how = "sync" if synchronous else "async"
    with site(REPLICA) as at, twin(at, "standby") as standby:
        valkey = start_valkey(at.folder / "valkey")
        try:
            standby.copy()
            standby.start(f"primary_conninfo={at.server.dsn}?application_name=standby", signal_file="standby.signal")
            wait(lambda: senders(at), "the standby follows")
            if synchronous:
                at.db.run("ALTER SYSTEM SET synchronous_standby_names = 'standby'")
                at.db.run("SELECT pg_reload_conf()")
                wait(lambda: at.db.value("SELECT sync_state FROM pg_stat_replication") == "sync")
            at.worker("w", dsn=either(at, standby), threads=8, env={"REDIS_URL": valkey.url})
            kept = add(at.db, "write_once", [f"kept-{n}" for n in range(number)])
            at.db.wait_for_all(list(kept.values()), "completed")
            if not synchronous:
                at.db.run("SELECT pgqueue.pause_queue('default')")
                # They will run when the server falls; the standby has not heard that they were claimed.
                kept |= add(at.db, "write", [f"busy-{n}" for n in range(4)], seconds=4.0, priority=1)
            caught_up(at, standby)
            for pid in senders(at):
                os.kill(pid, signal.SIGSTOP)
            at.db.run("SET synchronous_commit = local")
            at.db.run("SELECT pgqueue.resume_queue('default')")
            # From here on the standby knows nothing. Asynchronous, everything is acknowledged all the same.
            doomed = doomed_jobs(at, number, synchronous)
            remember(valkey.url, [key for key in doomed if key.startswith("doomed")])
            primary, fell = at.server, time.monotonic()
            for pid in senders(at) if not synchronous else []:
                os.kill(pid, signal.SIGKILL)
            primary.kill()
            promote(standby)
            at.db.dsn = standby.dsn
            at.db.again()
            at.db.run("SELECT pgqueue.resume_queue('default')")
            judge_failover(verdict, at, how, kept, doomed, fell, number)
        finally:
            valkey.stop()
            at.db.dsn = standby.dsn


def caught_up(at: Site, standby: Twin) -> None:
    here = at.db.value("SELECT pg_current_wal_flush_lsn()::text")
    wait(lambda: standby.answers(f"SELECT pg_last_wal_replay_lsn() >= '{here}'"), "the standby has caught up")


def doomed_jobs(at: Site, number: int, synchronous: bool) -> set[str]:
    """The keys that were acknowledged while the standby was deaf."""
    if not synchronous:
        wait(lambda: at.db.statuses().get("running") == 4, "the busy ones run")
        ids = add(at.db, "write_once", [f"doomed-{n}" for n in range(number)])
        calls = add(at.db, "call", [f"called-{n}" for n in range(number)])
        at.db.wait_for_all([*ids.values(), *calls.values()], "completed")
        time.sleep(0.2)  # Redis is told after the commit
        return {*ids, *calls}
    acknowledged: set[str] = set()

    def produce() -> None:
        with suppress(psycopg.OperationalError), psycopg.connect(at.server.dsn, autocommit=True) as conn:
            conn.execute("INSERT INTO pgqueue.jobs (type, payload) VALUES ('write_once', '{\"key\": \"doomed\"}')")
            acknowledged.add("doomed")

    producer = threading.Thread(target=produce, daemon=True)
    producer.start()
    time.sleep(2)
    return acknowledged


def remember(url: str, keys: list[str]) -> None:
    """On a busy machine the worker may not have come to tell Redis; the worst case is that it has told everything."""
    with redis.Redis.from_url(url) as cache:
        for key in keys:
            cache.set(_name(write_once.effect(0, {"key": key}).key), 1)


def promote(standby: Twin) -> None:
    wait(lambda: standby.answers("SELECT pg_promote(true, 30)"), "the standby is promoted", 60)


def judge_failover(
    verdict: Verdict,
    at: Site,
    how: str,
    kept: dict[str, int],
    doomed: set[str],
    fell: float,
    number: int,
) -> None:
    wait(lambda: not at.db.value("SELECT count(*) FROM pgqueue.jobs_live"), "what survived has ended", 60)
    back = time.monotonic() - fell
    survivors = set(at.db.values("SELECT payload->>'key' FROM pgqueue.jobs"))
    lost_acks = (set(kept) | doomed) - survivors
    if how == "sync":
        verdict.expect(not lost_acks, f"{how}: {len(lost_acks)} acknowledged jobs are gone")
    # The producers notice and add again what is missing: same keys, ids that others had before.
    again = add(at.db, "write_once", [key for key in sorted(lost_acks) if key.startswith("doomed")])
    fresh = add(at.db, "call", [f"fresh-{n}" for n in range(number if how == "async" else 0)])
    if again or fresh:
        at.db.wait_for_all([*again.values(), *fresh.values()], "completed", 60)
    rows = Counter(at.db.values("SELECT note FROM public.effects"))
    finished = set(
        at.db.values("SELECT payload->>'key' FROM pgqueue.jobs_finished WHERE type IN ('write', 'write_once')")
    )
    verdict.n += len(kept) + len(doomed) + len(fresh)
    verdict.duplicated += sum(count > 1 for count in rows.values())
    verdict.lost += len(finished - rows.keys())
    verdict.unexpected += len(rows.keys() - finished)
    effects = {line.split()[0] for line in at.sink.all("effects")}
    missing = set(fresh) - effects
    verdict.expect(not missing, f"{how}: the provider took {len(missing)} new jobs for old ones")
    verdict.faults[f"{how} failovers"] = 1
    verdict.recovery.append(back)
    verdict.figures |= {
        f"{how}_acks_lost": len(lost_acks),
        f"{how}_stale_in_redis": len(again),
        f"{how}_failover_s": round(back, 1),
    }


@fault(
    "C41",
    "a dump is restored, and a server is taken back to a moment ago; Redis is kept",
    invariant="nothing is skipped because Redis remembers it, nobody waits for leases of then, new ids are new",
    budget=240,
)
def restore(verdict: Verdict, small: bool) -> None:
    from_dump(verdict, 20 if small else 100)
    to_a_moment_ago(verdict, 20 if small else 100)


def before_and_after(at: Site, url: str, number: int, snapshot: Callable[[], None]) -> tuple[dict[str, int], list[int]]:
    """Half of the jobs wait when the snapshot is taken, and end afterwards: of them only Redis will know. One runs."""
    worker = at.worker("old", env={"REDIS_URL": url})
    early = add(at.db, "write_once", [f"early-{n}" for n in range(number)])
    at.db.wait_for_all(list(early.values()), "completed")
    running = at.db.add("sleep", {"seconds": 3})
    wait(lambda: at.db.job(running)["status"] == "running")
    at.db.run("SELECT pgqueue.pause_queue('default')")
    late = add(at.db, "write_once", [f"late-{n}" for n in range(number)])
    snapshot()
    at.db.run("SELECT pgqueue.resume_queue('default')")
    at.db.wait_for_all(list(late.values()), "completed")
    remember(url, list(late))
    worker.kill()
    return early | late, [running]


def judge_restored(
    verdict: Verdict, at: Site, dsn: str, url: str, jobs: dict[str, int], running: list[int], how: str
) -> None:
    """On the restored database, with a new worker."""
    started = time.monotonic()
    at.db.dsn = at.fleet.dsn = dsn
    at.db.again()
    at.db.run("SELECT pgqueue.resume_queue('default')")
    live = at.db.value("SELECT count(*) FROM pgqueue.jobs_live")
    at.worker(f"new-{how}", ready=False, env={"REDIS_URL": url})
    wait(lambda: not at.db.value("SELECT count(*) FROM pgqueue.jobs_live"), "everything has ended", 60)
    verdict.recovery.append(time.monotonic() - started)
    fresh = at.db.add("write_once", {"key": f"fresh-{how}"})
    at.db.wait_for(fresh, "completed")
    rows = Counter(at.db.values("SELECT note FROM public.effects"))
    verdict.n += len(jobs) + len(running)
    verdict.faults[how] = 1
    verdict.lost += len(jobs.keys() - rows.keys()) + (f"fresh-{how}" not in rows)
    verdict.duplicated += sum(count > 1 for count in rows.values())
    highest = max([*jobs.values(), *running])
    verdict.expect(fresh > highest or how == "recovery", f"{how}: id {fresh} is not new, there was {highest}")
    verdict.expect(live == len(jobs) // 2 + 1, f"{how}: {live} jobs were live, not {len(jobs) // 2 + 1}")
    verdict.expect(at.db.job(running[0])["lost"] == 1, f"{how}: the job that ran then was not rescued once")
    for name in ("pending", "failed"):
        verdict.expect(at.db.statuses().get(name) is None, f"{how}: {at.db.statuses()}")


def from_dump(verdict: Verdict, number: int) -> None:
    with site() as at, twin(at, "unused") as programs:
        valkey = start_valkey(at.folder / "valkey")
        file = at.folder / "dump"

        def dump() -> None:
            command = [f"{at.server.bin_dir}/pg_dump", "-Fc", "-f", str(file), at.server.dsn]
            at.folder.chmod(0o777)
            subprocess.run(programs.command(command), check=True)

        try:
            jobs, running = before_and_after(at, valkey.url, number, dump)
            with psycopg.connect(at.server.dsn, autocommit=True) as conn:
                conn.execute("CREATE DATABASE restored")
            restored = urlsplit(at.server.dsn)._replace(path="/restored").geturl()
            command = [f"{at.server.bin_dir}/pg_restore", "--exit-on-error", "-d", restored, str(file)]
            subprocess.run(programs.command(command), check=True)
            judge_restored(verdict, at, restored, valkey.url, jobs, running, "dump")
        finally:
            valkey.stop()


def to_a_moment_ago(verdict: Verdict, number: int) -> None:
    with site(REPLICA | ARCHIVE) as at, twin(at, "then") as then:
        valkey = start_valkey(at.folder / "valkey")
        archive = at.server.data_dir / "kept"
        moment: list[str] = []
        try:
            then.copy()

            def note() -> None:
                moment.append(at.db.value("SELECT clock_timestamp()::text"))
                time.sleep(0.5)

            jobs, running = before_and_after(at, valkey.url, number, note)
            last = at.db.value("SELECT pg_walfile_name(pg_switch_wal())")
            wait(lambda: at.db.value("SELECT last_archived_wal FROM pg_stat_archiver") == last, "the log is kept")
            at.server.stop("fast")
            then.start(
                f"restore_command=cp {archive}/%f %p",
                f"recovery_target_time={moment[0]}",
                "recovery_target_action=promote",
                signal_file="recovery.signal",
            )
            wait(lambda: then.answers("SELECT NOT pg_is_in_recovery()"), "it is back at that moment", 20)
            judge_restored(verdict, at, then.dsn, valkey.url, jobs, running, "recovery")
        finally:
            valkey.stop()
