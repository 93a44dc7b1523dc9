"""The private statements, one a file, loaded once: `SQL.claim` is the text of claim.sql."""

from importlib import resources
from typing import LiteralString


class Statements:
    """The files of this folder as attributes; a name without a file fails at import, not in the night."""

    def __init__(self) -> None:
        self._texts = {
            file.name.removesuffix(".sql"): file.read_text(encoding="utf-8")
            for file in resources.files(__name__).iterdir()
            if file.name.endswith(".sql")
        }

    def __getattr__(self, name: str) -> LiteralString:
        try:
            # The files are part of this package: no text from outside ever gets here.
            return self._texts[name]  # type: ignore[return-value,unused-ignore]
        except KeyError:
            raise AttributeError(f"there is no {name}.sql in pgqueue/sql") from None

    def names(self) -> list[str]:
        return sorted(self._texts)


SQL = Statements()
