"""Settings: where values come from, what is refused, and that no secret is ever shown."""

from pathlib import Path

import pytest

from pgqueue.errors import InvalidSettings
from pgqueue.settings import Settings, mask, parse_dotenv


def read(dotenv: Path | None = None, **environ: str) -> Settings:
    return Settings.from_env(environ, dotenv)


def problems(dotenv: Path | None = None, **environ: str) -> list[str]:
    with pytest.raises(InvalidSettings) as caught:
        read(dotenv, **environ)
    return caught.value.problems


def source(settings: Settings, name: str) -> str:
    return {row[0]: row[2] for row in settings.describe()}[name]


def test_defaults() -> None:
    settings = read()
    assert settings.database_url is None
    assert settings.redis_url is None
    assert (settings.api_port, settings.lease_timeout, settings.heartbeat_interval) == (8080, 30, 10)
    assert (settings.rescue_interval, settings.poll_interval, settings.shutdown_grace) == (5, 1, 30)
    assert (settings.retention_days, settings.log, settings.directory) == (30, "auto", Path(".pgqueue"))
    assert {row[2] for row in settings.describe()} == {"default"}


def test_values_are_typed_and_know_their_source() -> None:
    settings = read(DATABASE_URL="postgresql://u@h/d", API_PORT="9000", PGQUEUE_POLL_INTERVAL="0.25")
    assert (settings.api_port, settings.poll_interval) == (9000, 0.25)
    assert source(settings, "API_PORT") == "environment"
    assert source(settings, "SMTP_PORT") == "default"


def test_an_empty_variable_is_an_unset_one() -> None:
    assert read(API_PORT="", DATABASE_URL="", JWT_SECRET="") == read()


def test_listen_url_is_the_database_unless_given() -> None:
    assert read(DATABASE_URL="postgresql://h/d").listen_url == "postgresql://h/d"
    settings = read(DATABASE_URL="postgresql://bouncer/d", PGQUEUE_LISTEN_URL="postgresql://h/d")
    assert settings.listen_url == "postgresql://h/d"


@pytest.mark.parametrize(
    ("environ", "url"),
    [
        ({"HOST": "db", "USER": "u", "PASSWORD": "p", "DB": "d", "PORT": "6432"}, "postgresql://u:p@db:6432/d"),
        ({"PASSWORD": "a%b@/ c"}, "postgresql://postgres:a%25b%40%2F%20c@localhost:5432/postgres"),
        ({"HOST": "/run/pg", "DB": "d"}, "postgresql://postgres@%2Frun%2Fpg:5432/d"),
        ({"HOST": "::1", "USER": "u"}, "postgresql://u@[::1]:5432/u"),
        ({"PORT": "5433"}, None),
    ],
)
def test_the_url_from_postgres_variables(environ: dict[str, str], url: str | None) -> None:
    settings = read(**{f"POSTGRES_{name}": value for name, value in environ.items()})
    assert settings.database_url == url


def test_database_url_wins_over_postgres_variables() -> None:
    assert read(DATABASE_URL="postgresql://h/d", POSTGRES_HOST="other").database_url == "postgresql://h/d"


def test_redis_addr() -> None:
    settings = read(REDIS_ADDR="localhost:6379")
    assert settings.redis_url == "redis://localhost:6379"
    assert source(settings, "REDIS_URL") == "REDIS_ADDR"
    assert problems(REDIS_ADDR="localhost") == ["REDIS_ADDR=localhost: must be host:port"]


def test_secrets_from_files(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("k" * 32 + "\n")
    (tmp_path / "password").write_text("p@ss\n")
    settings = read(JWT_SECRET_FILE=str(tmp_path / "key"), POSTGRES_PASSWORD_FILE=str(tmp_path / "password"))
    assert settings.jwt_secret == "k" * 32
    assert source(settings, "JWT_SECRET") == f"environment, file {tmp_path / 'key'}"
    assert settings.database_url == "postgresql://postgres:p%40ss@localhost:5432/postgres"
    assert problems(JWT_SECRET_FILE="/no/such") == [
        "JWT_SECRET_FILE=/no/such: cannot be read: No such file or directory"
    ]
    both = problems(JWT_SECRET="k" * 32, JWT_SECRET_FILE=str(tmp_path / "key"))
    assert both == ["JWT_SECRET and JWT_SECRET_FILE: both are set, keep one"]


def test_the_environment_wins_over_dotenv(tmp_path: Path) -> None:
    dotenv = tmp_path / ".env"
    dotenv.write_text("API_PORT=1000\nSMTP_PORT=25\n")
    settings = read(dotenv, API_PORT="2000")
    assert (settings.api_port, settings.smtp_port) == (2000, 25)
    assert source(settings, "SMTP_PORT") == ".env"


def test_dotenv_syntax() -> None:
    found: list[str] = []
    text = """
# a comment
A=plain value   # comment
export B='single # not a comment' # comment
C="double \\"quoted\\"\\nline"
D=
E=has#hash
F = spaced
G=''
H=postgresql://u:p%40@h/d?x=1
I=#hash
J= # comment
"""
    assert parse_dotenv(text, found) == {
        "A": "plain value",
        "B": "single # not a comment",
        "C": 'double "quoted"\nline',
        "D": "",
        "E": "has#hash",
        "F": "spaced",
        "G": "",
        "H": "postgresql://u:p%40@h/d?x=1",
        "I": "#hash",
        "J": "",
    }
    assert found == []


@pytest.mark.parametrize("line", ["no equals sign s3cret", "1A=s3cret", "A='s3cret", 'A="s3cret" s3cret', "=s3cret"])
def test_a_bad_line_is_named_and_not_shown(tmp_path: Path, line: str) -> None:
    dotenv = tmp_path / ".env"
    dotenv.write_text(f"API_PORT=1\n{line}\n")
    [problem] = problems(dotenv)
    assert problem.startswith(f"{dotenv}, line 2: must be KEY=VALUE")
    assert "s3cret" not in problem


def test_all_problems_at_once() -> None:
    found = problems(API_PORT="http", WORKER_THREADS="0", PGQUEUE_LOG="xml", DATABASE_URL="mysql://u:pw@h/d")
    assert sorted(found) == [
        "API_PORT=http: must be a whole number from 1 to 65535",
        "DATABASE_URL=mysql://***: must be postgresql://… or postgres://…",
        "PGQUEUE_LOG=xml: must be auto, json or pretty",
        "WORKER_THREADS=0: must be a whole number from 1 to 1024",
    ]


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "5s", "1,5"])
def test_bad_durations(value: str) -> None:
    [problem] = problems(PGQUEUE_POLL_INTERVAL=value)
    assert problem == f"PGQUEUE_POLL_INTERVAL={value}: must be seconds, more than 0, such as 30 or 0.5"


def test_no_grace_is_allowed() -> None:
    assert read(PGQUEUE_SHUTDOWN_GRACE="0").shutdown_grace == 0


def test_heartbeats_must_fit_into_the_lease() -> None:
    [problem] = problems(PGQUEUE_LEASE_TIMEOUT="12")
    assert problem.startswith("PGQUEUE_HEARTBEAT_INTERVAL=10: must be at most half of PGQUEUE_LEASE_TIMEOUT=12")
    assert read(PGQUEUE_LEASE_TIMEOUT="1", PGQUEUE_HEARTBEAT_INTERVAL="0.5").lease_timeout == 1


def test_a_short_jwt_secret_is_refused_and_not_shown() -> None:
    [problem] = problems(JWT_SECRET="short")
    assert problem.startswith("JWT_SECRET=***: must be at least 32 bytes")


def test_an_unknown_variable_is_refused_with_the_nearest_name() -> None:
    [problem] = problems(PGQUEUE_LEASE_TIMOUT="5")
    assert problem == "PGQUEUE_LEASE_TIMOUT: there is no such variable, did you mean PGQUEUE_LEASE_TIMEOUT?"


def test_kubernetes_service_links_are_not_ours() -> None:
    links = {"PGQUEUE_SERVICE_HOST": "10.0.0.1", "PGQUEUE_PORT": "tcp://10.0.0.1:80", "PGQUEUE_PORT_80_TCP_ADDR": "x"}
    assert read(**links, API_PORT="tcp://10.0.0.1:80", POSTGRES_PORT="tcp://10.0.0.1:5432") == read()


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("postgresql://user:pw@host/db", "postgresql://user:***@host/db"),
        ("postgresql://user:p:w@x/y@host/db", "postgresql://user:***@host/db"),
        (
            "postgresql://user@host/db?password=pw&sslpassword=pw2&x=1",
            "postgresql://user@host/db?password=***&sslpassword=***&x=1",
        ),
        ("redis://:pw@host:6379/0", "redis://:***@host:6379/0"),
        ("postgresql://host:5432/db", "postgresql://host:5432/db"),
        ("plain", "***"),
        ("", ""),
    ],
)
def test_mask(text: str, masked: str) -> None:
    assert mask(text) == masked


def test_secrets_are_never_shown() -> None:
    settings = read(
        DATABASE_URL="postgresql://u:s3cret@h/d",
        PGQUEUE_LISTEN_URL="postgresql://u:s3cret@h/d",
        REDIS_URL="redis://:s3cret@h",
        JWT_SECRET="s3cret" * 8,
        SMTP_PASSWORD="s3cret",
    )
    assert "s3cret" not in f"{settings} {settings!r} {settings.describe()}"
    assert "postgresql://u:***@h/d" in repr(settings)
