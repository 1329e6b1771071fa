"""A connection's transport, with a deadline for what the client does not take.

uvicorn writes into asyncio's transport, which holds what the client has not taken for as long as it stays connected, and
``close`` waits for it. uvloop's transport also raises where something is written after its end.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Iterable
from typing import Any

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
