"""What an import costs, and that the public names are where they should be."""

import subprocess
import sys

import pytest

import pgqueue


def modules(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_importing_pgqueue_imports_nothing_else() -> None:
    ours = {name for name in modules("import pgqueue") if name.partition(".")[0] == "pgqueue"}
    assert ours == {"pgqueue"}
    assert not modules("import pgqueue; from pgqueue import Retry, InvalidJob") & {"psycopg", "pydantic", "asyncio"}


def test_a_producer_imports_no_driver_but_its_own() -> None:
    loaded = modules("from pgqueue import PgQueue")
    assert not loaded & {
        "psycopg2",
        "asyncpg",
        "sqlalchemy",
        "django",
        "alembic",
        "redis",
        "starlette",
        "pgqueue.worker",
    }


def test_public_names() -> None:
    assert sorted(pgqueue.__all__) == pgqueue.__all__
    for name in pgqueue.__all__:
        assert getattr(pgqueue, name).__name__ == name
    assert set(pgqueue.__all__) <= set(dir(pgqueue))
    with pytest.raises(AttributeError, match="module 'pgqueue' has no attribute 'App'"):
        _ = pgqueue.App
