"""What the README says works as it is written there."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from tests.chaos.registry import load

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def statements(script: str) -> list[str]:
    script = re.sub(r"--.*", "", script)
    return [each.strip() for each in script.split(";") if each.strip()]


def test_the_sql_runs(dsn: str) -> None:
    scripts = blocks("sql")
    assert len(scripts) >= 4
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("INSERT INTO pgqueue.jobs (type, queue) SELECT 't', 'mail' FROM generate_series(1, 17)")
        for script in scripts:
            for statement in statements(script):
                if "retry_job" in statement:
                    conn.execute("SELECT pgqueue.cancel_job(id) FROM pgqueue.jobs_live WHERE id = 17")
                conn.execute(statement.encode())


@pytest.mark.parametrize("server", ["pg18"], indirect=True)
def test_the_first_job_in_python(dsn: str, tmp_path: Path) -> None:
    [source] = [block for block in blocks("python") if block.startswith("# jobs.py")]
    (tmp_path / "jobs.py").write_text(source, encoding="utf-8")
    environ = os.environ | {"DATABASE_URL": dsn}
    worker = subprocess.Popen([sys.executable, "-m", "pgqueue", "worker", "--app", "jobs"], cwd=tmp_path, env=environ)
    try:
        said = subprocess.run(
            [sys.executable, "jobs.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60
        )
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.wait(60)
    assert said.stdout == "1 {'sent_to': 'a@x.org'}\n", said.stderr


def test_the_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    script = "\n".join(blocks("bash"))
    for target in re.findall(r"^make (\w+)", script, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for command in set(re.findall(r"\bpgqueue (\w+)", script)):
        help_text = subprocess.run([sys.executable, "-m", "pgqueue", command, "--help"], capture_output=True, text=True)
        assert help_text.returncode == 0, command


def test_every_proof_exists() -> None:
    for path in set(re.findall(r"[`(](tests/[\w/]+(?:\.(?:py|md))?)", README)):
        assert (ROOT / path).exists(), f"the README names {path}, which is not there"
    scenarios = load()
    for name in re.findall(r"[ ,]([BCX]\d+)\b", README):
        assert name in scenarios, f"the README names the scenario {name}, which is not there"
    for module, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", README):
        assert f"def {test}(" in (ROOT / module).read_text(encoding="utf-8"), f"{module} has no {test}"
