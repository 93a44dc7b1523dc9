"""The key for tokens that `pgqueue up` makes for itself and keeps in its folder."""

import os
import secrets
from dataclasses import replace
from pathlib import Path

from pgqueue.settings import Settings

NAME = "jwt_secret"


def kept_secret(directory: Path) -> str:
    """The folder's key; made if there is none."""
    file = directory / NAME
    try:
        return file.read_text("utf-8").strip()
    except FileNotFoundError:
        pass
    secret = secrets.token_hex(32)
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as out:
        out.write(secret + "\n")
    return secret


def with_secret(settings: Settings, directory: Path) -> Settings:
    """The settings, with the folder's key where JWT_SECRET is not set."""
    if settings.jwt_secret is None and (directory / NAME).is_file():
        return replace(settings, jwt_secret=kept_secret(directory))
    return settings
