"""The Makefile: what it lists works, and what other files call exists."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_bare_make_lists_every_target() -> None:
    result = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = set(re.findall(r"^  make ([\w-]+) +\S", result.stdout, re.MULTILINE))
    assert listed == TARGETS >= {"up", "test", "lint", "fmt", "schema", "bench", "clean"}


def test_every_target_that_is_named_somewhere_exists() -> None:
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob(".ci/*"), *ROOT.glob(".github/**/*.yml")]
    call = re.compile(r"^\s*(?:[$`] ?)?make ([\w-]+)|`make ([\w-]+)`", re.MULTILINE)
    named = {name for file in files for name in call.findall(file.read_text())}
    assert {first or second for first, second in named} <= TARGETS


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("sys.version_info = (3, 9, 1)", "pgqueue needs Python 3.11 or newer, and {python} is 3.9"),
        (
            "sys.modules['ensurepip'] = None",
            "{python} has no venv module: on Debian and Ubuntu, apt install python3-venv",
        ),
    ],
)
def test_a_python_that_will_not_do_is_named(tmp_path: Path, spoil: str, message: str) -> None:
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "import sys; {spoil}; exec(sys.argv[1])" "$2"\n')
    python.chmod(0o755)
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    (tmp_path / "pyproject.toml").touch()
    result = subprocess.run(["make", "up", f"PYTHON={python}"], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith(message.format(python=python))
    assert not (tmp_path / ".venv").exists()
