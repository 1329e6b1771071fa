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
                _describe(span, scope, status)
                _observe(scope, status, time.perf_counter() - began)
            await send(message)

        named = _NAMED.match(scope["path"])
        found: dict[str, Any] = named.groupdict() if named else {}
        with (
            logs.fields(**found),
            tracing.span(_name(scope), _parent(scope), request=_request(scope)) as span,
        ):
            if named is None:
                span.drop()  # health checks, metrics, documents
            try:
                await self._app(scope, receive, observed)
            except Exception:
                if not seen:  # answered with 500 further out
                    _describe(span, scope, 500)
                raise


def _parent(scope: Scope) -> str:
    return tracing.checked(Headers(scope=scope).get(tracing.TRACEPARENT))


def _request(scope: Scope) -> tracing.RequestSpan:
    """What is known of a request before its route is, without its query, which may be long SQL."""
    method = scope["method"]
    known: dict[str, str | int] = {"url.path": scope["path"], "url.scheme": scope.get("scheme", "http")}
    if method in tracing.HTTP_METHODS:
        named = {"http.request.method": method}
    else:
        named = {"http.request.method": "_OTHER", "http.request.method_original": method[:32]}
    return tracing.RequestSpan("server", {**known, **named})


def _name(scope: Scope, route: str = "") -> str:
    method = scope["method"] if scope["method"] in tracing.HTTP_METHODS else "HTTP"
    return f"{method} {route}" if route else method


def _describe(span: tracing.Spanned, scope: Scope, status: int) -> None:
    answered: dict[str, str | int] = {"http.response.status_code": status}
    route = _route(scope)
    if route:
        answered["http.route"] = route
    span.describe(answered, _name(scope, route))
    if status >= 500:
        span.fail(str(status))


def _route(scope: Scope) -> str:
    # Starlette leaves the route that answered; a request that was refused before has none.
    return getattr(scope.get("route"), "path", "")


def _observe(scope: Scope, status: int, seconds: float) -> None:
    route = _route(scope) or _NO_ROUTE  # never the path, so that nobody can make labels
    method = scope["method"] if scope["method"] in _METHODS else "other"
    metrics.HTTP_SECONDS.labels(method, route, f"{status // 100}xx").observe(seconds)
