"""A bound on all that one try may take, whatever the other side does: byte by byte, too, can be slow."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class Cutoff:
    """Cuts a connection when the time is up, which wakes whoever waits on it. Use it as a context manager."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._held: list[socket.socket] = []
        self._timer = threading.Timer(seconds, self._cut)
        self._timer.daemon = True
        self.passed = False

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        with self._lock:
            while self._held:
                self._held.pop().close()

    @property
    def left(self) -> float:
        """Seconds that are left; a little more than none where none are, as sockets take 0 for something else."""
        return max(0.001, self._end - time.monotonic())

    def watch(self, connection: socket.socket) -> None:
        """Cut this connection, too."""
        # A copy of the descriptor: TLS takes the original one away from its socket.
        with self._lock:
            self._held.append(connection.dup())
            if self.passed:
                self._cut_all()

    def _cut(self) -> None:
        with self._lock:
            self.passed = True
            self._cut_all()

    def _cut_all(self) -> None:
        for connection in self._held:
            with contextlib.suppress(OSError):  # the other side was first
                connection.shutdown(socket.SHUT_RDWR)
