"""Endpoints that are asked so often that what the framework does around each call counts: announcements.

`access.Gate` has let the request in. A good one goes straight to its function, in threads that nothing else takes: an
announcement never waits for a query. Any other goes the way of all requests, so that there is one place that says what is
wrong with it.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from watchstep_services.api.schemas.problems import answer_to

_JSON = "application/json"
Body = TypeVar("Body", bound=BaseModel)


class Direct(Generic[Body]):
    """ASGI: calls one function of a request's body with the JSON that it answers.

    Args:
        form: of the body.
        function: of the values in the path and the body; called in a thread.
        threads: that call it at once.
    """

    def __init__(
        self, form: type[Body], function: Callable[[Mapping[str, Any], Body], bytes], threads: int
    ) -> None:
        self._form = form
        self._function = function
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="watchstep-direct")

    async def answer(
        self, scope: Scope, receive: Receive, send: Send, values: Mapping[str, Any], otherwise: ASGIApp
    ) -> None:
        """Answer a request.

        Args:
            scope: of the request.
            receive: gives its body.
            send: takes the answer.
            values: of its path.
            otherwise: answers what is not as it should be.
        """
        try:
            content = await _read(receive)
        except HTTPException as error:
            await answer_to(Request(scope), error)(scope, receive, send)
            return
        if content is None:
            return  # who asked has gone
        body = self._parsed(scope, content)
        if body is None:
            await otherwise(scope, _again(content, receive), send)
            return
        context = contextvars.copy_context()  # the log's fields and the trace
        try:
            told = await asyncio.get_running_loop().run_in_executor(
                self._threads, context.run, self._function, values, body
            )
        except Exception as error:  # noqa: BLE001 - no handler of the application stands around this
            await answer_to(Request(scope), error)(scope, receive, send)
            return
        length = str(len(told)).encode()
        headers = [(b"content-length", length), (b"content-type", _JSON.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": told})

    def _parsed(self, scope: Scope, content: bytes) -> Body | None:
        said = Headers(scope=scope)
        if (
            said.get("content-type", "").partition(";")[0].strip().lower() != _JSON
            or "idempotency-key" in said
        ):
            return None
        try:
            return self._form.model_validate(json.loads(content))
        except (ValidationError, ValueError, RecursionError):
            return None


async def _read(receive: Receive) -> bytes | None:
    content = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        content += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(content)


def _again(content: bytes, receive: Receive) -> Receive:
    """Gives a body that has been read once more, and then whatever comes."""
    waiting: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive_again() -> Message:
        return waiting.pop() if waiting else await receive()

    return receive_again
