"""The document and the routes are one thing: generated requests find no 5xx and no answer that it does not tell of."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from pgqueue import shipped
from pgqueue.api.docs import document, statuses
from pgqueue.api.routes import TABLE
from pgqueue.worker.jobs import app as shipped_app
from tests.api.conftest import Api


def test_the_document_tells_of_every_route(api: Api) -> None:
    found = api("GET", "/openapi.json", token="").json
    assert found["openapi"] == "3.1.0"
    told = {(path, method.upper()) for path, methods in found["paths"].items() for method in methods}
    assert told == {(each.path.replace(":path", ""), each.method) for each in TABLE}
    names = set()
    for each in TABLE:
        operation = found["paths"][each.path.replace(":path", "")][each.method.lower()]
        names.add(operation["operationId"])
        assert set(operation["responses"]) == {str(status) for status in statuses(each)}
        assert bool(operation["security"]) == (each.scope != "open")
    assert len(names) == len(TABLE)
    refs: set[str] = set()

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            refs.update([value["$ref"]] if isinstance(value.get("$ref"), str) else [])
            for each in value.values():
                collect(each)
        elif isinstance(value, list):
            for each in value:
                collect(each)

    collect(found)
    known = {f"#/components/schemas/{name}" for name in found["components"]["schemas"]}
    assert refs <= known


def test_the_page_needs_nothing_from_elsewhere(api: Api) -> None:
    page = api("GET", "/docs", token="")
    assert page.headers["content-type"].startswith("text/html")
    for outside in ("http://", "https://", "<script", "src=", "@import"):
        assert outside not in page.text.replace("&quot;http", "")
    for each in TABLE:
        assert each.summary in page.text


def test_the_types_that_ship_are_those_of_the_worker() -> None:
    assert set(shipped_app.types) == shipped.NAMES
    for name, model in shipped.PAYLOADS.items():
        ours, theirs = model.model_json_schema(by_alias=False), shipped_app.types[name].json_schema()
        assert set(ours["properties"]) == set(theirs["properties"]), name
        assert set(ours["required"]) == set(theirs["required"]), name


def test_schemathesis(serve: Any, tmp_path: Path) -> None:
    """A few random requests for each route; with PGQUEUE_TEST_LONG=1 many, and the edges of every value."""
    long = bool(os.environ.get("PGQUEUE_TEST_LONG"))
    (tmp_path / "openapi.json").write_text(json.dumps(document(TABLE)))
    with serve(rate_limit=0, signup=True) as api:
        api.state.guesses_by_address._quota = api.state.guesses_by_name._quota = 0
        command = [
            str(Path(sys.executable).with_name("schemathesis")),
            "run",
            str(tmp_path / "openapi.json"),
            f"--url=http://127.0.0.1:{api.port}",
            f"--header=Authorization: Bearer {api.token}",
            "--checks=not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance",
            "--phases=coverage,fuzzing" if long else "--phases=fuzzing",
            "--max-examples=50" if long else "--max-examples=6",
            "--seed=7",
            "--workers=2",
            "--no-color",
            "--exclude-path-regex=/(wait|login|signup|stream)$",
            "--continue-on-failure",
        ]
        environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, cwd=tmp_path, timeout=1800)
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
