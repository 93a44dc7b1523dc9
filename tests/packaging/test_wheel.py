"""The wheel holds every file of ours, and nothing else."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]
# Folder of the tree: folder of the wheel.
FOLDERS = {
    "pgqueue": "pgqueue",
    "api": "pgqueue/api",
    "worker": "pgqueue/worker",
    "migrations": "pgqueue/migrations",
}


def expected_files() -> set[str]:
    found = set()
    for source, target in FOLDERS.items():
        for path in (ROOT / source).rglob("*"):
            inside = path.relative_to(ROOT / source)
            linked = source == "pgqueue" and inside.parts[0] in FOLDERS
            if linked or not path.is_file() or {"__pycache__", "frontend"} & set(inside.parts):
                continue
            if path.suffix in {".py", ".sql", ".mako"} or path.name == "py.typed" or inside.parts[0] == "static":
                found.add(str(PurePosixPath(target, inside)))
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    # A copy, so that what an older build left behind cannot get in.
    copy, out = tmp_path_factory.mktemp("tree") / "copy", tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "node_modules", "tests")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(copy)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    [file] = out.iterdir()
    return zipfile.ZipFile(file)


def test_contents(wheel: zipfile.ZipFile) -> None:
    ours = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert ours == expected_files()


def test_the_command_is_installed(wheel: zipfile.ZipFile) -> None:
    [entry_points] = [name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt")]
    assert b"pgqueue = pgqueue.cli:main" in wheel.read(entry_points)


def test_runs_without_the_checkout(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """Migrations, their SQL and the statements are found in an installed copy, too."""
    wheel.extractall(tmp_path)
    code = "from pgqueue import migrate, sql; print(migrate.__file__); sql.SQL.names(); print(migrate.sql())"
    # -P and a folder that is not the checkout; PYTHONPATH comes before an editable install.
    result = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(str(tmp_path))
    assert "CREATE TABLE pgqueue.jobs" in result.stdout
