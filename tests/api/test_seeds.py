"""The routes at the root, as their own clients use them."""

import json
import re
from typing import Any

import pytest

from tests.api.conftest import Api, until, worker_process


def fail_jobs(api: Api, count: int, age: int = 1000) -> list[int]:
    """Dead e-mails, the first the oldest; three of them at the same moment."""
    return [
        id
        for (id,) in api.query(
            """
            INSERT INTO pgqueue.jobs_failed (type, payload, status, finished_at, error, reason, attempt)
            SELECT 'send_welcome_email', jsonb_build_object('email', i || '@x.org', 'name', 'n' || i), 'failed',
                   now() - make_interval(secs => %s - i / 3), 'refused', 'error', 5
            FROM generate_series(1, %s) i RETURNING id
            """,
            age,
            count,
        )
    ]


def test_submit_job(api: Api) -> None:
    body = {"name": "cpu_intensive", "payload": "test task"}
    answer = api("POST", "/submit_job", body)
    assert answer.status == 201
    assert "Job created successfully" in answer.text
    assert api.query("SELECT id, name, payload, status::text FROM pgqueue.jobs") == [
        (answer.json["id"], "cpu_intensive", "test task", "pending")
    ]


@pytest.mark.parametrize(("retries", "attempts"), [(0, 1), (3, 4), (None, 5)])
def test_max_retries_is_honoured(api: Api, retries: int | None, attempts: int) -> None:
    more = {} if retries is None else {"max_retries": retries}
    for path, body in [
        ("/submit_job", {"name": "default", "payload": {"any": [1]}}),
        ("/jobs", {"type": "default"}),
        ("/addJob", {"email": "a@x.org", "name": "Ana"}),
    ]:
        id = api("POST", path, body | more).json["id"]
        assert api.value("SELECT max_attempts FROM pgqueue.jobs WHERE id = %s", id) == attempts


def test_jobs_from_post_to_result(serve: Any, dsn: str) -> None:
    """The README's curl of one of the others, without a token: dev mode."""
    body = {
        "name": "Sum large array",
        "type": "large_array_sum",
        "priority": 10,
        "thread_demand": 4,
        "payload": {"numbers": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]},
    }
    with serve(dev=True) as api:
        api.token = None
        answer = api("POST", "/jobs", body)
        assert answer.status == 202
        job = answer.json
        assert {name: job[name] for name in ("type", "name", "priority", "thread_demand", "status")} == {
            "type": "large_array_sum",
            "name": "Sum large array",
            "priority": 10,
            "thread_demand": 4,
            "status": "Pending",
        }
        assert job["created_at"]
        assert api("GET", f"/jobs/{job['id']}").json["status"] == "Pending"
        assert api("GET", f"/db/jobs/{job['id']}").status == 404, "it has not ended"
        with worker_process(dsn):
            others = [
                api("POST", "/submit_job", {"name": "reverse_string", "payload": {"text": "héllo"}}).json["id"],
                api("POST", "/jobs", {"type": "AddNumbers", "payload": {"X": 5, "Y": 7}}).json["id"],
            ]
            done = until(lambda: (found := api("GET", f"/jobs/{job['id']}").json)["status"] == "Completed" and found)
            for other in others:
                until(lambda other=other: api("GET", f"/jobs/{other}").json["status"] == "Completed")
        assert done["result"] == {"sum": 55}
        assert done["total_time"] == pytest.approx(done["queue_time"] + done["execution_time"], abs=0.01)
        assert [api("GET", f"/jobs/{id}").json["result"] for id in others] == [{"reversed": "olléh"}, {"sum": 12}]
        assert [one["id"] for one in api("GET", "/db/jobs").json] == [*reversed(others), job["id"]]
        assert api("GET", f"/db/jobs/{job['id']}").json == done
        assert api.value("SELECT result->>'sum' FROM pgqueue.jobs WHERE id = %s", job["id"]) == "55"


def test_add_job(api: Api) -> None:
    answer = api("POST", "/addJob", {"email": "ana@x.org", "name": "Ana"})
    assert answer.status == 200
    assert answer.json["message"] == "Job added to queue"
    assert api.query("SELECT id, type, payload FROM pgqueue.jobs") == [
        (answer.json["id"], "send_welcome_email", {"email": "ana@x.org", "name": "Ana"})
    ]
    assert api("POST", "/addJob", {"email": "ana@x.org", "name": "Ana"}, token="").status == 401
    assert api.count() == 1
    other = api("POST", "/addJob", {"type": "add_numbers", "payload": {"x": 1, "y": 2}, "idempotency_key": "k"})
    again = api("POST", "/addJob", {"type": "add_numbers", "payload": {"x": 1, "y": 2}, "idempotency_key": "k"})
    assert other.json == again.json


BAD = [
    ("/jobs", b"{", "not JSON"),
    ("/jobs", b"[]", "body"),
    ("/jobs", b"", "not JSON"),
    ("/jobs", {"type": "nope", "payload": {}}, "unsupported job type"),
    ("/jobs", {"type": "add_numbers", "payload": {"x": "notanumber", "y": 1}}, "x"),
    ("/jobs", {"type": "AddNumbers", "payload": {"x": 1}}, "y: is missing"),
    ("/jobs", {"payload": {"x": 1, "y": 1}}, "type"),
    ("/jobs", {"type": "add_numbers", "payload": {"x": 1, "y": 1}, "thread_demand": 0}, "thread_demand"),
    ("/jobs", {"type": "add_numbers", "payload": {"x": 1, "y": 1}, "priority": "high"}, "priority"),
    ("/jobs", {"type": "add_numbers", "payload": {"x": 1, "y": 1}, "priority": 1001}, "priority"),
    ("/jobs", {"type": "resize_image", "payload": {"url": "u", "width": 0, "height": 1}}, "width"),
    ("/jobs", {"type": "large_array_sum", "payload": {}}, "numbers"),
    ("/jobs", {"type": "reverse_string", "payload": {"text": 5}}, "text"),
    ("/jobs", {"type": "default", "payload": {"a": "\0"}}, "\\u0000"),
    ("/submit_job", b'{"name": "x", "payload": NaN}', "not JSON"),
    ("/submit_job", b'{"name": "x", "payload": 1e999}', "payload"),
    ("/submit_job", b'{"name": "x", "payload": "\\ud800"}', "not JSON"),
    ("/submit_job", {"payload": "x"}, "name"),
    ("/submit_job", {"name": 7, "payload": "x"}, "name"),
    ("/submit_job", {"name": "x", "max_retries": -1}, "max_retries"),
    ("/submit_job", {"name": "x", "queue": "no good"}, "queue"),
    ("/addJob", {}, "email"),
    ("/addJob", {"email": "a@x.org"}, "name"),
    ("/addJob", {"email": "", "name": "Ana"}, "email"),
    ("/addJob", {"email": ["a@x.org"], "name": "Ana"}, "email"),
    ("/addJob", {"email": "a@x.org\r\nBcc: b@x.org", "name": "Ana"}, "email"),
]


def test_bad_input_is_named_and_stores_nothing(api: Api) -> None:
    for path, body, named in BAD:
        sent = {"raw": body} if isinstance(body, bytes) else {"body": body}
        answer = api("POST", path, **sent)
        assert answer.status in (400, 422), (path, body, answer.text)
        assert answer.headers["content-type"] == "application/problem+json"
        assert named in answer.json["error"], (body, answer.json)
        assert {"type", "title", "status", "detail", "instance", "request_id"} <= set(answer.json)
    assert api.count() == 0


def test_zero_is_a_priority_and_both_names_are_one_type(api: Api) -> None:
    for name in ("AddNumbers", "add_numbers", "ADD_NUMBERS"):
        answer = api("POST", "/jobs", {"type": name, "priority": 0, "thread_demand": 1, "payload": {"x": 1, "y": 2}})
        assert answer.status == 202
        assert answer.json["type"] == "add_numbers"


def test_a_type_that_a_live_worker_knows_is_supported(api: Api) -> None:
    body = {"type": "report", "payload": {"day": 1}}
    assert api("POST", "/jobs", body).status == 400
    api.query(
        "INSERT INTO pgqueue.workers (id, name, host, pid, version, types, threads, expires_at)"
        " VALUES (gen_random_uuid(), 'w', 'h', 1, '0', '{report}', 1, now() + interval '1 min')"
    )
    assert api("POST", "/jobs", body).status == 202


def test_lists(api: Api) -> None:
    assert api("GET", "/jobs").json == api("GET", "/db/jobs").json == api("GET", "/failedJobs").json == []
    assert api("GET", "/jobs").text == "[]"
    ids = [api("POST", "/submit_job", {"name": "default", "payload": n}).json["id"] for n in range(5)]
    api.query("SELECT pgqueue.cancel_job(%s)", ids[0])
    api.query("INSERT INTO pgqueue.jobs (type, run_at, queue) VALUES ('later', now() + interval '1 h', 'mail')")
    [dead] = fail_jobs(api, 1)
    assert [one["id"] for one in api("GET", "/jobs").json][:1] == [dead]
    assert [one["status"] for one in api("GET", "/jobs").json] == ["Failed", *["Pending"] * 5, "Cancelled"]
    assert [one["id"] for one in api("GET", "/jobs?status=Failed").json] == [dead]
    assert [one["id"] for one in api("GET", "/jobs?status=cancelled,failed").json] == [dead, ids[0]]
    assert [one["type"] for one in api("GET", "/jobs?queue=mail").json] == ["later"]
    assert [one["id"] for one in api("GET", "/jobs?type=default&limit=2").json] == [ids[4], ids[3]]
    assert [one["id"] for one in api("GET", "/db/jobs").json] == [dead, ids[0]]
    assert api("GET", f"/db/jobs/{dead}").json["error"] == "refused"
    found, path = [], "/jobs?limit=3"
    while path:
        answer = api("GET", path)
        found += [one["id"] for one in answer.json]
        link = re.fullmatch(r'<(.+)>; rel="next"', answer.headers.get("link", ""))
        path = link[1] if link else ""
    assert found == [one["id"] for one in api("GET", "/jobs").json]
    for path in ("/jobs?status=odd", "/jobs?limit=0", "/jobs?limit=x", "/jobs?cursor=abc", "/jobs?limit=1&limit=2"):
        assert api("GET", path).status == 400, path


@pytest.mark.parametrize("id", ["999999", "x", "0", "-1", "1.0", "9" * 30, "%00", "1%20", "c0ffee-uuid"])
def test_an_unknown_id_is_404(api: Api, id: str) -> None:
    for path in ("/jobs", "/db/jobs", "/api/v1/jobs"):
        answer = api("GET", f"{path}/{id}")
        assert (answer.status, answer.json["error"]) == (404, "job not found")


def test_failed_jobs_by_page_and_by_cursor(api: Api) -> None:
    ids = fail_jobs(api, 25)
    pages = [api("GET", f"/failedJobs?page={page}&limit=10") for page in (1, 2, 3, 4)]
    assert [len(page.json) for page in pages] == [10, 10, 5, 0]
    assert {page.headers["x-total-count"] for page in pages} == {"25"}
    listed = [one["id"] for page in pages for one in page.json]
    assert listed == ids[::-1], "newest first, none twice"
    first = pages[0].json[0]
    assert {"email", "name", "error", "attempts", "retries", "failed_at", "id", "type"} <= set(first)
    assert (first["email"], first["error"], first["attempts"]) == ("25@x.org", "refused", 5)

    for start in ("/failedJobs?limit=10", "/failedJobs?page=1&limit=10"):
        follow_pages(api, start, ids)
    assert api("GET", "/failedJobs?page=1&cursor=x").status == 400
    assert api("GET", "/failedJobs", token="").status == 401


def follow_pages(api: Api, path: str, ids: list[int]) -> None:
    """From page to page by the Link, while other jobs die and more are added."""
    found, sizes = [], []
    while path:
        answer = api("GET", path)
        sizes.append(len(answer.json))
        found += [one["id"] for one in answer.json]
        link = re.search(r'<(.+)>; rel="next"', answer.headers.get("link", ""))
        path = link[1] if link else ""
        fail_jobs(api, 2, age=10)  # newer than the pages
        api("POST", "/submit_job", {"name": "default"})
    assert sizes == [10, 10, 5]
    assert found == ids[::-1]
    api.query("DELETE FROM pgqueue.jobs_failed WHERE id <> ALL (%s)", ids)


def test_failed_jobs_whose_payload_is_odd(api: Api) -> None:
    payloads = ['"text"', "[1, 2]", "null", '{"id": "mine", "error": "mine"}', "1e131000", "[" * 500 + "]" * 500]
    for payload in payloads:
        api.query(
            "INSERT INTO pgqueue.jobs_failed (type, payload, status, finished_at, error, attempt)"
            " VALUES ('t', %s::jsonb, 'failed', clock_timestamp(), 'ours', 1)",
            payload,
        )
    api.query(
        "INSERT INTO pgqueue.jobs_failed (type, payload, status, finished_at, error, attempt) SELECT 't',"
        " jsonb_build_object('p', string_agg(md5(i::text), '')), 'failed', clock_timestamp(), 'ours', 1"
        " FROM generate_series(1, 20000) i"
    )
    answer = api("GET", "/failedJobs")
    assert answer.status == 200
    large, _, _, clash, null, array, text = json.loads(answer.text, parse_int=str)
    assert large["omitted"] == ["payload"]
    assert clash["error"] == "ours"
    assert clash["id"] != "mine"
    assert (null["payload"], array["payload"], text["payload"]) == (None, ["1", "2"], "text")
    whole = api("GET", f"/jobs/{large['id']}").text
    assert len(whole) > 600_000


def test_api_and_psql_agree(api: Api) -> None:
    for n in range(4):
        api("POST", "/submit_job", {"name": "default", "payload": n})
    fail_jobs(api, 3)
    stats = api("GET", "/api/v1/stats").json["jobs"]
    by_status = dict(api.query("SELECT status::text, count(*) FROM pgqueue.jobs GROUP BY status"))
    assert {name: count["value"] for name, count in stats.items() if count["value"]} == by_status
    assert len(api("GET", "/failedJobs").json) == api.value("SELECT count(*) FROM pgqueue.failed_jobs") == 3
