"""Examples that follow from a JSON schema: its own, its defaults, or what a field of that name may hold.

The addresses of the OpenAPI document and of its page. Both need no token, so their answers are made once and cost nothing after.

The OpenAPI document: what FastAPI says, with what all addresses have in common, and an example for everything.

What all addresses have in common: ETags, keys for requests that create, a complete document.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from watchstep_services.api.middleware.etags import ETags, names_tag
from watchstep_services.api.middleware.idempotency import AnsweredError, Answers, answer_again
from watchstep_services.api.middleware.policies import open_to_all
from watchstep_services.api.middleware.transports import PART_BYTES
from watchstep_services.api.schemas.problems import TYPES

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


@dataclass(frozen=True)
class _Document:
    plain: bytes
    packed: bytes
    tag: str
    media_type: str


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

    _add_document(app, DOCUMENT, lambda: _document(bytes(JSONResponse(app.openapi()).body), _JSON))
    app.add_route(PAGE, swagger_ui_html, include_in_schema=False)
    for path, media_type in ASSETS.items():
        _add_asset(app, path, media_type)


def _add_asset(app: FastAPI, path: str, media_type: str) -> None:
    file = resources.files("fastapi_swagger") / "resources" / path.rpartition("/")[2]
    _add_document(app, path, lambda: _document(file.read_bytes(), media_type))


def _add_document(app: FastAPI, path: str, make: Callable[[], _Document]) -> None:
    lock = threading.Lock()
    made: list[_Document] = []

    def make_once() -> None:
        with lock:
            if not made:
                made.append(make())

    @open_to_all(counted=True)
    async def document(request: Request) -> Response:
        if not made:
            await run_in_threadpool(make_once)  # takes up to a second of CPU
        return _answer(made[0], request)

    app.add_route(path, document, include_in_schema=False)


def _document(plain: bytes, media_type: str) -> _Document:
    return _Document(plain, gzip.compress(plain, mtime=0), hashlib.sha256(plain).hexdigest()[:32], media_type)


def _answer(document: _Document, request: Request) -> Response:
    packed = _takes_gzip(request.headers.get("accept-encoding", ""))
    tag = f'"{document.tag}-gzip"' if packed else f'"{document.tag}"'
    headers = {"etag": tag, "vary": "accept-encoding", "cache-control": "no-cache"}
    if names_tag(request.headers.get("if-none-match", ""), tag, weak=True):
        return Response(None, 304, headers)
    if packed:
        headers["content-encoding"] = "gzip"
    return _InParts(document.packed if packed else document.plain, 200, headers, document.media_type)


def _takes_gzip(accepted: str) -> bool:
    for entry in accepted.lower().split(","):
        name, _, quality = entry.partition(";")
        if name.strip() == "gzip":
            return quality.replace(" ", "") not in {"q=0", "q=0.0", "q=0.00", "q=0.000"}
    return False


class _InParts(Response):
    """Bytes that all answers share, and that therefore count for nobody's unread bytes."""

    async def __call__(
        self,
        scope: Scope,  # noqa: ARG002 - as ASGI asks
        receive: Receive,  # noqa: ARG002
        send: Send,
    ) -> None:
        """One answer."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for first in range(0, len(self.body), PART_BYTES):
            part = bytes(self.body[first : first + PART_BYTES])
            more = first + PART_BYTES < len(self.body)
            await send({"type": "http.response.body", "body": part, "more_body": more})


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
