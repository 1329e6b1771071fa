"""A connection's transport, with a deadline for what the client does not take.

uvicorn writes into asyncio's transport, which holds what the client has not taken for as long as it stays connected, and
``close`` waits for it. uvloop's transport also raises where something is written after its end.

Answers that wait for clients to read them: sent in parts, and bounded in bytes.

A large answer stays in memory until its client has taken it. It is handed to the server in parts as the client reads, so that
the request lasts as long as its answer is there. How many bytes wait is bounded for each token, each project and the process.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from watchstep_services.api.middleware.access import address_of, identity_of
from watchstep_services.api.schemas.problems import RequestRefusedError, answer_to
from watchstep_services.core.telemetry import metrics

_CHECKS = 4
"""Looks at a connection for each deadline: it is ended so much later at the most, as a part of the deadline."""

_LEAST_BYTES = 64 * 1024


class WatchedTransport(asyncio.Transport):
    """Another transport that drops what comes after its end, and that is aborted where its client does not read.

    A client has to take 64 KiB within the deadline, or all that waits for it where that is less.

    Args:
        inner: the transport of the connection.
        loop: its event loop.
        seconds: the deadline.
        refused: called before the connection is aborted.
    """

    def __init__(
        self,
        inner: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        seconds: float,
        refused: Callable[[], None],
    ) -> None:
        super().__init__()
        self._inner, self._loop, self._seconds, self._refused = inner, loop, seconds, refused
        self._written = 0
        self._due = 0
        self._progress = 0.0
        self._check: asyncio.TimerHandle | None = None
        self._over = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send, unless the connection is closed or being closed."""
        if self._inner.is_closing():
            return
        self._inner.write(data)
        self._written += len(data)
        if self._check is None and self._inner.get_write_buffer_size():
            self._mark()
            self._check = self._loop.call_later(self._seconds / _CHECKS, self._look)

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        """Send several parts."""
        self.write(b"".join(list_of_data))

    def end(self) -> None:
        """The connection is lost: nothing is waited for."""
        self._over = True
        if self._check is not None:
            self._check.cancel()
            self._check = None

    def _mark(self) -> None:
        waiting = self._inner.get_write_buffer_size()
        self._due = self._written - waiting + min(waiting, _LEAST_BYTES)
        self._progress = self._loop.time()

    def _look(self) -> None:
        self._check = None
        if self._over:
            return
        waiting = self._inner.get_write_buffer_size()
        if not waiting:
            return
        if self._written - waiting >= self._due:
            self._mark()
        elif self._loop.time() - self._progress >= self._seconds:
            self._refused()
            self._reset()
            return
        self._check = self._loop.call_later(self._seconds / _CHECKS, self._look)

    def _reset(self) -> None:
        """End it so that the kernel, too, drops what it has taken: it would wait for the client by itself."""
        connection = self._inner.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._inner.abort()

    def is_closing(self) -> bool:
        """Whether it is closed or being closed."""
        return self._inner.is_closing()

    def close(self) -> None:
        """Close once everything is sent, or the deadline is over."""
        self._inner.close()

    def abort(self) -> None:
        """Close at once."""
        self._inner.abort()

    def pause_reading(self) -> None:
        """Read no more for now."""
        if not self._inner.is_closing():
            self._inner.pause_reading()

    def resume_reading(self) -> None:
        """Read on."""
        if not self._inner.is_closing():
            self._inner.resume_reading()

    def is_reading(self) -> bool:
        """Whether it reads."""
        return self._inner.is_reading()

    def can_write_eof(self) -> bool:
        """Whether the protocol has half-closed connections."""
        return self._inner.can_write_eof()

    def write_eof(self) -> None:
        """Close the direction that sends."""
        self._inner.write_eof()

    def get_write_buffer_size(self) -> int:
        """Bytes that wait for the client."""
        return self._inner.get_write_buffer_size()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Below and above how many waiting bytes the protocol hears of it."""
        return self._inner.get_write_buffer_limits()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set them."""
        self._inner.set_write_buffer_limits(high, low)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """About the socket."""
        return self._inner.get_extra_info(name, default)

    def get_protocol(self) -> asyncio.BaseProtocol:
        """What receives."""
        return self._inner.get_protocol()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Change what receives."""
        self._inner.set_protocol(protocol)


PART_BYTES = 64 * 1024
"""As much as asyncio's transports take before they ask to wait."""

_MEGABYTE = 1024 * 1024
_OF_PROJECT = 2
_OF_TOKEN = 4
"""Parts of the limit of a process that one project and one token may have: a half, a quarter."""

_RETRY_SECONDS = 5


class UnreadBytes:
    """Counts bytes of answers that are not read yet. To be used in one event loop.

    One answer of each token is let through however large it is, as long as the process has room for it or holds no other.

    Args:
        total_mb: the limit of the process, in MiB.
    """

    def __init__(self, total_mb: int) -> None:
        self._most = total_mb * _MEGABYTE
        self._bytes: Counter[tuple[str, str]] = Counter()

    def take(self, size: int, project: str | None, token: str) -> None:
        """Count an answer.

        Args:
            size: its bytes.
            project: the token's; None where it belongs to none.
            token: its id, or the client's address.

        Raises:
            RefusedError: 429; too much is unread.
        """
        for what, key, most in self._shares(project, token):
            if self._bytes[key] and self._bytes[key] + size > most:
                metrics.LIMITS_REFUSED.labels("unread").inc()
                raise RequestRefusedError(
                    429,
                    f"{what}: {self._bytes[key]} bytes of answers are not read yet, and this one has {size}; "
                    f"the limit is {most}",
                    "read the answers that were asked for, or ask for less; WATCHSTEP_UNREAD_MB sets the limit",
                    {"retry-after": str(_RETRY_SECONDS)},
                )
        for _, key, _ in self._shares(project, token):
            self._bytes[key] += size

    def give_back(self, size: int, project: str | None, token: str) -> None:
        """Count the end of what `take` counted."""
        for _, key, _ in self._shares(project, token):
            self._bytes[key] -= size
            if not self._bytes[key]:
                del self._bytes[key]

    def _shares(self, project: str | None, token: str) -> list[tuple[str, tuple[str, str], int]]:
        shares = [("the process", ("process", ""), self._most)]
        if project is not None:
            shares.append((f"project {project}", ("project", project), self._most // _OF_PROJECT))
        shares.append((f"token {token}", ("token", token), self._most // _OF_TOKEN))
        return shares


class PacedAnswers:
    """ASGI: sends answers in parts of `PART_BYTES`, and refuses one for which there is no room.

    Args:
        app: what answers.
        unread: counts.
    """

    def __init__(self, app: ASGIApp, unread: UnreadBytes) -> None:
        self._app = app
        self._unread = unread

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        paced = _Paced(self._unread, scope, receive, send)
        try:
            await self._app(scope, receive, paced)
        finally:
            paced.end()


class _Paced:
    """Holds the start of an answer back until its first bytes are there."""

    def __init__(self, unread: UnreadBytes, scope: Scope, receive: Receive, send: Send) -> None:
        self._unread, self._scope, self._receive, self._send = unread, scope, receive, send
        self._start: Message | None = None
        self._counted: tuple[int, str | None, str] | None = None
        self._refused = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        if self._refused:
            return
        if message["type"] != "http.response.body":
            await self._send(message)
            return
        body = message.get("body", b"")
        if self._start is not None:
            start, self._start = self._start, None
            if len(body) > PART_BYTES and not await self._taken(len(body)):
                return
            await self._send(start)
        if len(body) <= PART_BYTES:
            await self._send(message)
            return
        more = message.get("more_body", False)
        for first in range(0, len(body), PART_BYTES):
            last = first + PART_BYTES >= len(body)
            part = bytes(memoryview(body)[first : first + PART_BYTES])
            await self._send({"type": "http.response.body", "body": part, "more_body": more or not last})

    async def _taken(self, size: int) -> bool:
        identity = identity_of(self._scope)
        project = None if identity is None else identity.project
        token = address_of(self._scope) if identity is None else identity.token
        try:
            self._unread.take(size, project, token)
        except RequestRefusedError as error:
            self._refused = True
            await answer_to(Request(self._scope), error)(self._scope, self._receive, self._send)
            return False
        self._counted = size, project, token
        return True

    def end(self) -> None:
        """The answer is written, or nobody waits for it any more."""
        if self._counted is not None:
            self._unread.give_back(*self._counted)
            self._counted = None
