"""The addresses of the OpenAPI document and of its page. Both need no token, so their answers are made once and cost nothing after."""

from __future__ import annotations

import gzip
import hashlib
import threading
from dataclasses import dataclass

from fastapi import FastAPI, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from watchstep_services.api.middleware.etags import names_tag
from watchstep_services.api.middleware.policies import open_to_all
from watchstep_services.api.middleware.unread import PART_BYTES

DOCUMENT = "/openapi.json"
PAGE = "/docs"


@dataclass(frozen=True)
class _Document:
    plain: bytes
    packed: bytes
    tag: str


def install_document(app: FastAPI) -> None:
    """Add both addresses to an application that has none of its own."""
    lock = threading.Lock()
    made: list[_Document] = []
    page = get_swagger_ui_html(openapi_url=DOCUMENT, title=f"{app.title} - Swagger UI")

    def make() -> None:
        with lock:
            if not made:
                made.append(_document(app))

    @open_to_all(counted=True)
    async def openapi(request: Request) -> Response:
        if not made:
            await run_in_threadpool(make)  # takes a second of CPU
        return _answer(made[0], request)

    @open_to_all(counted=True)
    async def swagger_ui_html(_request: Request) -> HTMLResponse:
        return page

    app.add_route(DOCUMENT, openapi, include_in_schema=False)
    app.add_route(PAGE, swagger_ui_html, include_in_schema=False)


def _document(app: FastAPI) -> _Document:
    plain = bytes(JSONResponse(app.openapi()).body)
    return _Document(plain, gzip.compress(plain, mtime=0), hashlib.sha256(plain).hexdigest()[:32])


def _answer(document: _Document, request: Request) -> Response:
    packed = _takes_gzip(request.headers.get("accept-encoding", ""))
    tag = f'"{document.tag}-gzip"' if packed else f'"{document.tag}"'
    headers = {"etag": tag, "vary": "accept-encoding", "cache-control": "no-cache"}
    if names_tag(request.headers.get("if-none-match", ""), tag, weak=True):
        return Response(None, 304, headers)
    if packed:
        headers["content-encoding"] = "gzip"
    return _InParts(document.packed if packed else document.plain, 200, headers, "application/json")


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
