"""Limits of responses that clients do not read: a deadline per connection, and a limit of unread bytes.

uvicorn writes to asyncio's transport, which buffers unread data for as long as the client stays connected, and ``close`` waits for
the client. uvloop's transport also raises an error for writes after the end of the connection. `WatchedTransport` adds a deadline.

A large response remains in memory until its client has read it. `PacedAnswers` passes it to the server in parts as the client reads,
so that the request lasts as long as its response is in memory. Unread bytes are limited per token, per project and per process.
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
"""Checks per deadline. A connection is closed at most one check interval after its deadline."""

_LEAST_BYTES = 64 * 1024


class WatchedTransport(asyncio.Transport):
    """Transport wrapper that drops writes after the end of the connection, and aborts it if the client does not read.

    A client must read 64 KiB within the deadline, or all buffered data if that is less.

    Args:
        inner: the transport of the connection.
        loop: event loop of the connection.
        seconds: the deadline.
        refused: callback before the connection is aborted.
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
        self._timer: asyncio.TimerHandle | None = None
        self._over = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send data, unless the connection is closed or closing."""
        if self._inner.is_closing():
            return
        self._inner.write(data)
        self._written += len(data)
        if self._timer is None and self._inner.get_write_buffer_size():
            self._start_deadline()
            self._timer = self._loop.call_later(self._seconds / _CHECKS, self._check_progress)

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        """Send several parts."""
        self.write(b"".join(list_of_data))

    def end(self) -> None:
        """Stop the checks after the connection is lost."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start_deadline(self) -> None:
        waiting = self._inner.get_write_buffer_size()
        self._due = self._written - waiting + min(waiting, _LEAST_BYTES)
        self._progress = self._loop.time()

    def _check_progress(self) -> None:
        self._timer = None
        if self._over:
            return
        waiting = self._inner.get_write_buffer_size()
        if not waiting:
            return
        if self._written - waiting >= self._due:
            self._start_deadline()
        elif self._loop.time() - self._progress >= self._seconds:
            self._refused()
            self._reset()
            return
        self._timer = self._loop.call_later(self._seconds / _CHECKS, self._check_progress)

    def _reset(self) -> None:
        """Reset the connection, so that the kernel also drops buffered data instead of waiting for the client."""
        connection = self._inner.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._inner.abort()

    def is_closing(self) -> bool:
        """Return whether the connection is closed or closing."""
        return self._inner.is_closing()

    def close(self) -> None:
        """Close after all data is sent, or after the deadline."""
        self._inner.close()

    def abort(self) -> None:
        """Close at once."""
        self._inner.abort()

    def pause_reading(self) -> None:
        """Pause reading."""
        if not self._inner.is_closing():
            self._inner.pause_reading()

    def resume_reading(self) -> None:
        """Resume reading."""
        if not self._inner.is_closing():
            self._inner.resume_reading()

    def is_reading(self) -> bool:
        """Return whether the transport is reading."""
        return self._inner.is_reading()

    def can_write_eof(self) -> bool:
        """Return whether the protocol supports half-closed connections."""
        return self._inner.can_write_eof()

    def write_eof(self) -> None:
        """Close the sending direction."""
        self._inner.write_eof()

    def get_write_buffer_size(self) -> int:
        """Return the number of buffered bytes."""
        return self._inner.get_write_buffer_size()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Return the low and high limits of buffered bytes for flow control."""
        return self._inner.get_write_buffer_limits()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the limits of buffered bytes for flow control."""
        self._inner.set_write_buffer_limits(high, low)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return information about the connection."""
        return self._inner.get_extra_info(name, default)

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return the protocol."""
        return self._inner.get_protocol()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Set the protocol."""
        self._inner.set_protocol(protocol)


PART_BYTES = 64 * 1024
"""The high limit of flow control in asyncio's transports."""

_MEGABYTE = 1024 * 1024
_PROJECT_DIVISOR = 2
_TOKEN_DIVISOR = 4
"""One project may use half of the limit of a process, one token a quarter."""

_RETRY_SECONDS = 5


class UnreadBytes:
    """Counts unread bytes of responses. Use it in one event loop only.

    The first response of a token passes independent of its size, if the process has room for it or has no other response.

    Args:
        total_mb: limit of the process, in MiB.
    """

    def __init__(self, total_mb: int) -> None:
        self._most = total_mb * _MEGABYTE
        self._bytes: Counter[tuple[str, str]] = Counter()

    def reserve(self, size: int, project: str | None, token: str) -> None:
        """Count a response.

        Args:
            size: size of the response in bytes.
            project: project of the token; None for a token of all projects.
            token: id of the token, or address of the client.

        Raises:
            RequestRefusedError: 429; too many bytes are unread.
        """
        for what, key, most in self._shares(project, token):
            if self._bytes[key] and self._bytes[key] + size > most:
                metrics.LIMITS_REFUSED.labels("unread").inc()
                raise RequestRefusedError(
                    429,
                    f"{what}: {self._bytes[key]} bytes of responses are unread, and this response has {size}; "
                    f"the limit is {most}",
                    "read the pending responses, or request less; WATCHSTEP_UNREAD_MB sets the limit",
                    {"retry-after": str(_RETRY_SECONDS)},
                )
        for _, key, _ in self._shares(project, token):
            self._bytes[key] += size

    def release(self, size: int, project: str | None, token: str) -> None:
        """Count the end of a response that `reserve` counted."""
        for _, key, _ in self._shares(project, token):
            self._bytes[key] -= size
            if not self._bytes[key]:
                del self._bytes[key]

    def _shares(self, project: str | None, token: str) -> list[tuple[str, tuple[str, str], int]]:
        shares = [("the process", ("process", ""), self._most)]
        if project is not None:
            shares.append((f"project {project}", ("project", project), self._most // _PROJECT_DIVISOR))
        shares.append((f"token {token}", ("token", token), self._most // _TOKEN_DIVISOR))
        return shares


class PacedAnswers:
    """ASGI middleware: sends responses in parts of `PART_BYTES`, and refuses a response that exceeds the limits.

    Args:
        app: the next application.
        unread: count of unread bytes.
    """

    def __init__(self, app: ASGIApp, unread: UnreadBytes) -> None:
        self._app = app
        self._unread = unread

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        paced = _Paced(self._unread, scope, receive, send)
        try:
            await self._app(scope, receive, paced)
        finally:
            paced.end()


class _Paced:
    """Delays the start of a response until its first part of the body arrives."""

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
            if len(body) > PART_BYTES and not await self._reserve(len(body)):
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

    async def _reserve(self, size: int) -> bool:
        identity = identity_of(self._scope)
        project = None if identity is None else identity.project
        token = address_of(self._scope) if identity is None else identity.token
        try:
            self._unread.reserve(size, project, token)
        except RequestRefusedError as error:
            self._refused = True
            await answer_to(Request(self._scope), error)(self._scope, self._receive, self._send)
            return False
        self._counted = size, project, token
        return True

    def end(self) -> None:
        """Release the reserved bytes after the response is written or abandoned."""
        if self._counted is not None:
            self._unread.release(*self._counted)
            self._counted = None
