"""ETags: what has not changed is not sent again, and what has changed meanwhile is not overwritten."""

from __future__ import annotations

import hashlib
from typing import Annotated

from fastapi import Header, Response
from pydantic import BaseModel
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from watchstep_services.api.schemas.problems import RequestRefusedError

_JSON = "application/json"

IfMatch = Annotated[
    str | None,
    Header(
        alias="If-Match",
        max_length=1000,
        description="Change it only if it is still the one with this ETag; * for whatever is there.",
    ),
]


def etag_of(model: BaseModel) -> str:
    """The ETag of a thing as it is shown."""
    return _tag(model.model_dump_json().encode())


def tag(response: Response, model: BaseModel) -> None:
    """Give an answer the ETag that ``If-Match`` takes."""
    response.headers["etag"] = etag_of(model)


def require_match(condition: str | None, held: BaseModel | None) -> None:
    """Refuse to change a thing that is not the one that the caller has seen.

    Args:
        condition: the header ``If-Match``; None where it was not sent.
        held: the thing as it is shown; None where it is not there.

    Raises:
        RefusedError: 412.
    """
    if condition is None:
        return
    now = None if held is None else etag_of(held)
    if now is None or not names_tag(condition, now, weak=False):
        raise RequestRefusedError(
            412, "it has changed since, or is not there (If-Match)", "read it again, and send its ETag of now"
        )


class ETags:
    """ASGI: gives every JSON answer to a GET an ETag, and answers 304 where ``If-None-Match`` names it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http" or scope["method"] != "GET" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        await self._app(scope, receive, _Tagged(send, Headers(scope=scope).get("if-none-match")))


class _Tagged:
    """Holds a JSON answer back until it is whole; anything else passes as it comes."""

    def __init__(self, send: Send, known: str | None) -> None:
        self._send = send
        self._known = known
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
        self._body = self._body + body if self._body else body  # most come whole, and are not copied
        if not message.get("more_body", False):
            await self._finish(self._start)

    async def _finish(self, start: Message) -> None:
        headers = MutableHeaders(raw=list(start["headers"]))
        now = headers.setdefault("etag", _tag(self._body))
        headers.setdefault("cache-control", "private, no-cache")
        status = start["status"]
        if self._known is not None and names_tag(self._known, now, weak=True):
            status, self._body = 304, b""
            del headers["content-length"]
            del headers["content-type"]
        await self._send({**start, "status": status, "headers": headers.raw})
        await self._send({"type": "http.response.body", "body": self._body})


def _tag(content: bytes) -> str:
    return f'"{hashlib.sha256(content).hexdigest()[:32]}"'


def names_tag(condition: str, now: str, *, weak: bool) -> bool:
    """Whether a condition's list of ETags names one; by weak comparison a weak one names it too."""
    listed = [entry.strip() for entry in condition.split(",")]
    return "*" in listed or now in listed or (weak and f"W/{now}" in listed)
