"""The queue: values, SQL, operations on a connection, the Python API, settings and the command line.

The public names are loaded when they are used, so that `import pgqueue` costs nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pgqueue.app import BoundJob, JobRef, JobType, PgQueue
    from pgqueue.context import Context
    from pgqueue.errors import (
        DatabaseUnavailable,
        InvalidJob,
        InvalidSettings,
        JobDidNotSucceed,
        JobFailed,
        JobNotFound,
        JobWasCancelled,
        KeyReused,
        LeaseLost,
        PgQueueError,
        SchemaMismatch,
        ServerUnavailable,
        WrongStatus,
    )
    from pgqueue.job import Job, Status
    from pgqueue.outcome import GiveUp, InDoubt, JobAbandoned, JobCancelled, JobTimeout, Retry, RetryLater, Snooze
    from pgqueue.settings import Settings

__all__ = [
    "BoundJob",
    "Context",
    "DatabaseUnavailable",
    "GiveUp",
    "InDoubt",
    "InvalidJob",
    "InvalidSettings",
    "Job",
    "JobAbandoned",
    "JobCancelled",
    "JobDidNotSucceed",
    "JobFailed",
    "JobNotFound",
    "JobRef",
    "JobTimeout",
    "JobType",
    "JobWasCancelled",
    "KeyReused",
    "LeaseLost",
    "PgQueue",
    "PgQueueError",
    "Retry",
    "RetryLater",
    "SchemaMismatch",
    "ServerUnavailable",
    "Settings",
    "Snooze",
    "Status",
    "WrongStatus",
]

_MODULES = {
    "app": ("BoundJob", "JobRef", "JobType", "PgQueue"),
    "context": ("Context",),
    "job": ("Job", "Status"),
    "outcome": ("GiveUp", "InDoubt", "JobAbandoned", "JobCancelled", "JobTimeout", "Retry", "RetryLater", "Snooze"),
    "settings": ("Settings",),
}
_HOMES = dict.fromkeys(__all__, "errors") | {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pgqueue' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"pgqueue.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
