"""The command line as a shell sees it: output, exit codes, completion and speed."""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pgqueue.cli.services import Service, running

MODULE = [sys.executable, "-m", "pgqueue"]


def run(*arguments: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run([*MODULE, *arguments], cwd=cwd, env=env | environ, capture_output=True, text=True)


def test_help_lists_every_command_with_its_own_words(tmp_path: Path) -> None:
    from pgqueue.cli import COMMANDS, cli

    result = run("--help", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    with cli.make_context("pgqueue", [], resilient_parsing=True) as ctx:
        for name, words in COMMANDS.items():
            assert words in result.stdout
            command = cli.get_command(ctx, name)
            assert command
            assert (command.help or "").startswith(words.removesuffix("."))


def test_help_is_quick(tmp_path: Path) -> None:
    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    def seconds() -> float:
        """Of work: how long it waits for a processor is the machine's affair."""
        before = used()
        run("--help", cwd=tmp_path)
        return used() - before

    assert 0 < min(seconds() for _ in range(10)) < 0.150


def test_version(tmp_path: Path) -> None:
    assert run("--version", cwd=tmp_path).stdout.startswith("pgqueue 0.")


@pytest.mark.parametrize("arguments", [["nonsense"], ["config", "--nonsense"], ["migrate", "down"]])
def test_a_wrong_command_line_ends_with_2(tmp_path: Path, arguments: list[str]) -> None:
    result = run(*arguments, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert "Usage: pgqueue" in result.stderr


def test_config(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("API_PORT=9999\n")
    result = run("config", cwd=tmp_path, DATABASE_URL="postgresql://u:s3cret@h/d")
    assert (result.returncode, result.stderr) == (0, "")
    rows = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines()}
    assert rows["API_PORT"] == ["9999", ".env"]
    assert rows["DATABASE_URL"] == ["postgresql://u:***@h/d", "environment"]
    assert rows["JWT_SECRET"] == ["-", "default"]


def test_config_as_json(tmp_path: Path) -> None:
    result = run("config", "--json", cwd=tmp_path, API_PORT="9999")
    assert {"name": "API_PORT", "value": "9999", "source": "environment"} in json.loads(result.stdout)


def test_bad_settings_are_named_without_a_traceback(tmp_path: Path) -> None:
    result = run("config", cwd=tmp_path, API_PORT="x", PGQUEUE_LOGG="json")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.splitlines() == [
        "error: wrong settings:",
        "  API_PORT=x: must be a whole number from 1 to 65535",
        "  PGQUEUE_LOGG: there is no such variable, did you mean PGQUEUE_LOG?",
    ]


def test_no_database_says_what_to_do(tmp_path: Path) -> None:
    result = run("migrate", "up", cwd=tmp_path)
    assert result.returncode == 1
    assert "error: DATABASE_URL is not set" in result.stderr
    assert "pgqueue up" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [["migrate", "up"], ["migrate", "status"], ["up"]])
def test_an_unreachable_database_ends_with_7(tmp_path: Path, command: list[str]) -> None:
    result = run(*command, cwd=tmp_path, DATABASE_URL="postgresql://u:s3cret@127.0.0.1:1/d")
    assert (result.returncode, result.stdout) == (7, "")
    assert result.stderr.startswith("error: PostgreSQL does not answer: ")
    assert result.stderr.endswith("pgqueue config\n")
    assert "s3cret" not in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("url", ["postgresql://u:s3cret@[::1/d", "postgresql://u:s3cret@h/d?nonsense=1"])
def test_a_url_that_is_none_does_not_show_its_password(tmp_path: Path, url: str) -> None:
    result = run("migrate", "up", cwd=tmp_path, DATABASE_URL=url)
    assert result.returncode == 1
    assert "DATABASE_URL=postgresql://u:***@" in result.stderr
    assert "s3cret" not in result.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(tmp_path: Path, shell: str) -> None:
    program = "import sys; sys.argv[0] = 'pgqueue'; from pgqueue.cli import main; main()"
    env = {"PATH": os.environ["PATH"], "_PGQUEUE_COMPLETE": f"{shell}_source"}
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert "_PGQUEUE_COMPLETE" in result.stdout
    env |= {"_PGQUEUE_COMPLETE": f"{shell}_complete", "COMP_WORDS": "pgqueue migrate s", "COMP_CWORD": "2"}
    env |= {"COMP_WORDS": "pgqueue migrate", "COMP_CWORD": "s"} if shell == "fish" else {}
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert {"status", "sql"} <= set(result.stdout.replace(",", " ").split())


def test_services_are_prefixed_and_stopped(capfd: pytest.CaptureFixture[str]) -> None:
    with running([Service("one", ("--version",)), Service("two", ("nonsense",))], {}):
        deadline, seen = time.monotonic() + 30, ""
        while "two ended with exit code 2" not in seen or "one | pgqueue" not in seen:
            assert time.monotonic() < deadline, seen
            seen += capfd.readouterr().err
            time.sleep(0.01)
    assert "two | Error: No such command 'nonsense'." in seen
    assert "one ended" not in seen
