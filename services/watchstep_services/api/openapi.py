"""Examples that follow from a JSON schema: its own, its defaults, or what a field of that name may hold.

The addresses of the OpenAPI document and of its page, which need no token.

The OpenAPI document: what FastAPI says, with what all addresses have in common, and an example for everything.

What all addresses have in common: ETags, keys for requests that create, a complete document.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.routing import APIRoute

from watchstep_services.api.middleware.etags import ETags
from watchstep_services.api.middleware.idempotency import AnsweredError, Answers, answer_again
from watchstep_services.api.middleware.policies import open_to_all
from watchstep_services.api.schemas.problems import TYPES
from watchstep_services.api.static_documents import StaticDocument, add_document

_TIME = 1_795_212_000_000_000_000
_HASH = "^[0-9a-f]{32}$"
_UUID = "0b8f7c1e-6a53-4f0e-9d2c-3a1f5e7b9c24"

_WORDS: dict[str, str] = {
    "project": "vision",
    "run": "resnet50-17",
    "attempt": "a-20261121-0900",
    "name": "vanishing_gradient",
    "rule": "vanishing_gradient",
    "url": "https://watchstep.example/v1/projects/vision/runs/resnet50-17",
    "tensor": "conv1.weight:gradient",
    "figure": "l2",
    "collection": "gradients",
    "origin": "operator",
    "phase": "firing",
    "severity": "critical",
    "state": "running",
    "health": "ok",
    "backend": "local",
    "kind": "stop",
    "outcome": "done",
    "role": "operator",
    "node": "node-0",
    "writer": "rank-0",
    "mode": "train",
    "stage": "reduced",
    "dtype": "F32",
    "reason": "the learning rate was ten times too high",
    "message": "gradient of conv1.weight vanishes",
    "id": _UUID,
    "event_id": _UUID,
    "event": _UUID,
    "subject": "vision/resnet50-17",
    "source": "https://watchstep.example/v1/projects/vision/runs/resnet50-17",
    "time": "2026-11-21T09:00:00Z",
    "since": "2026-11-21T00:00:00Z",
    "until": "2026-11-22T00:00:00Z",
    "query": "SELECT step, max(abs_max) AS largest FROM statistics GROUP BY step",
    "label": "team=vision",
    "page_token": "WzE3XQ",
    "next_page_token": "WzE3XQ",
    "Idempotency-Key": _UUID,
    "If-Match": '"5f2b0c9e4a7d1f3386c0b1a2d3e4f506"',
    "Range": "bytes=0-4095",
    "description": "Gradients of a layer are close to zero.",
    "summary": "Gradients of a layer are close to zero.",
    "type": "io.watchstep.alert.firing",
    "title": "NotFound",
    "env": "WATCHSTEP_RECEIVER_ONCALL",
    "detail": "run vision/resnet50-17: not known",
    "hint": "register it first, or check the name",
}
_NUMBERS: dict[str, int] = {
    "step": 1200,
    "last_step": 1200,
    "since_step": 1190,
    "worker": 0,
    "world_size": 8,
    "bytes": 37632,
    "count": 9408,
    "status": 404,
    "version": 1,
    "limit": 100,
    "points": 1000,
    "Last-Event-ID": 41,
    "after": 41,
    "number": 1,
}


def example_of(
    schema: dict[str, Any], document: dict[str, Any], name: str, within: tuple[str, ...] = ()
) -> Any:
    """A value that a schema allows.

    Args:
        schema: of the value.
        document: where its references lead.
        name: of the field or parameter.
        within: the references that led to it; one that leads to itself ends there.
    """
    if "$ref" in schema:
        within = (*within, schema["$ref"])
        schema = _at(document, schema["$ref"])
    for given in ("example", "const"):
        if given in schema:
            return schema[given]
    for given in ("examples", "enum"):
        if schema.get(given):
            return _hinted(schema[given], name) if given == "enum" else schema[given][0]
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            chosen = next((one for one in schema[several] if one.get("type") != "null"), {"type": "null"})
            return example_of(chosen, document, name, within)
    return _made(schema, document, name, within)


def _made(schema: dict[str, Any], document: dict[str, Any], name: str, within: tuple[str, ...]) -> Any:
    kind = schema.get("type")
    if kind == "object":
        held = schema.get("properties", {})
        return {key: example_of(value, document, key, within) for key, value in held.items()}
    if kind == "array":
        if "prefixItems" in schema:
            return [example_of(one, document, name, within) for one in schema["prefixItems"]]
        if schema.get("items", {}).get("$ref") in within:
            return []
        item = example_of(schema.get("items", {}), document, name.removesuffix("s"), within)
        return [item] * max(1, schema.get("minItems", 1))
    if schema.get("default") is not None:
        return schema["default"]
    if kind == "string":
        return _word(schema, name)
    if kind == "integer":
        return _bounded(schema, _TIME if name.endswith("_ns") else _NUMBERS.get(name, 1))
    if kind == "number":
        return _bounded(schema, 0.5)
    return {"boolean": True, "null": None}.get(str(kind), {})


def _word(schema: dict[str, Any], name: str) -> str:
    if schema.get("format") == "binary":
        return ""
    text = _WORDS.get(name, "text")
    if schema.get("pattern") == _HASH:
        return "5f2b0c9e4a7d1f3386c0b1a2d3e4f506"
    return text[: schema.get("maxLength", len(text))]


def _bounded(schema: dict[str, Any], value: Any) -> Any:
    if "maximum" in schema:
        value = min(value, schema["maximum"])
    if "exclusiveMaximum" in schema:
        value = min(value, schema["exclusiveMaximum"] - 1)
    return max(value, schema.get("minimum", value))


def _hinted(allowed: list[Any], name: str) -> Any:
    return _WORDS[name] if _WORDS.get(name) in allowed else allowed[0]


def _at(document: dict[str, Any], reference: str) -> dict[str, Any]:
    held: Any = document
    for part in reference.removeprefix("#/").split("/"):
        held = held[part]
    assert isinstance(held, dict)
    return held


DOCUMENT = "/openapi.json"
PAGE = "/docs"
_SCRIPT, _STYLES, _ICON = "swagger-ui-bundle.js", "swagger-ui.css", "favicon-32x32.png"
ASSETS = {
    f"{PAGE}/{_SCRIPT}": "text/javascript",
    f"{PAGE}/{_STYLES}": "text/css",
    f"{PAGE}/{_ICON}": "image/png",
}
"""The files of Swagger UI that the page loads, and their media types. `fastapi-swagger` ships them as released on npm."""


def install_document(app: FastAPI) -> None:
    """Add both addresses, and those of the page's assets, to an application that has none of its own."""
    page = get_swagger_ui_html(
        openapi_url=DOCUMENT,
        title=f"{app.title} - Swagger UI",
        swagger_js_url=f"{PAGE}/{_SCRIPT}",
        swagger_css_url=f"{PAGE}/{_STYLES}",
        swagger_favicon_url=f"{PAGE}/{_ICON}",
    )

    @open_to_all(counted=True)
    async def swagger_ui_html(_request: Request) -> HTMLResponse:
        return page

    add_document(app, DOCUMENT, lambda: StaticDocument.of(bytes(JSONResponse(app.openapi()).body), _JSON))
    app.add_route(PAGE, swagger_ui_html, include_in_schema=False)
    for path, media_type in ASSETS.items():
        _add_asset(app, path, media_type)


def _add_asset(app: FastAPI, path: str, media_type: str) -> None:
    file = resources.files("fastapi_swagger") / "resources" / path.rpartition("/")[2]
    add_document(app, path, lambda: StaticDocument.of(file.read_bytes(), media_type))


_JSON = "application/json"
_METHODS = frozenset(("get", "put", "post", "delete", "patch"))

TAGS = {
    "runs": "Recorded trainings, their attempts and jobs.",
    "control": "What is asked of a run's workers.",
    "recording": "What recorders say.",
    "alerts": "Where rules stand on runs.",
    "actions": "What events caused, and every try of it.",
    "events": "What happened, listed and as it comes.",
    "rules": "The rules that can be configured.",
    "rule configs": "Which rules judge a run, or the runs of a project.",
    "statistics": "Queries over what was recorded.",
    "snapshots": "Full tensors.",
    "traces": "Operations of traced steps.",
    "samples": "What steps were trained on.",
    "backtests": "Runs that are judged again.",
    "health": "Whether the service lives and works.",
}
_IF_NONE_MATCH = {
    "name": "If-None-Match",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "maxLength": 1000},
    "description": "An ETag of this address: where the answer is still the same, it is 304 and empty.",
    "example": '"5f2b0c9e4a7d1f3386c0b1a2d3e4f506"',
}


def describe(app: FastAPI) -> None:
    """Have an application give the document."""
    plain = app.openapi

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            _complete(plain())
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # FastAPI's own way


def document_text(app: FastAPI) -> str:
    """The document as a file."""
    return json.dumps(app.openapi(), indent=1, sort_keys=True) + "\n"


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Path, method and operation of all that there are."""
    for path, item in document["paths"].items():
        for method, operation in item.items():
            if method in _METHODS:
                yield path, method, operation


def _complete(document: dict[str, Any]) -> None:
    used = set()
    for _, method, operation in operations(document):
        used.update(operation.get("tags", ()))
        if method == "get":
            _revalidated(operation)
        if any(parameter["name"] == "If-Match" for parameter in operation.get("parameters", ())):
            changed = {**operation["responses"]["404"], "description": TYPES["changed"].meaning}
            operation["responses"].setdefault("412", changed)
        _exemplify(operation, document)
    document["tags"] = [
        {"name": name, "description": TAGS.get(name, "")} if name in TAGS else {"name": name}
        for name in sorted(used)
    ]


def _revalidated(operation: dict[str, Any]) -> None:
    answer = operation["responses"].get("200", {})
    if _JSON not in answer.get("content", {}) or "security" not in operation:
        return
    operation.setdefault("parameters", []).append(dict(_IF_NONE_MATCH))
    operation["responses"]["304"] = {
        "description": "It has not changed since the ETag that If-None-Match names."
    }
    answer.setdefault("headers", {})["ETag"] = {
        "schema": {"type": "string"},
        "description": "Of this answer.",
    }


def _exemplify(operation: dict[str, Any], document: dict[str, Any]) -> None:
    for parameter in operation.get("parameters", ()):
        if not {"example", "examples"} & parameter.keys():
            held = example_of(parameter["schema"], document, parameter["name"])
            if held is not None:
                parameter["example"] = held
    bodies = [operation["requestBody"]] if "requestBody" in operation else []
    for part in (*bodies, *operation["responses"].values()):
        for media, content in part.get("content", {}).items():
            if not {"example", "examples"} & content.keys() and "json" in media and "schema" in content:
                content["example"] = example_of(content["schema"], document, "")


def install_conventions(app: FastAPI) -> None:
    """Put them around an application."""
    describe(app)
    app.add_exception_handler(AnsweredError, answer_again)
    app.add_middleware(Answers)
    app.add_middleware(ETags)


def operation_id(route: APIRoute) -> str:
    """An operation is called as its function is; a client made from the document gets names that can be read."""
    return route.name
