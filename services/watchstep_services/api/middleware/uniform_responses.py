"""Rules of HTTP that all responses follow: HEAD is answered as GET without a body, and no error is cached."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class UniformResponses:
    """ASGI middleware. Its application handles no HEAD: routes, policies and limits of the GET apply, and its headers are sent.

    An error without ``Cache-Control`` gets ``no-store``: a cache may otherwise keep some of them (404, 405, 414), and give them to another caller.

    Args:
        app: the next application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_head = scope["method"] == "HEAD"
        inner = {**scope, "method": "GET"} if is_head else scope
        is_over = False

        async def receive_until_over() -> Message:
            # A stream of events ends as if its client had left.
            return {"type": "http.disconnect"} if is_over else await receive()

        async def send_uniform(message: Message) -> None:
            nonlocal is_over
            if is_over:
                return
            if message["type"] == "http.response.start":
                if message["status"] >= 400:
                    MutableHeaders(raw=message.setdefault("headers", [])).setdefault(
                        "cache-control", "no-store"
                    )
                if is_head:
                    scope["route"] = inner.get("route")  # for whoever observes the request
            await send(message)
            if is_head and message["type"] == "http.response.start":
                is_over = True
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self._app(inner, receive_until_over if is_head else receive, send_uniform)
