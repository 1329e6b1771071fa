"""All operations of the OpenAPI document, and requests that end even if a response does not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, unquote, urlsplit

from anyio.from_thread import start_blocking_portal
from fastapi import FastAPI

ROOT = Path(__file__).parents[3]
METHODS = ("get", "put", "post", "delete", "patch", "head", "options")


@dataclass(frozen=True)
class Operation:
    """An operation: method, path, and definition in the document."""

    method: str
    path: str
    definition: dict[str, Any]

    @property
    def permission(self) -> str | None:
        """The required permission in the document."""
        permission = self.definition.get("x-watchstep-permission")
        return None if permission is None else str(permission)

    @property
    def parameters(self) -> dict[str, dict[str, Any]]:
        """Schemas of the path parameters, by name."""
        return {
            parameter["name"]: parameter["schema"]
            for parameter in self.definition.get("parameters", ())
            if parameter["in"] == "path"
        }

    def at(self, values: Mapping[str, object]) -> str:
        """Return the path with values; the default is a name, or 1 for an integer."""
        path = self.path
        for name, schema in self.parameters.items():
            value = values.get(name, 1 if schema.get("type") == "integer" else "nothing")
            path = path.replace(f"{{{name}}}", quote(str(value), safe=""))
        return path


@cache
def published_document() -> dict[str, Any]:
    """The OpenAPI document in docs/, which tests/docs compares with the code: an application takes two seconds to make it."""
    document: dict[str, Any] = json.loads((ROOT / "docs" / "openapi.json").read_text(encoding="utf-8"))
    return document


def operations(document: dict[str, Any] | None = None) -> Iterator[Operation]:
    """Yield all operations of a document, by default of the published one."""
    document = document or published_document()
    for path, methods in document["paths"].items():
        for method in METHODS:
            if method in methods:
                yield Operation(method.upper(), path, methods[method])


@dataclass(frozen=True)
class Answer:
    """A response; of an endless response, the part before the caller disconnected."""

    status: int
    headers: dict[str, str]
    text: str


class Ask(Protocol):
    """Sends a request to the application."""

    def __call__(self, method: str, target: str, token: str = "", body: object = None) -> Answer: ...


@contextmanager
def asking(app: FastAPI) -> Iterator[Ask]:
    """Send requests like `ask`, in one event loop with one thread pool, which halves the time of a thousand requests."""
    with start_blocking_portal() as portal:

        def request(method: str, target: str, token: str = "", body: object = None) -> Answer:
            return portal.call(_ask, app, method, target, token, body, {})

        yield request


def ask(
    app: FastAPI,
    method: str,
    target: str,
    token: str = "",
    body: object = None,
    headers: Mapping[str, str] = {},
) -> Answer:
    """Send a request from a client that disconnects after the start of the response."""
    return asyncio.run(_ask(app, method, target, token, body, headers))


async def _ask(
    app: FastAPI, method: str, target: str, token: str, body: object, headers: Mapping[str, str]
) -> Answer:
    named = {"host": "service.test", "content-type": "application/json", **headers}
    if token:
        named["authorization"] = f"Bearer {token}"
    parts = urlsplit(target)
    content = b"" if body is None else json.dumps(body).encode()
    begun = asyncio.Event()
    sent: list[Any] = []
    waiting = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> Any:
        if waiting:
            return waiting.pop()
        await begun.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        begun.set()

    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": method,
        "scheme": "http", "path": unquote(parts.path), "raw_path": parts.path.encode(), "query_string": parts.query.encode(),
        "root_path": "", "client": ("127.0.0.1", 1), "server": ("service.test", 80), "state": {},
        "headers": [(name.lower().encode(), value.encode()) for name, value in named.items()],
    }  # fmt: skip
    try:
        await app(scope, receive, send)
    except Exception:  # noqa: BLE001 - answered already, as a server would have it
        assert sent
    start = next(message for message in sent if message["type"] == "http.response.start")
    answer_headers = {name.decode(): value.decode() for name, value in start["headers"]}
    text = b"".join(message.get("body", b"") for message in sent if message["type"] == "http.response.body")
    return Answer(start["status"], answer_headers, text.decode(errors="replace"))
