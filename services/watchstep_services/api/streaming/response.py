"""The answer that does not end: server-sent events, https://html.spec.whatwg.org/multipage/server-sent-events.html."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from anyio import fail_after
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from watchstep_services.api.streaming.reading import Wanted
from watchstep_services.api.streaming.streams import Streams

HEARTBEAT_SECONDS = 15.0
SEND_SECONDS = 20.0
_RETRY_MS = 2000

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Followed:
    """What a client follows.

    Attributes:
        project: whose events.
        token: id of the client's token.
        wanted: which of them.
        after: the place that the client has reached; None for now.
        allowed: whether it still may; asked at every heartbeat.
    """

    project: str
    token: str
    wanted: Wanted
    after: int | None
    allowed: Callable[[], Awaitable[bool]]


class EventStream(Response):
    """Sends events until the client goes, may no more, is too slow, or the process ends.

    Nothing is kept for a client but its place: one that takes nothing for `SEND_SECONDS` is dropped, and resumes by its
    Last-Event-ID.
    """

    media_type = "text/event-stream"

    def __init__(self, streams: Streams, followed: Followed) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._streams, self._followed = streams, followed

    async def __call__(
        self,
        scope: Scope,  # noqa: ARG002 - as ASGI asks
        receive: Receive,
        send: Send,
    ) -> None:
        """One stream."""
        works: list[asyncio.Task[Any]] = []
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            works.append(asyncio.create_task(self._follow(send)))
            works.append(asyncio.create_task(_gone(receive)))
            works.append(asyncio.create_task(self._streams.closing.wait()))
            await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for work in works:
                work.cancel()
            results = await asyncio.gather(*works, return_exceptions=True)
            self._streams.exit(self._followed.project, self._followed.token)
        if isinstance(results[0], TimeoutError):
            _log.info(
                "event stream of project %s: the client is too slow, and dropped", self._followed.project
            )
        elif isinstance(results[0], Exception):
            _log.warning("event stream of project %s ends: %s", self._followed.project, results[0])
        elif self._streams.closing.is_set() or results[0] is None:
            with fail_after(SEND_SECONDS):
                await send({"type": "http.response.body"})

    async def _follow(self, send: Send) -> None:
        tail = self._streams.tail(self._followed.project)
        now = await tail.join()
        try:
            after = now if self._followed.after is None else await tail.place(self._followed.after)
            await _send(send, f"retry: {_RETRY_MS}\nid: {after}\n\n".encode())
            loop = asyncio.get_running_loop()
            beat = loop.time() + HEARTBEAT_SECONDS
            while True:
                found, after = await tail.batch(after, self._followed.wanted)
                if found:
                    await _send(send, b"".join(sent.text for sent in found))
                else:
                    await tail.wait(after, max(0.0, beat - loop.time()))
                if loop.time() >= beat:
                    if not await self._followed.allowed():
                        return
                    await _send(send, f": heartbeat\nid: {after}\n\n".encode())
                    beat = loop.time() + HEARTBEAT_SECONDS
        finally:
            tail.leave()


async def _send(send: Send, body: bytes) -> None:
    # Not asyncio.wait_for: before Python 3.12 it loses a cancellation that comes as the wait ends, and the stream goes on.
    with fail_after(SEND_SECONDS):
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
