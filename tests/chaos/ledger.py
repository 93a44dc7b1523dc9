"""What producers tried and what was acknowledged, outside of every system under test: two files, written to disk."""

import os
from collections.abc import Iterable
from pathlib import Path


class Ledger:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._files = {name: folder / name for name in ("attempted", "acknowledged")}
        append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._open = {name: os.open(path, append) for name, path in self._files.items()}

    def attempt(self, keys: Iterable[str]) -> None:
        """Before the keys are sent."""
        self._note("attempted", keys)

    def acknowledge(self, keys: Iterable[str]) -> None:
        """When the server has said that it has them."""
        self._note("acknowledged", keys)

    def attempted(self) -> set[str]:
        return set(self._files["attempted"].read_text().splitlines())

    def acknowledged(self) -> set[str]:
        return set(self._files["acknowledged"].read_text().splitlines())

    def close(self) -> None:
        for file in self._open.values():
            os.close(file)

    def _note(self, name: str, keys: Iterable[str]) -> None:
        os.write(self._open[name], "".join(f"{key}\n" for key in keys).encode())
        os.fsync(self._open[name])
