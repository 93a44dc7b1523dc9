"""/api/v1: jobs, many of them, and what operators do."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from pgqueue import answers
from tests.api.conftest import Api, until, worker_process

V1 = "/api/v1"


def add(api: Api, **more: Any) -> dict[str, Any]:
    answer = api("POST", f"{V1}/jobs", {"type": "t"} | more)
    assert answer.status == 201, answer.text
    return answer.json


def fail(api: Api, *ids: int, error: str = "boom 17", reason: str = "error") -> None:
    for id in ids:
        api.query(
            "WITH gone AS (DELETE FROM pgqueue.jobs_live WHERE id = %s RETURNING *) INSERT INTO pgqueue.jobs_failed"
            " (id, queue, type, payload, status, finished_at, error, error_type, reason, attempt) SELECT id, queue,"
            " type, payload, 'failed', clock_timestamp(), %s, 'ValueError', %s, 5 FROM gone",
            id,
            error,
            reason,
        )


def test_create_and_get(api: Api) -> None:
    body = {
        "type": "send_email",
        "payload": {"to": "a@x.org", "big": 12345678901234567890123, "exact": [0.1, None, True, "ü"]},
        "queue": "mail",
        "priority": 9,
        "delay": 60,
        "thread_demand": 2,
        "max_attempts": 3,
        "timeout": 1.5,
        "tags": ["a", 'b"{}'],
        "name": "one",
        "idempotency_key": "k-1",
    }
    answer = api("POST", f"{V1}/jobs", body)
    assert answer.status == 201
    job = answer.json
    assert answer.headers["location"] == f"{V1}/jobs/{job['id']}"
    assert job["status"] == "scheduled"
    assert {name: job[name] for name in body if name != "delay"} == {k: v for k, v in body.items() if k != "delay"}
    got = api("GET", f"{V1}/jobs/{job['id']}")
    assert got.json == {name: value for name, value in job.items() if name != "inserted"}
    again = api("POST", f"{V1}/jobs", body)
    assert (again.status, again.json["id"], again.json["inserted"]) == (200, job["id"], False)
    other = api("POST", f"{V1}/jobs", body | {"payload": {}})
    assert other.status == 422


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "type"),
    ({"type": ""}, "type"),
    ({"type": "a\nb"}, "type"),
    ({"type": "t", "status": "completed"}, "status"),
    ({"type": "t", "attempt": 0}, "attempt"),
    ({"type": "t", "priority": 1.5}, "priority"),
    ({"type": "t", "priority": True}, "priority"),
    ({"type": "t", "delay": 1, "run_at": "2030-01-01T00:00:00Z"}, "delay"),
    ({"type": "t", "run_at": "soon"}, "run_at"),
    ({"type": "t", "run_at": 7}, "run_at"),
    ({"type": "t", "run_at": "2030-01-01T00:00:00"}, "run_at"),
    ({"type": "t", "run_at": "9999-01-01T00:00:00Z"}, "run_at"),
    ({"type": "t", "timeout": 0}, "timeout"),
    ({"type": "t", "tags": ["x"] * 33}, "tags"),
    ({"type": "t", "tags": "x"}, "tags"),
    ({"type": "t", "name": "x" * 201}, "name"),
    ({"type": "t", "idempotency_key": ""}, "idempotency_key"),
]


def test_bad_jobs(api: Api) -> None:
    for body, named in BAD:
        for path, sent in ((f"{V1}/jobs", body), (f"{V1}/jobs/batch", {"jobs": [{"type": "t"}, body]})):
            answer = api("POST", path, sent)
            assert answer.status == 422, (body, answer.text)
            assert named in answer.json["error"], (body, answer.json)
    assert api("POST", f"{V1}/jobs/batch", {"jobs": []}).status == 422
    assert api("POST", f"{V1}/jobs/batch", {"jobs": [{"type": "t"}] * 1001}).status == 422
    assert api.count() == 0


def test_batch(api: Api) -> None:
    jobs = [{"type": "t", "payload": n} for n in range(1000)]
    added = api("POST", f"{V1}/jobs/batch", {"jobs": jobs}, headers={"Idempotency-Key": "b"})
    assert added.status == 201
    assert len(added.json["jobs"]) == api.count() == 1000
    again = api("POST", f"{V1}/jobs/batch", {"jobs": jobs}, headers={"Idempotency-Key": "b"})
    assert (again.json, again.headers["idempotent-replayed"]) == (added.json, "true")
    assert api.count() == 1000
    keyed = [{"type": "t", "idempotency_key": "x"}, {"type": "t"}, {"type": "t", "idempotency_key": "x"}]
    first, _, third = api("POST", f"{V1}/jobs/batch", {"jobs": keyed}).json["jobs"]
    assert (third["id"], third["inserted"]) == (first["id"], False)


def test_pages(api: Api) -> None:
    api("POST", f"{V1}/jobs/batch", {"jobs": [{"type": "t", "tags": ["x"], "queue": "q"}] * 7 + [{"type": "u"}] * 3})
    found, cursor = [], ""
    while True:
        page = api("GET", f"{V1}/jobs?limit=3&type=t&tag=x&queue=q{cursor}").json
        found += [one["id"] for one in page["data"]]
        add(api)
        if page["next_cursor"] is None:
            break
        cursor = f"&cursor={page['next_cursor']}"
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == 7
    cursor = api("GET", f"{V1}/jobs?limit=3").json["next_cursor"]
    flipped = cursor[:-2] + ("A" if cursor[-2] != "A" else "B") + cursor[-1]
    for query in (
        f"limit=3&type=u&cursor={cursor}",
        f"limit=3&cursor={flipped}",
        "cursor=",
        "cursor=%C3%A9",
        "cursor=a%00",
    ):
        answer = api("GET", f"{V1}/jobs?{query}")
        assert answer.status in (400, 422), query
    assert api("GET", f"{V1}/jobs?limit=2&cursor={cursor}").status == 200
    assert api("GET", f"{V1}/jobs?status=odd").status == 422
    assert api("GET", f"{V1}/jobs?limit=201").status == 422
    assert [one["type"] for one in api("GET", f"{V1}/jobs?status=pending,scheduled&type=u").json["data"]] == ["u"] * 3


def test_idempotency_key(api: Api) -> None:
    body = {"type": "t", "payload": {"a": 1, "b": 2}}
    for path, kind in (
        (f"{V1}/jobs", body),
        ("/addJob", body),
        ("/submit_job", {"name": "default"}),
        ("/jobs", {"type": "default"}),
    ):
        before = api.count()
        first = api("POST", path, kind, headers={"Idempotency-Key": '"k 1"'.replace(" ", "-")})
        again = api("POST", path, dict(reversed(kind.items())), headers={"Idempotency-Key": "k-1"})
        assert first.status == again.status < 300
        assert again.text == first.text
        assert again.headers["idempotent-replayed"] == "true"
        assert "idempotent-replayed" not in first.headers
        other = api("POST", path, kind | {"priority": 7}, headers={"Idempotency-Key": "k-1"})
        assert (other.status, other.json["type"]) == (422, "urn:pgqueue:problem:idempotency-key-reused")
        assert api.count() == before + 1
    stranger = api.make_token(subject="stranger")
    assert api("POST", f"{V1}/jobs", body, headers={"Idempotency-Key": "k-1"}, token=stranger).json["inserted"]
    for bad in ("", " ", "é", "a b", "x" * 256):
        sent = {"Idempotency-Key": bad.encode().decode("latin-1")}
        assert api("POST", f"{V1}/jobs", body, headers=sent).status == 400, bad
    # What was refused is not kept.
    refused = {"Idempotency-Key": "k-2"}
    assert api("POST", f"{V1}/jobs", {"type": "t", "queue": "a b"}, headers=refused).status == 422
    assert api("POST", f"{V1}/jobs", body, headers=refused).status == 201


async def test_a_request_with_a_key_waits_no_longer_than_the_database_says(dsn: str) -> None:
    async with await psycopg.AsyncConnection.connect(dsn, options="-c lock_timeout=300ms") as conn:
        assert await answers.first_answer(conn, answers.Key("s", "r", "k", b"")) is None
        assert await (await conn.execute("SHOW lock_timeout")).fetchone() == ("300ms",)


def test_an_idempotency_key_of_a_deleted_job(api: Api) -> None:
    body = {"type": "t", "idempotency_key": "k"}
    id = add(api, **body)["id"]
    api.query("SELECT pgqueue.cancel_job(%s)", id)
    api.query("SELECT pgqueue.delete_job(%s)", id)
    again = api("POST", f"{V1}/jobs", body)
    assert again.status == 409
    assert f"belongs to job {id}, which has been deleted" in again.json["detail"]
    assert api.count() == 0


def test_an_idempotency_key_that_is_in_use(api: Api) -> None:
    body, headers = {"type": "t"}, {"Idempotency-Key": "busy"}
    with psycopg.connect(api.dsn) as conn:
        conn.execute(
            "INSERT INTO pgqueue.http_answers (subject, route, key, fingerprint, expires_at)"
            f" VALUES ('admin', 'POST {V1}/jobs', 'busy', 'x', now() + interval '1 day')"
        )
        answer = api("POST", f"{V1}/jobs", body, headers=headers)
        assert (answer.status, answer.headers["retry-after"]) == (409, "1")
        conn.rollback()
    assert api("POST", f"{V1}/jobs", body, headers=headers).status == 201


def test_many_with_one_key_at_a_time(api: Api) -> None:
    def post(_: int) -> Any:
        return api("POST", f"{V1}/jobs", {"type": "t"}, headers={"Idempotency-Key": "one"})

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(post, range(48)))
    assert {answer.status for answer in answers} <= {201, 409}
    assert len({answer.json["id"] for answer in answers if answer.status == 201}) == api.count() == 1


def test_edit_with_etags(api: Api) -> None:
    id = add(api)["id"]
    etag = api("GET", f"{V1}/jobs/{id}").headers["etag"]
    changes = {"priority": 5, "payload": {"n": 1}, "timeout": 2.5, "tags": ["x"], "name": None, "reason": "why"}
    edited = api("PATCH", f"{V1}/jobs/{id}", changes, headers={"If-Match": etag})
    assert edited.status == 200
    assert (edited.json["priority"], edited.json["payload"], edited.json["timeout"]) == (5, {"n": 1}, 2.5)
    stale = api("PATCH", f"{V1}/jobs/{id}", {"priority": 6}, headers={"If-Match": etag})
    assert stale.status == 412
    assert api("PATCH", f"{V1}/jobs/{id}", {"priority": 6}, headers={"If-Match": edited.headers["etag"]}).status == 200
    assert api("PATCH", f"{V1}/jobs/{id}", {"run_at": "2031-01-01T00:00:00+02:00"}).json["status"] == "scheduled"
    for bad in (
        {},
        {"reason": "x"},
        {"status": "completed"},
        {"priority": None},
        {"payload": None},
        {"queue": "a b"},
        {"id": 2},
    ):
        assert api("PATCH", f"{V1}/jobs/{id}", bad).status == 422, bad
    api("POST", f"{V1}/jobs/{id}/cancel")
    assert api("PATCH", f"{V1}/jobs/{id}", {"priority": 1}).status == 409
    assert api("PATCH", f"{V1}/jobs/99999", {"priority": 1}).status == 404
    audit = api("GET", f"{V1}/audit?job_id={id}").json["data"]
    assert {one["actor"] for one in audit} == {"api:admin"}
    assert audit[-1]["reason"] == "why"


def test_only_one_of_two_editors_wins(api: Api) -> None:
    id = add(api)["id"]
    etag = api("GET", f"{V1}/jobs/{id}").headers["etag"]

    def edit(priority: int) -> int:
        return api("PATCH", f"{V1}/jobs/{id}", {"priority": priority}, headers={"If-Match": etag}).status

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(edit, range(1, 9))) == [200] + [412] * 7


def test_retry_cancel_delete_resolve(api: Api) -> None:
    id = add(api)["id"]
    assert api("DELETE", f"{V1}/jobs/{id}").status == 409
    assert api("POST", f"{V1}/jobs/{id}/retry").status == 409
    fail(api, id)
    assert api("POST", f"{V1}/jobs/{id}/cancel").status == 409
    assert api("POST", f"{V1}/jobs/{id}/resolve", {"outcome": "retry"}).status == 409
    assert api("POST", f"{V1}/jobs/{id}/retry", {"reason": "fixed"}).json["status"] == "pending"
    assert api("GET", "/failedJobs").json == []
    assert api("POST", f"{V1}/jobs/{id}/cancel", {"reason": "why", "x": 1}).status == 422
    assert api("POST", f"{V1}/jobs/{id}/cancel").json["status"] == "cancelled"
    deleted = api("DELETE", f"{V1}/jobs/{id}")
    assert (deleted.status, deleted.text) == (204, "")
    assert api("GET", f"{V1}/jobs/{id}").status == 404
    doubt = add(api)["id"]
    fail(api, doubt, reason="in_doubt")
    assert api("POST", f"{V1}/jobs/{doubt}/resolve", {"outcome": "maybe"}).status == 422
    done = api("POST", f"{V1}/jobs/{doubt}/resolve", {"outcome": "completed", "result": {"sent": True}})
    assert (done.status, done.json["status"]) == (202, "completed")
    assert api("GET", f"{V1}/jobs/{doubt}").json["result"] == {"sent": True}
    for verb in ("retry", "cancel"):
        assert api("POST", f"{V1}/jobs/99999/{verb}").status == 404


def test_attempts_and_why(api: Api) -> None:
    id = add(api)["id"]
    [reason] = [one for one in api("GET", f"{V1}/jobs/{id}/why").json["data"] if one["blocking"]]
    assert reason["reason"] == "no_worker"
    api.query(
        "INSERT INTO pgqueue.attempts (job_id, attempt, outcome, reason, error) VALUES (%s, 1, 'retry', 'error', 'x')",
        id,
    )
    [attempt] = api("GET", f"{V1}/jobs/{id}/attempts").json["data"]
    assert (attempt["attempt"], attempt["error"]) == (1, "x")
    for what in ("why", "attempts", "wait"):
        assert api("GET", f"{V1}/jobs/99999/{what}").status == 404


def test_bulk(api: Api) -> None:
    ids = [add(api, queue="mail")["id"] for _ in range(5)]
    other = add(api, queue="other")["id"]
    fail(api, *ids[:3])
    fail(api, ids[3], error="refused")

    def act(**body: Any) -> Any:
        return api("POST", f"{V1}/jobs/actions", body)

    dry = act(action="retry", filter={"queue": "mail"}, dry_run=True).json
    assert (dry["matched"], dry["done"], dry["more"]) == (4, 0, False)
    bounded = act(action="retry", filter={"status": ["failed"]}, max=1).json
    assert (bounded["matched"], bounded["done"], bounded["more"]) == (1, 1, True)
    groups = api("GET", f"{V1}/failures").json["data"]
    assert [(one["message"], one["jobs"]) for one in groups] == [("boom N", 2), ("refused", 1)]
    by_group = act(action="retry", filter={"group": groups[0]["id"]}, reason="fixed").json
    assert by_group["done"] == 2
    mixed = act(action="retry", ids=[ids[3], other, 99999]).json
    assert mixed["done"] == 1
    assert {one["id"]: one["problem"] for one in mixed["results"] if one["problem"]}.keys() == {other, 99999}
    assert act(action="cancel", filter={}).status == 422
    assert act(action="cancel", filter={}, all=True).json["done"] == 6
    assert act(action="delete", ids=[*ids, other]).json["done"] == 6
    assert api.count() == 0
    for bad in (
        {"action": "explode", "ids": [1]},
        {"action": "retry"},
        {"action": "retry", "ids": [1], "filter": {"queue": "x"}},
        {"action": "retry", "ids": []},
        {"action": "retry", "ids": list(range(1, 1002))},
        {"action": "retry", "ids": [2**63]},
        {"action": "retry", "filter": {"owner": "me"}},
        {"action": "retry", "filter": {"queue": "mail"}, "max": 1001},
    ):
        assert act(**bad).status == 422, bad


def test_wait(api: Api, dsn: str) -> None:
    id = api("POST", f"{V1}/jobs", {"type": "add_numbers", "payload": {"x": 1, "y": 2}}).json["id"]
    begun = time.monotonic()
    assert api("GET", f"{V1}/jobs/{id}/wait?timeout=0.3").status == 202
    assert time.monotonic() - begun >= 0.3
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda: answers.append(api("GET", f"{V1}/jobs/{id}/wait?timeout=50")))
        for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    with worker_process(dsn):
        for thread in threads:
            thread.join()
    assert {answer.status for answer in answers} == {200}
    assert {str(answer.json["result"]) for answer in answers} == {"{'sum': 3}"}
    assert api("GET", f"{V1}/jobs/{id}/wait?timeout=61").status == 422


def test_queues_and_workers_and_types(api: Api, dsn: str) -> None:
    add(api, queue="mail/a")
    assert api("POST", f"{V1}/queues/mail/a/pause", {"reason": "smtp down"}).json == {"queue": "mail/a", "paused": True}
    [queue] = api("GET", f"{V1}/queues").json["data"]
    assert (queue["queue"], queue["paused"], queue["paused_by"], queue["pending"]) == ("mail/a", True, "api:admin", 1)
    assert queue["oldest_wait"] > 0
    assert api("POST", f"{V1}/queues/mail/a/resume").json["paused"] is False
    assert api("POST", f"{V1}/queues/a%20b/pause").status == 404
    with worker_process(dsn, PGQUEUE_HEARTBEAT_INTERVAL="0.2"):
        [worker] = api("GET", f"{V1}/workers").json["data"]
        assert (worker["threads"], worker["draining"]) == (8, False)
        types = {one["name"]: one for one in api("GET", f"{V1}/types").json["data"]}
        assert set(types["add_numbers"]["json_schema"]["required"]) == {"x", "y"}
        assert types["add_numbers"]["workers"] == 1
        assert api("POST", f"{V1}/workers/{worker['id']}/drain", {"reason": "deploy"}).status == 202
        until(lambda: api("GET", f"{V1}/workers?all=true").json["data"][0]["draining"])
        for id in (uuid4(), "x"):
            assert api("POST", f"{V1}/workers/{id}/drain").status == 404
    assert api("GET", f"{V1}/workers").json["data"] == []
    assert len(api("GET", f"{V1}/workers?all=true").json["data"]) == 1
    assert {"pause", "resume", "drain"} <= {one["action"] for one in api("GET", f"{V1}/audit").json["data"]}


def test_me(api: Api) -> None:
    me = api("GET", f"{V1}/me", token=api.make_token(subject="ana", queues=["a*"])).json
    assert (me["subject"], me["scopes"], me["queues"]) == ("ana", ["jobs:read", "jobs:write"], ["a*"])
    assert me["expires_at"]


def test_what_is_too_large_for_python_goes_through(api: Api) -> None:
    id = api.value(
        "INSERT INTO pgqueue.jobs (type, payload) VALUES ('t', '[1e5000, 1.000000000000000000001]') RETURNING id"
    )
    answer = api("GET", f"{V1}/jobs/{id}")
    assert answer.status == 200
    assert "1.000000000000000000001" in answer.text
    deep = api.value(
        "INSERT INTO pgqueue.jobs (type, payload) VALUES ('t', %s::jsonb) RETURNING id", "[" * 2000 + "]" * 2000
    )
    assert ("[" * 2000) in api("GET", f"{V1}/jobs/{deep}").text.replace(" ", "")
    assert api("GET", f"{V1}/jobs").status == 200
    with pytest.raises(ValueError, match="limit"):
        int(answer.text.partition('"payload": [')[2].partition(",")[0])
