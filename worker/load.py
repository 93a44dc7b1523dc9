"""Finds the apps that --app names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from pgqueue.app import PgQueue
from pgqueue.errors import PgQueueError


class AppNotFound(PgQueueError):
    """--app names nothing that can be run."""


def load_apps(names: Sequence[str]) -> PgQueue:
    """One app with the handlers of all: `mymodule` (its only PgQueue, or the one called app) or `mymodule:name`."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    apps = [_load(name) for name in names]
    if len(apps) == 1:
        return apps[0]
    merged = PgQueue()
    for app in apps:
        merged.include(app)
    return merged


def _load(name: str) -> PgQueue:
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name.partition(".")[0] and error.name != module_name:
            raise
        raise AppNotFound(f"--app {name}: there is no module {module_name} here; is this the right folder?") from error
    if attribute:
        app = getattr(module, attribute, None)
        if not isinstance(app, PgQueue):
            raise AppNotFound(f"--app {name}: {module_name} has no PgQueue named {attribute}")
        return app
    found = {key: value for key, value in vars(module).items() if isinstance(value, PgQueue)}
    if isinstance(found.get("app"), PgQueue):
        return found["app"]
    if len(set(map(id, found.values()))) != 1:
        what = "no PgQueue" if not found else f"several ({', '.join(found)}): say which with --app {module_name}:NAME"
        raise AppNotFound(f"--app {name}: {module_name} has {what}")
    return next(iter(found.values()))
