"""Memory for full tensors on their way to the store, bounded and reused; and the newest snapshots of a cadence on the store."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

_PAGE = 4096


def host_memory(size: int) -> NDArray[np.uint8]:
    """New memory of so many bytes, from the start of a page; the system gives it when it is first written to."""
    raw = np.empty(size + _PAGE, np.uint8)
    start = -raw.ctypes.data % _PAGE
    return raw[start : start + size]


class SnapshotMemory:
    """Buffers up to a number of bytes together. Thread-safe.

    Writing to memory for the first time costs several times what the copy itself costs, so a buffer that is given back
    is kept for the next snapshot.

    Attributes:
        limit: bytes of all buffers together.
        allocate: makes memory: the host's, or such as a device copies to while training goes on.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.allocate: Callable[[int], NDArray[np.uint8]] = host_memory
        self._lock = threading.RLock()  # a signal's handler may come back in
        self._free: list[NDArray[np.uint8]] = []
        self._in_use = 0

    @property
    def available(self) -> int:
        """Bytes that `take` would give now."""
        return max(0, self.limit - self._in_use)

    def take(self, size: int) -> NDArray[np.uint8] | None:
        """A buffer of at least so many bytes, at least 1; None where they are not available."""
        with self._lock:
            if size > self.available:
                return None
            fitting = [place for place, held in enumerate(self._free) if len(held) >= size]
            if fitting:
                found = self._free.pop(min(fitting, key=lambda place: len(self._free[place])))
                if self._in_use + len(found) <= self.limit:
                    self._in_use += len(found)
                    return found
            while self._free and self._kept() + self._in_use + size > self.limit:
                self._free.pop()
            self._in_use += size
        try:
            return self.allocate(size)
        except BaseException:
            with self._lock:
                self._in_use -= size
            raise

    def give_back(self, buffer: NDArray[np.uint8]) -> None:
        """Let the next snapshot have what `take` gave."""
        with self._lock:
            self._in_use -= len(buffer)
            self._free.append(buffer)

    def prepare(self, size: int) -> None:
        """Have a buffer of that size ready, its memory written to, unless it is over the limit or one is kept."""
        size = min(size, self.limit)
        with self._lock:
            if any(len(held) >= size for held in self._free):
                return
        buffer = self.take(size) if size else None
        if buffer is not None:
            buffer[::_PAGE] = 0
            self.give_back(buffer)

    def _kept(self) -> int:
        return sum(len(held) for held in self._free)


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
