"""The OpenAPI document: what FastAPI says, with what all addresses have in common, and an example for everything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI

from watchstep_services.api.openapi.examples import example_of
from watchstep_services.api.schemas.problems import TYPES

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
