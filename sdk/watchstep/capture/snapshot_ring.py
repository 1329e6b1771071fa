"""The newest snapshots of a cadence, up to a number of bytes on the store."""

from __future__ import annotations

from collections import deque


class SnapshotRing:
    """Which snapshots make room for newer ones. Knows of those that this process wrote, and only of their names.

    Attributes:
        limit: bytes on the store; None for no limit.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._held: deque[tuple[str, int]] = deque()

    def add(self, key: str, size: int) -> list[str]:
        """A snapshot was written: keys of those that are to be deleted for it, the oldest first.

        The newest one stays, even where it is over the limit by itself.
        """
        if self.limit is None:
            return []
        self._held.append((key, size))
        rotated = []
        while len(self._held) > 1 and sum(size for _, size in self._held) > self.limit:
            rotated.append(self._held.popleft()[0])
        return rotated

    def protect(self) -> None:
        """What is held now is never deleted, and does not count any more."""
        self._held.clear()
