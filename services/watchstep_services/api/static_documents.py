"""Documents that need no token and never change: each is made once, with its compressed form, and all responses share its bytes."""

from __future__ import annotations

import gzip
import hashlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from watchstep_services.api.middleware.etags import names_tag
from watchstep_services.api.middleware.policies import open_to_all
from watchstep_services.api.middleware.transports import PART_BYTES


@dataclass(frozen=True)
class StaticDocument:
    """A document as it is sent.

    Attributes:
        plain: its bytes.
        packed: its bytes, compressed by gzip.
        tag: its ETag, without quotes.
        media_type: its media type.
        headers: additional headers of each response.
    """

    plain: bytes
    packed: bytes
    tag: str
    media_type: str
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, plain: bytes, media_type: str, headers: Mapping[str, str] | None = None) -> StaticDocument:
        """Compress a document."""
        tag = hashlib.sha256(plain).hexdigest()[:32]
        return cls(plain, gzip.compress(plain, mtime=0), tag, media_type, headers or {})

    def response_to(self, request: Request) -> Response:
        """Return the response to a request: 304 if its ETag is known to the client."""
        packed = _accepts_gzip(request.headers.get("accept-encoding", ""))
        tag = f'"{self.tag}-gzip"' if packed else f'"{self.tag}"'
        headers = {"etag": tag, "vary": "accept-encoding", "cache-control": "no-cache", **self.headers}
        if names_tag(request.headers.get("if-none-match", ""), tag, weak=True):
            return Response(None, 304, headers)
        if packed:
            headers["content-encoding"] = "gzip"
        return _SharedBytes(self.packed if packed else self.plain, 200, headers, self.media_type)


def add_document(
    app: FastAPI, path: str, make: Callable[[], StaticDocument], *, counted: bool = True
) -> None:
    """Serve a document at a path. It is made at the first request, in a thread.

    Args:
        app: the application.
        path: its path.
        make: makes the document.
        counted: whether the requests of each address are limited (`policies.open_to_all`).
    """
    lock = threading.Lock()
    made: list[StaticDocument] = []

    def make_once() -> None:
        with lock:
            if not made:
                made.append(make())

    @open_to_all(counted=counted)
    async def document(request: Request) -> Response:
        if not made:
            await run_in_threadpool(make_once)  # takes up to a second of CPU
        return made[0].response_to(request)

    app.add_route(path, document, include_in_schema=False)


def _accepts_gzip(accepted: str) -> bool:
    for entry in accepted.lower().split(","):
        name, _, quality = entry.partition(";")
        if name.strip() == "gzip":
            return quality.replace(" ", "") not in {"q=0", "q=0.0", "q=0.00", "q=0.000"}
    return False


class _SharedBytes(Response):
    """Bytes that all responses share, and that therefore count against no client's limit of unread bytes."""

    async def __call__(
        self,
        scope: Scope,  # noqa: ARG002 - the interface of ASGI
        receive: Receive,  # noqa: ARG002
        send: Send,
    ) -> None:
        """Send the response."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for first in range(0, len(self.body), PART_BYTES):
            part = bytes(self.body[first : first + PART_BYTES])
            more = first + PART_BYTES < len(self.body)
            await send({"type": "http.response.body", "body": part, "more_body": more})
