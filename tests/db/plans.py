"""What statements really did: their plans, those inside functions as well, and the rows and pages that they touched."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg

from pgqueue.db import Connection

SETTINGS = {
    "log_min_duration": "0",
    "log_analyze": "on",
    "log_buffers": "on",
    "log_timing": "off",
    "log_nested_statements": "on",
    "log_format": "json",
    "log_level": "notice",
}
SCANS = ("Seq Scan", "Index Scan", "Index Only Scan", "Bitmap Heap Scan", "Tid Scan", "Tid Range Scan")


@dataclass
class Seen:
    """The plans of the statements that ran, the inner ones before those that called them."""

    plans: list[dict[str, Any]] = field(default_factory=list)

    def note(self, message: psycopg.errors.Diagnostic) -> None:
        head, _, plan = (message.message_primary or "").partition("plan:\n")
        if head.startswith("duration:"):
            self.plans.append(json.loads(plan))

    def nodes(self) -> Iterator[dict[str, Any]]:
        below = [plan["Plan"] for plan in self.plans]
        while below:
            node = below.pop()
            yield node
            below += node.get("Plans", [])

    def scans(self, table: str = "jobs") -> list[dict[str, Any]]:
        """The nodes that read this table or one whose name begins like it."""
        return [
            node
            for node in self.nodes()
            if node["Node Type"] in SCANS and node.get("Relation Name", "").startswith(table)
        ]

    @property
    def rows(self) -> int:
        """The rows of jobs that were read, those that a filter threw away included."""
        kinds = ("Actual Rows", "Rows Removed by Filter", "Rows Removed by Index Recheck")
        return round(sum(node.get(kind, 0) * node["Actual Loops"] for node in self.scans() for kind in kinds))

    @property
    def pages(self) -> int:
        """How often a page was looked at. A function's pages are among those of its caller, so the largest counts."""
        return max(plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"] for plan in self.plans)

    @property
    def indexes(self) -> set[str]:
        return {node["Index Name"] for node in self.nodes() if "Index Name" in node}

    @property
    def jitted(self) -> bool:
        return any("JIT" in plan for plan in self.plans)


@asynccontextmanager
async def watching(conn: Connection) -> AsyncIterator[Seen]:
    """Sees the plan of everything that this connection runs."""
    seen = Seen()
    await conn.execute("LOAD 'auto_explain'")
    for name, value in SETTINGS.items():
        await conn.execute(f"SET auto_explain.{name} = '{value}'")
    conn.add_notice_handler(seen.note)
    try:
        yield seen
    finally:
        # The plan of a SELECT comes when the next statement takes its place.
        await conn.execute("SET auto_explain.log_min_duration = -1")
        conn.remove_notice_handler(seen.note)
