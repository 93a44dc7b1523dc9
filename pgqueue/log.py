"""Logs: a constant event name plus fields, as JSON lines or as text for people."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

LEVELS = {"DEBUG": "\x1b[2m", "WARNING": "\x1b[33m", "ERROR": "\x1b[31m", "CRITICAL": "\x1b[31m"}


def say(logger: logging.Logger, level: int, event: str, text: str, **fields: Any) -> None:
    """One line: `text` is for people, `event` and the fields for machines."""
    if logger.isEnabledFor(level):
        logger.log(level, text, extra={"event": event, "fields": fields})


class JsonFormatter(logging.Formatter):
    def __init__(self, worker: str) -> None:
        super().__init__()
        self.worker = worker

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": getattr(record, "event", record.name),
            "worker": self.worker,
            **getattr(record, "fields", {}),
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class PrettyFormatter(logging.Formatter):
    def __init__(self, worker: str, colour: bool) -> None:
        super().__init__()
        self.worker = worker
        self.colour = colour

    def format(self, record: logging.LogRecord) -> str:
        text = f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {self.worker} | {record.getMessage()}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        if self.colour and record.levelname in LEVELS:
            text = f"{LEVELS[record.levelname]}{text}\x1b[0m"
        return text


def set_up(style: str, worker: str, level: str = "INFO") -> None:
    """`auto` is pretty in a terminal and JSON elsewhere."""
    terminal = sys.stderr.isatty()
    handler = logging.StreamHandler(sys.stderr)
    if style == "json" or (style == "auto" and not terminal):
        handler.setFormatter(JsonFormatter(worker))
    else:
        handler.setFormatter(PrettyFormatter(worker, colour=terminal))
    root = logging.getLogger("pgqueue")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
