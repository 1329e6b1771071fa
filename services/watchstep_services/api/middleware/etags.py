"""ETags: unchanged responses are not sent again, and concurrent changes are not overwritten."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from typing import Annotated

from fastapi import Header, Response
from pydantic import BaseModel
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import watchstep
from watchstep_services.api.schemas.problems import RequestRefusedError

_JSON = "application/json"
_CACHE_CONTROL = "private, no-cache"

IfMatch = Annotated[
    str | None,
    Header(
        alias="If-Match",
        max_length=1000,
        description="Only change the object if it still has this ETag; *: if it exists.",
    ),
]

IfNoneMatch = Annotated[str | None, Header(alias="If-None-Match", max_length=1000, include_in_schema=False)]
"""The header for an endpoint that responds 304 itself; the OpenAPI document describes it for all endpoints."""


def etag_of(model: BaseModel) -> str:
    """Return the ETag of an object."""
    return _tag(model.model_dump_json().encode())


def tag(response: Response, model: BaseModel) -> None:
    """Set the ETag of a response, for use with ``If-Match``."""
    response.headers["etag"] = etag_of(model)


def etag_of_inputs(model: type[BaseModel], *inputs: object) -> str:
    """Return the ETag of a response that JSON-ready inputs determine, so that it is known before the response is made.

    Args:
        model: the model of the response; with another schema, or by another version, the same inputs give another response.
        inputs: what the response depends on.
    """
    return _tag(json.dumps([_schema_of(model), *inputs], separators=(",", ":"), default=str).encode())


@cache
def _schema_of(model: type[BaseModel]) -> str:
    return watchstep.__version__ + _tag(json.dumps(model.model_json_schema()).encode())


def unchanged(condition: str | None, etag: str) -> Response | None:
    """Return the response 304 if ``If-None-Match`` names the ETag; otherwise None."""
    if condition is None or not names_tag(condition, etag, weak=True):
        return None
    return Response(None, 304, {"etag": etag, "cache-control": _CACHE_CONTROL})


def require_match(condition: str | None, current: BaseModel | None) -> None:
    """Check that an object has not changed since the caller read it.

    Args:
        condition: the header ``If-Match``; None if it was not sent.
        current: the current object; None if it does not exist.

    Raises:
        RequestRefusedError: 412, the object has changed or does not exist.
    """
    if condition is None:
        return
    etag = None if current is None else etag_of(current)
    if etag is None or not names_tag(condition, etag, weak=False):
        raise RequestRefusedError(
            412,
            "If-Match: the object has changed or does not exist",
            "read the object again, and send its current ETag",
        )


def require_absent(condition: str | None, exists: bool) -> None:
    """Check that an object that the caller creates does not exist.

    Args:
        condition: the header ``If-None-Match`` of a change; ``*`` if the object must not exist. Other values are ignored.
        exists: whether it exists.

    Raises:
        RequestRefusedError: 412, the object exists.
    """
    if condition is not None and condition.strip() == "*" and exists:
        raise RequestRefusedError(
            412, "If-None-Match: the object exists", "use another name, or change the object"
        )


class ETags:
    """ASGI middleware: adds an ETag to every JSON response to a GET, and responds 304 if ``If-None-Match`` matches it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http" or scope["method"] != "GET" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        await self._app(scope, receive, _Tagged(send, Headers(scope=scope).get("if-none-match")))


class _Tagged:
    """Buffers a JSON response until it is complete. Any other response passes unchanged."""

    def __init__(self, send: Send, condition: str | None) -> None:
        self._send = send
        self._condition = condition
        self._start: Message | None = None
        self._body: bytes = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = Headers(raw=message["headers"])
            if message["status"] == 200 and headers.get("content-type", "").startswith(_JSON):
                self._start = message
                return
        if self._start is None:
            await self._send(message)
            return
        body = message.get("body", b"")
        self._body = (
            self._body + body if self._body else body
        )  # most bodies have one part, which is not copied
        if not message.get("more_body", False):
            await self._finish(self._start)

    async def _finish(self, start: Message) -> None:
        headers = MutableHeaders(raw=list(start["headers"]))
        etag = headers.setdefault("etag", _tag(self._body))
        headers.setdefault("cache-control", _CACHE_CONTROL)
        status = start["status"]
        if self._condition is not None and names_tag(self._condition, etag, weak=True):
            status, self._body = 304, b""
            del headers["content-length"]
            del headers["content-type"]
        await self._send({**start, "status": status, "headers": headers.raw})
        await self._send({"type": "http.response.body", "body": self._body})


def _tag(content: bytes) -> str:
    return f'"{hashlib.sha256(content).hexdigest()[:32]}"'


def names_tag(condition: str, etag: str, *, weak: bool) -> bool:
    """Return whether a condition's list of ETags contains an ETag; by weak comparison also as a weak ETag."""
    listed = [entry.strip() for entry in condition.split(",")]
    return "*" in listed or etag in listed or (weak and f"W/{etag}" in listed)
