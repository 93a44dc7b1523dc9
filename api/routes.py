"""The table of routes. Everything else comes from it: the app's routing, the checks, the OpenAPI document."""

from __future__ import annotations

import json
from functools import cache

from starlette.responses import Response
from starlette.routing import Route

from pgqueue.api import accounts, docs, health, jobs, metrics, operate, seeds, stream
from pgqueue.api import schemas as s
from pgqueue.api.app import State
from pgqueue.api.calls import Call
from pgqueue.api.endpoint import ANY, OPEN, Dispatcher, Endpoint

READ, WRITE, MANAGE, ADMIN = "jobs:read", "jobs:write", "jobs:manage", "admin"
V1 = "/api/v1"


async def openapi(call: Call) -> Response:
    return Response(_texts()[0], media_type="application/json")


async def docs_page(call: Call) -> Response:
    return Response(_texts()[1], media_type="text/html", headers={"content-security-policy": docs.PAGE_POLICY})


@cache
def _texts() -> tuple[str, str]:
    found = docs.document(TABLE)
    return json.dumps(found), docs.page(found)


TABLE: list[Endpoint] = [
    # As other schedulers have them
    Endpoint(method="POST", path="/addJob", scope=WRITE, handler=seeds.add_job, body=s.AddJob, answer=s.Message,
             seed=True, keyed=True, summary="Add a welcome e-mail, or any job."),
    Endpoint(method="GET", path="/failedJobs", scope=READ, handler=seeds.failed_jobs, query=s.FailedQuery,
             answer=list[s.FailedJob], seed=True, response_headers=("X-Total-Count", "Link"),
             summary="The dead letter queue, newest first."),
    Endpoint(method="POST", path="/submit_job", scope=WRITE, handler=seeds.submit_job, body=s.SubmitJob,
             answer=s.Message, status=201, seed=True, dev=True, keyed=True,
             summary="Add a job by the name of its type."),
    Endpoint(method="POST", path="/jobs", scope=WRITE, handler=seeds.create_job, body=s.CreateJob, answer=s.SeedJob,
             status=202, seed=True, dev=True, keyed=True, summary="Add a job of a type that is known."),
    Endpoint(method="GET", path="/jobs", scope=READ, handler=seeds.list_jobs, query=s.ListQuery, answer=list[s.SeedJob],
             seed=True, dev=True, response_headers=("Link",), summary="Jobs, newest first."),
    Endpoint(method="GET", path="/jobs/{id}", scope=READ, handler=seeds.get_job, answer=s.SeedJob, seed=True, dev=True,
             summary="One job, with its result and timings."),
    Endpoint(method="GET", path="/db/jobs", scope=READ, handler=seeds.list_finished, query=s.ListQuery,
             answer=list[s.SeedJob], seed=True, dev=True, response_headers=("Link",),
             summary="Jobs that have ended, newest first."),
    Endpoint(method="GET", path="/db/jobs/{id}", scope=READ, handler=seeds.get_finished, answer=s.SeedJob, seed=True,
             dev=True, summary="One job that has ended."),
    # Accounts
    Endpoint(method="POST", path="/signup", scope=OPEN, handler=accounts.signup, body=s.Credentials, answer=s.Tokens,
             status=201, seed=True, errors=(403, 409), summary="Make an account, where sign-up is switched on."),
    Endpoint(method="POST", path="/login", scope=OPEN, handler=accounts.login, body=s.LoginBody, answer=s.Tokens,
             seed=True, errors=(401, 403), summary="Begin a session."),
    Endpoint(method="POST", path="/refreshToken", scope=OPEN, handler=accounts.refresh, body=s.RefreshBody,
             answer=s.Tokens, seed=True, errors=(401, 403), summary="Go on with a session; the token is used up."),
    # Health and documents
    Endpoint(method="GET", path="/health", scope=OPEN, handler=health.health, answer=s.Health,
             summary="Whether this process lives."),
    Endpoint(method="GET", path="/readyz", scope=OPEN, handler=health.ready, answer=s.Health,
             summary="Whether it can serve."),
    Endpoint(method="GET", path="/metrics", scope=OPEN, handler=metrics.metrics, media="text/plain",
             summary="Figures for Prometheus, as text or OpenMetrics."),
    Endpoint(method="GET", path="/openapi.json", scope=OPEN, handler=openapi, answer=s.Empty, summary="This document."),
    Endpoint(method="GET", path="/docs", scope=OPEN, handler=docs_page, media="text/html",
             summary="This document, for people."),
    # Jobs
    Endpoint(method="POST", path=f"{V1}/jobs", scope=WRITE, handler=jobs.create, body=s.NewJobBody, answer=s.Created,
             status=201, also={200: s.Created}, errors=(409,), keyed=True, response_headers=("Location",),
             summary="Add a job."),
    Endpoint(method="POST", path=f"{V1}/jobs/batch", scope=WRITE, handler=jobs.create_batch, body=s.BatchBody,
             answer=s.BatchAnswer, status=201, keyed=True, summary="Add up to 1000 jobs, all or none."),
    Endpoint(method="POST", path=f"{V1}/jobs/actions", scope=MANAGE, handler=jobs.bulk, body=s.BulkBody,
             answer=s.BulkAnswer, patience=60.0, summary="Retry, cancel or delete many, by ids or by filter."),
    Endpoint(method="GET", path=f"{V1}/jobs", scope=READ, handler=jobs.list_page, query=s.PageQuery, answer=s.JobPage,
             summary="Jobs, newest first, a page at a time."),
    Endpoint(method="GET", path=f"{V1}/jobs/{{id}}", scope=READ, handler=jobs.get, answer=s.JobBody,
             response_headers=("ETag",), summary="One job."),
    Endpoint(method="PATCH", path=f"{V1}/jobs/{{id}}", scope=MANAGE, handler=jobs.edit, body=s.EditBody,
             answer=s.JobBody, errors=(409, 412), response_headers=("ETag",),
             summary="Change a waiting or failed job; If-Match is honoured."),
    Endpoint(method="DELETE", path=f"{V1}/jobs/{{id}}", scope=MANAGE, handler=jobs.delete, status=204, errors=(409,),
             summary="Delete a job that has ended."),
    Endpoint(method="GET", path=f"{V1}/jobs/{{id}}/wait", scope=READ, handler=jobs.wait, query=s.WaitQuery,
             answer=s.JobBody, also={202: s.JobBody}, patience=75.0, summary="Wait until it has ended."),
    Endpoint(method="GET", path=f"{V1}/jobs/{{id}}/attempts", scope=READ, handler=jobs.attempts, answer=s.AttemptList,
             summary="Its attempts that did not succeed."),
    Endpoint(method="GET", path=f"{V1}/jobs/{{id}}/why", scope=READ, handler=jobs.why, answer=s.WhyList,
             summary="Why it is not running."),
    Endpoint(method="POST", path=f"{V1}/jobs/{{id}}/retry", scope=MANAGE, handler=jobs.retry, body=s.ReasonBody,
             optional_body=True, answer=s.StatusAnswer, status=202, errors=(409,), summary="Run it again."),
    Endpoint(method="POST", path=f"{V1}/jobs/{{id}}/cancel", scope=MANAGE, handler=jobs.cancel, body=s.ReasonBody,
             optional_body=True, answer=s.StatusAnswer, status=202, errors=(409,), summary="Cancel it."),
    Endpoint(method="POST", path=f"{V1}/jobs/{{id}}/resolve", scope=MANAGE, handler=jobs.resolve, body=s.ResolveBody,
             answer=s.StatusAnswer, status=202, errors=(409,), summary="End the doubt about its effect."),
    # The rest
    Endpoint(method="GET", path=f"{V1}/failures", scope=READ, handler=operate.failures, query=s.LimitQuery,
             answer=s.FailureList, summary="The dead letter queue by what went wrong."),
    Endpoint(method="GET", path=f"{V1}/queues", scope=READ, handler=operate.queues, answer=s.QueueList,
             summary="Queues and what is in them."),
    Endpoint(method="POST", path=f"{V1}/queues/{{queue:path}}/pause", scope=MANAGE, handler=operate.pause,
             body=s.ReasonBody, optional_body=True, answer=s.Paused, summary="Pause a queue."),
    Endpoint(method="POST", path=f"{V1}/queues/{{queue:path}}/resume", scope=MANAGE, handler=operate.resume,
             body=s.ReasonBody, optional_body=True, answer=s.Paused, summary="Resume a queue."),
    Endpoint(method="GET", path=f"{V1}/workers", scope=READ, handler=operate.workers, query=s.WorkersQuery,
             answer=s.WorkerList, confined=False, summary="Workers."),
    Endpoint(method="POST", path=f"{V1}/workers/{{id}}/drain", scope=MANAGE, handler=operate.drain, body=s.ReasonBody,
             optional_body=True, answer=s.Draining, status=202, confined=False, summary="Let a worker end."),
    Endpoint(method="GET", path=f"{V1}/types", scope=READ, handler=operate.types, answer=s.TypeList,
             summary="The types of jobs, with their JSON Schema."),
    Endpoint(method="GET", path=f"{V1}/stats", scope=READ, handler=operate.stats, answer=s.StatsAnswer, confined=False,
             summary="Counts of jobs and workers."),
    Endpoint(method="GET", path=f"{V1}/stats/series", scope=READ, handler=operate.series, query=s.SeriesQuery,
             answer=s.SeriesAnswer, summary="What happened when, and how long jobs waited and ran."),
    Endpoint(method="GET", path=f"{V1}/stream", scope=READ, handler=stream.stream, media="text/event-stream",
             summary="How things stand, as events; Last-Event-ID is honoured."),
    Endpoint(method="GET", path=f"{V1}/audit", scope=MANAGE, handler=operate.audit, query=s.AuditQuery,
             answer=s.AuditPage, confined=False, summary="What operators did."),
    Endpoint(method="GET", path=f"{V1}/me", scope=ANY, handler=operate.me, answer=s.Me, summary="Who the token says."),
    Endpoint(method="POST", path=f"{V1}/me/password", scope=ANY, handler=accounts.change_password, body=s.PasswordBody,
             status=204, summary="Change the password; all sessions of the user end."),
    Endpoint(method="GET", path=f"{V1}/tokens", scope=ADMIN, handler=operate.list_tokens, query=s.LimitQuery,
             answer=s.TokenList, confined=False, summary="Tokens that were made here and have not expired."),
    Endpoint(method="POST", path=f"{V1}/tokens", scope=ADMIN, handler=operate.add_token, body=s.TokenBody,
             answer=s.TokenAnswer, status=201, confined=False, summary="Make a token."),
    Endpoint(method="POST", path=f"{V1}/tokens/revoke", scope=ADMIN, handler=operate.revoke_token, body=s.RevokeBody,
             status=204, confined=False, summary="Revoke a token by its jti."),
]  # fmt: skip


def routes(state: State, table: list[Endpoint]) -> list[Route]:
    by_path: dict[str, dict[str, Endpoint]] = {}
    for endpoint in table:
        endpoint.check()
        methods = by_path.setdefault(endpoint.path, {})
        if endpoint.method in methods:
            raise RuntimeError(f"{endpoint.method} {endpoint.path} is there twice")
        methods[endpoint.method] = endpoint
    return [Route(path, Dispatcher(state, methods)) for path, methods in by_path.items()]
