"""The models of requests and answers. Requests are checked by them; answers are described by them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from pgqueue.job import Status

LARGEST_ID = 2**63 - 1

Name = Annotated[StrictStr, Field(min_length=1, max_length=128)]
Queue = Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,62}$")]
Priority = Annotated[StrictInt, Field(ge=-1000, le=1000, description="Higher runs first.")]
Threads = Annotated[StrictInt, Field(ge=1, le=1024)]
Attempts = Annotated[StrictInt, Field(ge=1, le=1000)]
Seconds = Annotated[float, Field(strict=True, ge=0.001, le=31_622_400, allow_inf_nan=False)]
Delay = Annotated[float, Field(strict=True, ge=0, le=3_000_000_000, allow_inf_nan=False)]
Tags = Annotated[list[Annotated[StrictStr, Field(max_length=200)]], Field(max_length=32)]
JobKey = Annotated[StrictStr, Field(min_length=1, max_length=255)]
Label = Annotated[StrictStr, Field(max_length=200)]
Id = Annotated[StrictInt, Field(ge=1, le=LARGEST_ID)]
Reason = Annotated[StrictStr, Field(max_length=1000)]
Cursor = Annotated[str, Field(max_length=500, description="From the page before.")]


def _time(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("must be a time such as 2030-01-31T12:00:00Z")
    return value


Time = Annotated[AwareDatetime, BeforeValidator(_time, json_schema_input_type=str)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Loose(BaseModel):
    model_config = ConfigDict(extra="ignore")


# Requests


class SubmitJob(Loose):
    """The body of POST /submit_job."""

    name: Annotated[StrictStr, Field(max_length=128, description="The type.")]
    payload: Any = None
    max_retries: Annotated[StrictInt, Field(ge=0, le=999)] | None = None
    priority: Priority = 0
    queue: Queue = "default"


class CreateJob(Loose):
    """The body of POST /jobs."""

    type: Name
    payload: Any = Field(default_factory=dict)
    name: Label | None = None
    priority: Priority = 0
    thread_demand: Threads = 1
    queue: Queue = "default"
    max_retries: Annotated[StrictInt, Field(ge=0, le=999)] | None = None


class AddJob(Loose):
    """The body of POST /addJob: `email` and `name` for a welcome e-mail, or any `type` with its `payload`."""

    email: StrictStr | None = None
    name: StrictStr | None = None
    type: Name | None = None
    payload: Any = Field(default_factory=dict)
    priority: Priority = 0
    thread_demand: Threads = 1
    queue: Queue = "default"
    max_retries: Annotated[StrictInt, Field(ge=0, le=999)] | None = None
    idempotency_key: JobKey | None = None


class Credentials(Strict):
    username: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}$")]
    password: Annotated[StrictStr, Field(min_length=8, max_length=1024)]


class LoginBody(Strict):
    username: Annotated[StrictStr, Field(max_length=128)]
    password: Annotated[StrictStr, Field(max_length=1024)]


class RefreshBody(Strict):
    refresh_token: Annotated[StrictStr, Field(max_length=200)]


class PasswordBody(Strict):
    password: Annotated[StrictStr, Field(max_length=1024, description="The present one.")]
    new_password: Annotated[StrictStr, Field(min_length=8, max_length=1024)]


class NewJobBody(Strict):
    type: Name
    payload: Any = Field(default_factory=dict)
    queue: Queue = "default"
    priority: Priority = 0
    run_at: Time | None = None
    delay: Delay | None = None
    thread_demand: Threads = 1
    max_attempts: Attempts = 5
    timeout: Seconds | None = None
    idempotency_key: JobKey | None = None
    tags: Tags = []
    name: Label | None = None


class BatchBody(Strict):
    jobs: Annotated[list[NewJobBody], Field(min_length=1, max_length=1000)]


class EditBody(Strict):
    payload: Any = None
    queue: Queue | None = None
    priority: Priority | None = None
    run_at: Time | None = None
    thread_demand: Threads | None = None
    timeout: Seconds | None = None
    max_attempts: Attempts | None = None
    tags: Tags | None = None
    name: Label | None = None
    reason: Reason | None = Field(None, description="For the audit; not a change.")


class ReasonBody(Strict):
    reason: Reason | None = None


class ResolveBody(Strict):
    outcome: Literal["completed", "retry"]
    result: Any = None
    reason: Reason | None = None


class Filter(Strict):
    status: list[Status] | None = None
    queue: Queue | None = None
    type: Name | None = None
    tag: Label | None = None
    group: Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{32}$")] | None = Field(None, description="From /failures.")


class BulkBody(Strict):
    action: Literal["retry", "cancel", "delete"]
    ids: Annotated[list[Id], Field(min_length=1, max_length=1000)] | None = None
    filter: Filter | None = None
    all: StrictBool = Field(False, description="Needed for a filter that says nothing.")
    dry_run: StrictBool = False
    max: Annotated[StrictInt, Field(ge=1, le=1000)] = 1000
    reason: Reason | None = None


class TokenBody(Strict):
    subject: Annotated[StrictStr, Field(min_length=1, max_length=255, pattern=r"^[\x21-\x7e]+$")]
    scopes: Annotated[
        list[Literal["jobs:read", "jobs:write", "jobs:manage", "admin"]], Field(min_length=1, max_length=4)
    ]
    ttl: Annotated[float, Field(strict=True, ge=1, le=31_622_400)] = 3600.0
    queues: (
        Annotated[list[Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9_.:/*-]{1,64}$")]], Field(max_length=100)] | None
    ) = None


class RevokeBody(Strict):
    jti: Annotated[StrictStr, Field(min_length=1, max_length=255)]
    reason: Reason | None = None


# Queries


class NoQuery(BaseModel):
    pass


class ListQuery(BaseModel):
    status: str | None = Field(None, max_length=100, description="One or more, separated by commas.")
    type: str | None = Field(None, max_length=128)
    queue: str | None = Field(None, max_length=64)
    limit: Annotated[int, Field(ge=1, le=1000)] = 100
    cursor: Cursor | None = None


class PageQuery(BaseModel):
    status: str | None = Field(None, max_length=100, description="One or more, separated by commas.")
    type: str | None = Field(None, max_length=128)
    queue: str | None = Field(None, max_length=64)
    tag: str | None = Field(None, max_length=200)
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: Cursor | None = None


class FailedQuery(BaseModel):
    page: Annotated[int, Field(ge=1, le=100_000)] | None = None
    limit: Annotated[int, Field(ge=1, le=1000)] = 50
    cursor: Cursor | None = None


class WaitQuery(BaseModel):
    timeout: Annotated[float, Field(ge=0, le=60, allow_inf_nan=False)] = 30.0


class WorkersQuery(BaseModel):
    all: bool = Field(False, description="Those that have ended, too.")


class AuditQuery(BaseModel):
    job_id: Annotated[int, Field(ge=1, le=LARGEST_ID)] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: Cursor | None = None


class SeriesQuery(BaseModel):
    range: Annotated[int, Field(ge=60, le=90 * 86400, description="Seconds until now.")] = 3600
    step: Annotated[int, Field(ge=60, le=86400, multiple_of=60, description="Seconds; chosen if not given.")] | None = (
        None
    )
    queue: Annotated[str, Field(max_length=63)] | None = None


class LimitQuery(BaseModel):
    limit: Annotated[int, Field(ge=1, le=200)] = 100


# Answers

SeedStatus = Literal["Pending", "Running", "Completed", "Failed", "Cancelled"]


class Message(BaseModel):
    message: str
    id: int


class SeedJob(BaseModel):
    id: int
    type: str
    name: str | None
    queue: str
    priority: int
    thread_demand: int
    status: SeedStatus
    created_at: datetime
    started_at: datetime | None = None
    completed_at: datetime | None = None
    payload: Any = None
    result: Any = None
    error: str | None = None
    attempts: int = 0
    worker_id: UUID | None = None
    threads_used: int | None = None
    queue_time: float | None = Field(None, description="Seconds.")
    execution_time: float | None = None
    total_time: float | None = None


class FailedJob(BaseModel):
    """The members of the payload stand beside these."""

    model_config = ConfigDict(extra="allow")
    id: int
    type: str
    error: str | None
    attempts: int
    retries: int
    failed_at: datetime | None


class Tokens(BaseModel):
    access_token: str
    refresh_token: str


class Health(BaseModel):
    status: str


class JobBody(BaseModel):
    id: int
    type: str
    queue: str
    name: str | None
    status: Status
    priority: int
    thread_demand: int
    attempt: int
    max_attempts: int
    lost: int
    timeout: float | None
    tags: list[str]
    idempotency_key: str | None
    run_at: datetime
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    worker_id: UUID | None
    threads_used: int | None
    cancel_requested: bool
    reason: str | None
    error_type: str | None
    error: str | None
    omitted: list[str] = Field(description="Members that are too large for a list; GET the job for them.")
    payload: Any
    result: Any
    progress: Any


class Created(JobBody):
    inserted: bool = Field(description="False: the idempotency_key was known, and this is the first job.")


class JobPage(BaseModel):
    data: list[JobBody]
    next_cursor: str | None


class AddedBody(BaseModel):
    id: int
    inserted: bool


class BatchAnswer(BaseModel):
    jobs: list[AddedBody]


class AttemptBody(BaseModel):
    id: int
    attempt: int
    outcome: str
    reason: str
    error_type: str | None
    error: str | None
    traceback: str | None
    worker_id: UUID | None
    started_at: datetime | None
    finished_at: datetime


class AttemptList(BaseModel):
    data: list[AttemptBody]


class WhyBody(BaseModel):
    blocking: bool
    reason: str
    detail: str


class WhyList(BaseModel):
    data: list[WhyBody]


class StatusAnswer(BaseModel):
    id: int
    status: Status
    cancel_requested: bool = False


class ActedBody(BaseModel):
    id: int
    status: str | None
    problem: str | None


class BulkAnswer(BaseModel):
    action: str
    dry_run: bool
    matched: int
    more: bool = Field(description="There are more than `max`: ask again.")
    done: int
    results: list[ActedBody]


class FailureBody(BaseModel):
    id: str
    type: str
    reason: str | None
    error_type: str | None
    message: str | None
    jobs: int
    first_failed_at: datetime
    last_failed_at: datetime
    latest_job_id: int


class FailureList(BaseModel):
    data: list[FailureBody]


class QueueBody(BaseModel):
    queue: str
    paused: bool
    paused_by: str | None
    paused_because: str | None
    pending: int
    scheduled: int
    running: int
    failed: int
    oldest_wait: float | None


class QueueList(BaseModel):
    data: list[QueueBody]


class Paused(BaseModel):
    queue: str
    paused: bool


class WorkerBody(BaseModel):
    id: UUID
    name: str
    host: str
    pid: int
    version: str
    state: str
    draining: bool
    queues: list[str] | None
    types: list[str] | None
    threads: int
    threads_used: int
    completed: int
    failed: int
    started_at: datetime
    heartbeat_at: datetime
    expires_at: datetime
    stopped_at: datetime | None


class WorkerList(BaseModel):
    data: list[WorkerBody]


class Draining(BaseModel):
    id: UUID
    draining: bool


class TypeBody(BaseModel):
    name: str
    queue: str | None
    workers: int = Field(description="Live workers that know it.")
    json_schema: dict[str, Any] | None


class TypeList(BaseModel):
    data: list[TypeBody]


class CountBody(BaseModel):
    value: int
    exact: bool


class Percentiles(BaseModel):
    """In seconds; null where nothing happened."""

    p50: float | None
    p95: float | None
    p99: float | None


class TotalsBody(BaseModel):
    enqueued: int
    completed: int
    failed: int
    cancelled: int
    retried: int
    lost: int
    waited: Percentiles
    took: Percentiles


class StatsAnswer(BaseModel):
    jobs: dict[str, CountBody]
    workers: dict[str, int]
    threads: int
    threads_used: int
    totals: TotalsBody = Field(description="Since the beginning.")
    queues: dict[str, TotalsBody] = Field(description="The same by queue.")


class PointBody(BaseModel):
    at: datetime
    enqueued: int
    completed: int
    failed: int
    cancelled: int
    retried: int
    waited: Percentiles
    took: Percentiles


class SeriesAnswer(BaseModel):
    step: int
    queue: str | None
    data: list[PointBody]


class AuditBody(BaseModel):
    id: int
    at: datetime
    actor: str
    db_user: str
    action: str
    job_id: int | None
    queue: str | None
    reason: str | None
    detail: Any


class AuditPage(BaseModel):
    data: list[AuditBody]
    next_cursor: str | None


class Me(BaseModel):
    subject: str
    scopes: list[str]
    queues: list[str] | None
    jti: str | None
    expires_at: datetime | None


class TokenAnswer(BaseModel):
    token: str
    jti: str
    expires_at: datetime


class TokenRow(BaseModel):
    jti: str
    subject: str
    scope: str
    actor: str
    created_at: datetime
    expires_at: datetime
    revoked: bool


class TokenList(BaseModel):
    data: list[TokenRow]


class Empty(BaseModel):
    pass
