"""The settings, read once from the environment, `.env` and secret files; all bad values are reported together."""

import difflib
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pgqueue.errors import InvalidSettings

# A parser returns the value, or raises ValueError with what is allowed.
Parser = Callable[[str], Any]


def _url(*schemes: str) -> Parser:
    def parse(text: str) -> str:
        scheme, separator, rest = text.partition("://")
        if scheme not in schemes or not separator or re.search(r"\s", text) or not rest:
            raise ValueError(" or ".join(f"{scheme}://…" for scheme in schemes))
        return text

    return parse


def _whole(low: int, high: int) -> Parser:
    def parse(text: str) -> int:
        if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or not low <= int(text) <= high:
            raise ValueError(f"a whole number from {low} to {high}")
        return int(text)

    return parse


def _number(what: str, *, zero: bool = False) -> Parser:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
            raise ValueError(f"{what}, {'0 or more' if zero else 'more than 0'}, such as 30 or 0.5")
        return value

    return parse


def _secret_key(text: str) -> str:
    if len(text.encode()) < 32:
        raise ValueError("at least 32 bytes; make one with: openssl rand -hex 32")
    return text


def _switch(text: str) -> bool:
    if text not in ("true", "false", "1", "0"):
        raise ValueError("true or false")
    return text in ("true", "1")


def _origins(text: str) -> tuple[str, ...]:
    origins = tuple(each for each in re.split(r"[\s,]+", text) if each)
    if not all(
        re.fullmatch(r"https?://[A-Za-z0-9.-]+(:\d+)?|https?://\[[0-9a-fA-F:]+\](:\d+)?", each) for each in origins
    ):
        raise ValueError("exact origins such as https://app.example.org, separated by commas")
    return origins


def _file(text: str) -> Path:
    if not Path(text).is_file():
        raise ValueError("a file that exists")
    return Path(text)


def _one_of(*words: str) -> Parser:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(", ".join(words[:-1]) + f" or {words[-1]}")
        return text

    return parse


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError("host:port")
    return f"redis://{text}"


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise ValueError("a folder that exists")
    return Path(text)


_POSTGRES = _url("postgresql", "postgres")
_PORT = _whole(1, 65535)
_SECONDS = _number("seconds")


def _variable(name: str, parse: Parser, default: Any = None, *, secret: bool = False) -> Any:
    return field(default=default, metadata={"name": name, "parse": parse, "secret": secret})


@dataclass(frozen=True, repr=False)
class Settings:
    """One field a variable; `sources` says for each variable where its value came from."""

    database_url: str | None = _variable("DATABASE_URL", _POSTGRES, secret=True)  # None: the embedded server
    listen_url: str | None = _variable("PGQUEUE_LISTEN_URL", _POSTGRES, secret=True)  # past PgBouncer, for LISTEN
    redis_url: str | None = _variable("REDIS_URL", _url("redis", "rediss", "unix"), secret=True)
    api_port: int = _variable("API_PORT", _PORT, 8080)
    jwt_secret: str | None = _variable("JWT_SECRET", _secret_key, secret=True)
    jwt_secret_previous: str | None = _variable("JWT_SECRET_PREVIOUS", _secret_key, secret=True)  # while keys rotate
    jwks_file: Path | None = _variable("PGQUEUE_JWKS_FILE", _file)  # noqa: RUF009
    jwt_issuer: str | None = _variable("PGQUEUE_JWT_ISSUER", str)
    jwt_audience: str | None = _variable("PGQUEUE_JWT_AUDIENCE", str)
    jwt_max_ttl: float = _variable("PGQUEUE_JWT_MAX_TTL", _SECONDS, 7 * 86400.0)
    signup: bool = _variable("PGQUEUE_SIGNUP", _switch, False)
    dev: bool = _variable(
        "PGQUEUE_DEV", _switch, False
    )  # routes that other schedulers leave open work without a token, on loopback only
    cors_origins: tuple[str, ...] = _variable("PGQUEUE_CORS_ORIGINS", _origins, ())
    rate_limit: int = _variable("PGQUEUE_RATE_LIMIT", _whole(0, 100_000_000), 60_000)  # a minute and token; 0: none
    api_connections: int = _variable("PGQUEUE_API_CONNECTIONS", _whole(1, 1000), 10)
    worker_threads: int = _variable("WORKER_THREADS", _whole(1, 1024), 8)
    smtp_host: str | None = _variable("SMTP_HOST", str)
    smtp_port: int = _variable("SMTP_PORT", _PORT, 587)
    smtp_email: str | None = _variable("SMTP_EMAIL", str)
    smtp_password: str | None = _variable("SMTP_PASSWORD", str, secret=True)
    network_task_url: str | None = _variable("PGQUEUE_NETWORK_TASK_URL", _url("http", "https"))  # None: an own endpoint
    lease_timeout: float = _variable("PGQUEUE_LEASE_TIMEOUT", _SECONDS, 30.0)
    heartbeat_interval: float = _variable("PGQUEUE_HEARTBEAT_INTERVAL", _SECONDS, 10.0)
    rescue_interval: float = _variable("PGQUEUE_RESCUE_INTERVAL", _SECONDS, 5.0)
    poll_interval: float = _variable("PGQUEUE_POLL_INTERVAL", _SECONDS, 1.0)
    shutdown_grace: float = _variable("PGQUEUE_SHUTDOWN_GRACE", _number("seconds", zero=True), 30.0)
    retention_days: float = _variable("PGQUEUE_RETENTION_DAYS", _number("days"), 30.0)
    failpoint: str | None = _variable("PGQUEUE_FAILPOINT", str)  # for tests: where a process dies
    log: str = _variable("PGQUEUE_LOG", _one_of("auto", "json", "pretty"), "auto")
    pg_bin: Path | None = _variable("PGQUEUE_PG_BIN", _folder)  # noqa: RUF009
    directory: Path = _variable("PGQUEUE_DIR", Path, Path(".pgqueue"))  # noqa: RUF009
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, dotenv: Path | None = Path(".env")) -> "Settings":
        return _Reader(os.environ if environ is None else environ, dotenv).settings()

    def describe(self) -> list[tuple[str, str, str]]:
        """Variable, value and source of each setting; secrets are masked."""
        rows = []
        for each in _FIELDS:
            value, name = getattr(self, each.name), each.metadata["name"]
            text = _text(value)
            rows.append((name, mask(text) if each.metadata["secret"] else text, self.sources.get(name, "default")))
        return rows

    def __repr__(self) -> str:
        return f"Settings({', '.join(f'{name}={value}' for name, value, _ in self.describe() if value)})"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value is None else ",".join(value) if isinstance(value, tuple) else str(value)


_FIELDS = [each for each in fields(Settings) if each.metadata]
_KNOWN = [each.metadata["name"] for each in _FIELDS]
_FROM_FILE = {"JWT_SECRET", "JWT_SECRET_PREVIOUS", "DATABASE_URL", "SMTP_PASSWORD", "POSTGRES_PASSWORD", "REDIS_URL"}
# Kubernetes gives every pod such variables for each service; one called pgqueue must not stop ours.
_SERVICE_LINK = re.compile(r"_(SERVICE_(HOST|PORT)(_\w+)?|PORT(_\d+_(TCP|UDP)(_\w+)?)?)$")


def mask(text: str) -> str:
    """Hide a secret; of a URL only its password."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        return "***" if text else ""
    rest = re.sub(r"^([^:@/?]*):.*@", r"\1:***@", rest)
    return f"{scheme}://" + re.sub(r"(?i)(password=)[^&]*", r"\1***", rest)


def parse_dotenv(text: str, problems: list[str], name: str = ".env") -> dict[str, str]:
    """KEY=VALUE lines, with `export`, comments and quotes; a problem names the line and never shows its value."""
    line_form = re.compile(
        r"""(?:export\s+)?(?P<key>[A-Za-z_]\w*)\s*=\s*
            (?: '(?P<single>[^']*)' | "(?P<double>(?:[^"\\]|\\.)*)"
              | (?P<plain>(?:[^'"\#\s]|(?<==)\#)(?:[^\#]|(?<!\s)\#)*)? )
            \s*(?:(?<=\s)\#.*)?""",
        re.VERBOSE,
    )
    values = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = line_form.fullmatch(line.strip())
        if match is None:
            problems.append(f"{name}, line {number}: must be KEY=VALUE, KEY='VALUE' or KEY=\"VALUE\"")
        elif (double := match["double"]) is not None:
            values[match["key"]] = re.sub(r"\\(.)", lambda m: {"n": "\n", "t": "\t"}.get(m[1], m[1]), double)
        else:
            values[match["key"]] = match["single"] or (match["plain"] or "").strip()
    return values


class _Reader:
    """Looks variables up, remembers their sources and collects what is wrong."""

    def __init__(self, environ: Mapping[str, str], dotenv: Path | None) -> None:
        self.problems: list[str] = []
        self.sources: dict[str, str] = {}
        self.places: list[tuple[str, Mapping[str, str]]] = [("environment", environ)]
        try:
            if dotenv is not None and dotenv.is_file():
                self.places.append((".env", parse_dotenv(dotenv.read_text("utf-8"), self.problems, str(dotenv))))
        except (OSError, UnicodeDecodeError) as error:
            self.problems.append(f"{dotenv}: cannot be read: {error}")

    def settings(self) -> Settings:
        values = {each.name: self.value(**each.metadata) for each in _FIELDS}
        if values["database_url"] is None and "DATABASE_URL" not in self.sources:
            values["database_url"] = self.postgres_url()
        if values["redis_url"] is None and "REDIS_URL" not in self.sources:
            values["redis_url"] = self.value("REDIS_ADDR", _address)
            self.sources |= {"REDIS_URL": "REDIS_ADDR"} if values["redis_url"] else {}
        if values["listen_url"] is None and values["database_url"]:
            values["listen_url"], self.sources["PGQUEUE_LISTEN_URL"] = values["database_url"], "DATABASE_URL"
        given = {name: value for name, value in values.items() if value is not None}
        settings = Settings(**given, sources=self.sources)
        if settings.heartbeat_interval * 2 > settings.lease_timeout:
            self.problems.append(
                f"PGQUEUE_HEARTBEAT_INTERVAL={settings.heartbeat_interval:g}: must be at most half of "
                f"PGQUEUE_LEASE_TIMEOUT={settings.lease_timeout:g}, or one late heartbeat loses the lease"
            )
        self.report_unknown()
        if self.problems:
            raise InvalidSettings(self.problems)
        return settings

    def lookup(self, name: str) -> str | None:
        for place, variables in self.places:
            value, file = variables.get(name, ""), variables.get(f"{name}_FILE", "") if name in _FROM_FILE else ""
            if name.endswith("_PORT") and value.startswith("tcp://"):
                continue  # Kubernetes' link to a service called "api" or "postgres", not meant for us
            if value and file:
                self.problems.append(f"{name} and {name}_FILE: both are set, keep one")
            if value or file:
                self.sources[name] = place if value else f"{place}, file {file}"
                try:
                    return value or Path(file).read_text("utf-8").strip()
                except (OSError, UnicodeDecodeError) as error:
                    self.problems.append(f"{name}_FILE={file}: cannot be read: {getattr(error, 'strerror', error)}")
                    return None
        return None

    def value(self, name: str, parse: Parser, secret: bool = False) -> Any:
        text = self.lookup(name)
        if text is None:
            return None
        try:
            return parse(text)
        except ValueError as error:
            # A URL that is not one may have its password anywhere.
            shown = re.sub(r"://.*", "://***", text) if "://" in text else "***"
            self.problems.append(f"{name}={shown if secret else text}: must be {error}")
            return None

    def postgres_url(self) -> str | None:
        host, user, database = (self.lookup(f"POSTGRES_{part}") for part in ("HOST", "USER", "DB"))
        password, port = self.lookup("POSTGRES_PASSWORD"), self.value("POSTGRES_PORT", _PORT)
        if not (host or user or password or database):
            return None
        names = [name for name in self.sources if name.startswith("POSTGRES_")]
        self.sources["DATABASE_URL"] = ", ".join(names)
        host, user = host or "localhost", user or "postgres"
        login = quote(user, safe="") + (f":{quote(password, safe='')}" if password else "")
        host = f"[{host.strip('[]')}]" if ":" in host else quote(host, safe="")
        return f"postgresql://{login}@{host}:{port or 5432}/{quote(database or user, safe='')}"

    def report_unknown(self) -> None:
        for _, variables in self.places:
            for name in variables:
                if not name.startswith("PGQUEUE_") or name in _KNOWN or _SERVICE_LINK.search(name):
                    continue
                near = difflib.get_close_matches(name, _KNOWN, 1, 0.0)
                self.problems.append(f"{name}: there is no such variable, did you mean {near[0]}?")
