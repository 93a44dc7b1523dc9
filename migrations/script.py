"""How a version runs its SQL file: one statement at a time, so that an error says which."""

import re
from pathlib import Path

from alembic import op


def run(file: Path) -> None:
    for statement in statements(file.read_text(encoding="utf-8")):
        op.execute(statement)


def statements(script: str) -> list[str]:
    """A statement ends with a semicolon before an empty line."""
    # A colon would be a parameter to SQLAlchemy's text().
    return [part.replace(":", r"\:") for part in re.split(r";\s*\n(?=\n|\Z)", script) if part.strip()]
