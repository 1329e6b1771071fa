"""What is told of requests: how long they took, which run the log lines belong to, and the trace that they continue."""

from __future__ import annotations

import re
import time
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from watchstep_services.core.telemetry import logs, metrics, tracing

_NAMED = re.compile(r"/v1/projects/(?P<project>[^/]{1,128})(?:/runs/(?P<run>[^/]{1,128}))?")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_NO_ROUTE = "none"


class Observed:
    """ASGI: observes every request; the outermost layer, so that refusals are seen too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        seen = False

        async def observed(message: Message) -> None:
            nonlocal seen
            if message["type"] == "http.response.start" and not seen:
                # Not its end: a stream of events ends when its reader goes.
                seen = True
                status = int(message["status"])
                span.say(status=status)
                if status >= 500:
                    span.fail(f"status {status}")
                _observe(scope, status, time.perf_counter() - began)
            await send(message)

        named = _NAMED.match(scope["path"])
        found: dict[str, Any] = named.groupdict() if named else {}
        with logs.fields(**found), tracing.span(_name(scope), _parent(scope)) as span:
            if named is None:
                span.drop()  # health checks, metrics, documents
            await self._app(scope, receive, observed)


def _parent(scope: Scope) -> str:
    return tracing.checked(Headers(scope=scope).get(tracing.TRACEPARENT))


def _name(scope: Scope) -> str:
    kind = "announce" if scope["method"] == "POST" and scope["path"].endswith("/announcements") else "request"
    return f"watchstep.{kind}"


def _observe(scope: Scope, status: int, seconds: float) -> None:
    # Starlette leaves the route that answered; what was refused before it has none, so that nobody can make labels.
    route = getattr(scope.get("route"), "path", _NO_ROUTE)
    method = scope["method"] if scope["method"] in _METHODS else "other"
    metrics.HTTP_SECONDS.labels(method, route, f"{status // 100}xx").observe(seconds)
