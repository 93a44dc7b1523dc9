"""`python -m tests.mutants [M1 …]`: every fault must make its test fail, and without it the test must pass."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
SITE = Path(__file__).parent / "site"


def run(tests: list[str], mutant: str = "") -> tuple[int, str]:
    path = os.pathsep.join(filter(None, [str(SITE), os.environ.get("PYTHONPATH")]))
    options = ["-q", "-x", "-rfE", "-p", "no:cacheprovider"]
    # The fault is in the product before pytest is there.
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "MUTANT": mutant},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return ended.returncode, ended.stdout


def catch(mutant: Mutant) -> bool:
    """Whether the test failed, and not only its surroundings."""
    code, told = run([mutant.test], mutant.name)
    caught = code == 1 and re.search("^FAILED ", told, re.MULTILINE) is not None
    print(f"| {mutant.name} | {mutant.what} | `{mutant.test}` | {'yes' if caught else 'NO'} |", flush=True)
    why = re.findall("^E  +(.+)", told, re.MULTILINE)
    print(f"    {why[0]}" if caught else told[-3000:], file=sys.stderr)
    return caught


def main() -> None:
    mutants = [MUTANTS[name] for name in sys.argv[1:]] or list(MUTANTS.values())
    code, told = run([mutant.test for mutant in mutants])
    if code:
        print(told, file=sys.stderr)
        sys.exit("without any fault, a test fails")
    print("| mutant | what is wrong | test | caught |\n|---|---|---|---|", flush=True)
    escaped = [mutant.name for mutant in mutants if not catch(mutant)]
    sys.exit(f"not caught: {', '.join(escaped)}" if escaped else 0)


if __name__ == "__main__":
    main()
