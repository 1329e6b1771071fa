"""One end of the line between two ranks of a node."""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
from collections.abc import Callable

from watchstep.capture.node import messages
from watchstep.capture.node.messages import Message
from watchstep.errors import FormatError

_SEND_SECONDS = 2
_DRAIN_SECONDS = 1.0


class MessageQueue:
    """What has come by any connection, in order; None for its end."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._queue: queue.SimpleQueue[tuple[Connection, Message | None]] = queue.SimpleQueue()

    def put(self, origin: Connection, message: Message | None) -> None:
        """Something has come."""
        self._queue.put((origin, message))
        self._wake()

    def take(self, seconds: float = 0.0) -> tuple[Connection, Message | None] | None:
        """The oldest; None where there is none, also after some seconds."""
        try:
            return self._queue.get(timeout=seconds) if seconds > 0 else self._queue.get_nowait()
        except queue.Empty:
            return None


class Connection:
    """A socket, and a thread that reads from it; so that neither side ever waits for the other to read."""

    def __init__(self, line: socket.socket, inbox: MessageQueue) -> None:
        self._line = line
        self._inbox = inbox
        self._usable = True
        line.settimeout(None)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_SECONDS, 0))
        self._thread = threading.Thread(target=self._read, name="watchstep-node", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> bool:
        """Send a message; False where the other side is gone, or does not read. The connection is of no use then."""
        if self._usable:
            try:
                self._line.sendall(messages.encode(message))
            except OSError:
                self.shut()
        return self._usable

    def close(self) -> None:
        """Nothing more is sent, by either side: what the other one sent before is in the inbox, and then the end.

        From here on the other side's attempts to send fail, which tells it so before it does anything of consequence.
        """
        self.shut()
        self._thread.join(_DRAIN_SECONDS)
        if not self._thread.is_alive():
            self._line.close()

    def forget(self) -> None:
        """This is a forked child: the line is its parent's."""
        self._line.close()

    def shut(self) -> None:
        """As `close`, without waiting for what is in the line."""
        self._usable = False
        with contextlib.suppress(OSError):  # the other side was faster
            self._line.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        try:
            while True:
                self._inbox.put(self, messages.read(self._receive))
        except (EOFError, OSError, FormatError):
            self.shut()
        finally:
            self._inbox.put(self, None)

    def _receive(self, size: int) -> bytes:
        held = bytearray(size)
        view = memoryview(held)
        while view:
            got = self._line.recv_into(view)
            if got == 0:
                raise EOFError
            view = view[got:]
        return bytes(held)
