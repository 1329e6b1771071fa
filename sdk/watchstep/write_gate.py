"""An end to what a recording writes, for threads that may wait in a request when it ends."""

from __future__ import annotations

from watchstep.errors import RecordingEndedError


class WriteGate:
    """Open until a recording has ended; from then on its stores write nothing. Thread-safe.

    A request that was sent before cannot be taken back: each thread of the recording has one under way at the most, and the store may
    still do what it asks for.
    """

    def __init__(self) -> None:
        self._closed = False

    def close(self) -> None:
        """Let nothing more be written. Waits for nothing; may be called again."""
        self._closed = True

    def check(self, name: str) -> None:
        """See that something may still be written.

        Args:
            name: what is to be written, for the message.

        Raises:
            RecordingEndedError: the recording has ended.
        """
        if self._closed:
            raise RecordingEndedError(
                f"{name}: not written, for the recording has ended", "'watchstep sync' uploads what is left"
            )
