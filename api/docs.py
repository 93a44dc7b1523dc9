"""The OpenAPI 3.1 document, from the table of routes, and a page that shows it without anything from elsewhere."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import models_json_schema

from pgqueue.api.endpoint import ANY, OPEN, Endpoint
from pgqueue.api.problems import ProblemBody

REF = "#/components/schemas/{model}"
TEXTS = {
    200: "Done.",
    201: "Added.",
    202: "Accepted.",
    204: "Done.",
    400: "The request is not valid.",
    401: "A valid token is needed.",
    403: "The token does not allow this.",
    404: "There is no such thing.",
    408: "The body did not arrive in time.",
    409: "The present state does not allow this.",
    412: "The job has changed.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    422: "The request is not valid.",
    429: "Too many requests.",
    503: "The database does not answer; try again after Retry-After seconds.",
}
PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'"


def document(table: Sequence[Endpoint]) -> dict[str, Any]:
    models = {model for each in table for model in (each.body, ProblemBody) if model is not None}
    for each in table:
        models |= {model for answer in (each.answer, *each.also.values()) if (model := _model(answer)) is not None}
    inputs = {each.body for each in table}
    wanted = sorted(models, key=lambda model: model.__name__)
    _, definitions = models_json_schema(
        [(model, "validation" if model in inputs else "serialization") for model in wanted], ref_template=REF
    )
    paths: dict[str, Any] = {}
    for each in table:
        path = re.sub(r":path}", "}", each.path)
        paths.setdefault(path, {})[each.method.lower()] = _operation(each)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "pgqueue",
            "version": installed_version(),
            "description": "A job queue that lives in PostgreSQL. Errors are application/problem+json (RFC 9457).",
        },
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer", "bearerFormat": "JWT"}},
        },
    }


def statuses(endpoint: Endpoint) -> set[int]:
    """Every status that it may answer with."""
    found = {endpoint.status, *endpoint.also, *endpoint.errors, 503}
    if endpoint.scope == OPEN:
        if endpoint.body is not None:
            found.add(429)
    else:
        found |= {401, 403, 429}
    if endpoint.query is not None or endpoint.keyed:
        found |= {400, endpoint.invalid}
    if endpoint.body is not None:
        found |= {400, 408, 413, 415, 422, endpoint.invalid}
    if endpoint.keyed:
        found |= {409, 422}
    if "{" in endpoint.path:
        found.add(404)
    return found


def page(found: dict[str, Any]) -> str:
    rows = []
    for path, methods in found["paths"].items():
        for method, operation in methods.items():
            rows.append(_section(path, method, operation))
    schemas = "".join(
        f'<details id="{escape(name)}"><summary>{escape(name)}</summary>'
        f"<pre>{escape(json.dumps(schema, indent=2))}</pre></details>"
        for name, schema in found["components"]["schemas"].items()
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        "<title>pgqueue API</title><style>body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;"
        "padding:0 1rem}summary{cursor:pointer;padding:.3rem 0}b{display:inline-block;min-width:4.5rem}"
        "pre{background:#8882;padding:1rem;overflow:auto}code{font-size:.95em}:root{color-scheme:light dark}</style>"
        f"<h1>pgqueue {escape(found['info']['version'])}</h1><p>{escape(found['info']['description'])} "
        'The document itself: <a href="openapi.json">openapi.json</a>.</p>'
        f"<h2>Routes</h2>{''.join(rows)}<h2>Schemas</h2>{schemas}</html>"
    )


def _section(path: str, method: str, operation: dict[str, Any]) -> str:
    scope = next((scopes[0] for each in operation["security"] for scopes in each.values() if scopes), "")
    needed = f"scope {scope}" if scope else "a token" if operation["security"] else "no token"
    shown = json.dumps({key: value for key, value in operation.items() if key != "security"}, indent=2)
    return (
        f"<details><summary><b>{escape(method.upper())}</b> <code>{escape(path)}</code> "
        f"— {escape(operation['summary'])} <small>({escape(needed)})</small></summary>"
        f"<pre>{escape(shown)}</pre></details>"
    )


def _operation(each: Endpoint) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{each.method.lower()}{each.path}").strip("_"),
        "summary": each.summary,
        "security": [] if each.scope == OPEN else [{"bearer": [] if each.scope == ANY else [each.scope]}],
        "parameters": _parameters(each),
        "responses": {str(status): _response(each, status) for status in sorted(statuses(each))},
    }
    if each.body is not None:
        content = {"application/json": {"schema": {"$ref": REF.format(model=each.body.__name__)}}}
        operation["requestBody"] = {"required": not each.optional_body, "content": content}
    return operation


def _parameters(each: Endpoint) -> list[dict[str, Any]]:
    found = []
    for name in re.findall(r"{(\w+)(?::path)?}", each.path):
        schema: dict[str, Any] = {"type": "string"}
        if name == "id":
            worker = "/workers/" in each.path
            schema = {"type": "string", "format": "uuid"} if worker else {"type": "integer", "minimum": 1}
        found.append({"name": name, "in": "path", "required": True, "schema": schema})
    if each.query is not None:
        for name, schema in each.query.model_json_schema()["properties"].items():
            choices = [choice for choice in schema.get("anyOf", [schema]) if choice.get("type") != "null"]
            plain = {key: value for key, value in choices[0].items() if key not in ("title", "default")}
            described = {"description": text} if (text := schema.get("description")) else {}
            found.append({"name": name, "in": "query", "required": False, "schema": plain, **described})
    if each.keyed:
        text = "The same key and body get the first answer again, for a day."
        schema = {"type": "string", "pattern": r"^[\x21-\x7e]+$", "maxLength": 255}
        found.append(
            {"name": "Idempotency-Key", "in": "header", "required": False, "schema": schema, "description": text}
        )
    if each.method == "PATCH":
        found.append({"name": "If-Match", "in": "header", "required": False, "schema": {"type": "string"}})
    return found


def _response(each: Endpoint, status: int) -> dict[str, Any]:
    if status >= 400:
        schema: dict[str, Any] = {"$ref": REF.format(model=ProblemBody.__name__)}
        return {"description": TEXTS[status], "content": {"application/problem+json": {"schema": schema}}}
    response: dict[str, Any] = {"description": TEXTS[status]}
    answer = each.also.get(status, each.answer)
    if each.media != "application/json":
        response["content"] = {each.media: {"schema": {"type": "string"}}}
    elif answer is not None:
        schema = TypeAdapter(answer).json_schema(ref_template=REF, mode="serialization")
        if (model := _model(answer)) is not None:
            ref = {"$ref": REF.format(model=model.__name__)}
            schema = ref if model is answer else {"type": "array", "items": ref}
        response["content"] = {each.media: {"schema": schema}}
    if each.response_headers:
        response["headers"] = {name: {"schema": {"type": "string"}} for name in each.response_headers}
    return response


def _model(answer: Any) -> type[BaseModel] | None:
    inner = getattr(answer, "__args__", (answer,))[0]
    return inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None


def installed_version() -> str:
    try:
        return version("pgqueue-server")
    except PackageNotFoundError:
        return "unknown"
