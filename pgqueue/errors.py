"""What can go wrong, by name.

PgQueueError
├── InvalidJob            a job that the rules refuse; nothing was stored
│   └── KeyReused         an idempotency key that belongs to a job with another payload
├── JobNotFound           no job has this id
├── WrongStatus           the job is not in a status that allows this
├── JobDidNotSucceed      a result was awaited, and there is none
│   ├── JobFailed         the job is in the dead letter queue
│   └── JobWasCancelled
├── LeaseLost             the job is no longer this worker's; its result is dropped
├── DatabaseUnavailable   no answer from PostgreSQL; try again
├── SchemaMismatch        the database's schema is not the one that this code knows
├── InvalidSettings       one or more settings are wrong; each is named
└── ServerUnavailable     no PostgreSQL or Valkey could be started here
"""


class PgQueueError(Exception):
    """The base of every error that pgqueue raises on purpose."""


class InvalidJob(PgQueueError):
    """The rules refuse this job; nothing was stored."""


class KeyReused(InvalidJob):
    """The idempotency key belongs to a job with another type or payload."""


class JobNotFound(PgQueueError):
    """No job has this id."""


class WrongStatus(PgQueueError):
    """The job is not in a status that allows this."""


class JobDidNotSucceed(PgQueueError):
    """The job whose result was awaited has none."""

    _what = "did not succeed"

    def __init__(self, job_id: int, reason: str | None, error: str | None) -> None:
        super().__init__(job_id, reason, error)
        self.job_id = job_id
        self.reason = reason
        """In one word, as in the job's row: error, timeout, gave_up …"""
        self.error = error

    def __str__(self) -> str:
        reason = f" ({self.reason})" if self.reason else ""
        return f"job {self.job_id} {self._what}{reason}{f': {self.error}' if self.error else ''}"


class JobFailed(JobDidNotSucceed):
    """The job is in the dead letter queue."""

    _what = "failed"


class JobWasCancelled(JobDidNotSucceed):
    """Somebody cancelled the job."""

    _what = "was cancelled"


class LeaseLost(PgQueueError):
    """The job is no longer this worker's: its result is dropped."""


class DatabaseUnavailable(PgQueueError):
    """PostgreSQL does not answer."""


class SchemaMismatch(PgQueueError):
    """The database's schema is not the one that this code knows."""


class InvalidSettings(PgQueueError):
    """One or more settings are wrong."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class ServerUnavailable(PgQueueError):
    """No PostgreSQL or Valkey could be started here."""
