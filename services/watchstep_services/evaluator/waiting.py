"""Rows of segments that were looked at and are not judged yet, kept so that they need not be read again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

from watchstep.block import Block

_ROWS = 300_000
_FORGOTTEN_SECONDS = 60.0
"""Another worker has taken the run, and judged them."""


@dataclass(frozen=True)
class Read:
    """A segment as it was read: bytes that it had, and its rows."""

    size: int
    block: Block


class WaitingRows:
    """Segments of the runs that this process postponed. Thread-safe.

    Args:
        rows: of all segments together, about 400 bytes each; beyond that there is room for no more.
    """

    def __init__(self, rows: int = _ROWS) -> None:
        self._most = rows
        self._rows = 0
        self._held: dict[int, tuple[float, dict[str, Read]]] = {}  # in the order in which they were kept
        self._lock = threading.Lock()

    def of(self, run_id: int) -> dict[str, Read]:
        """By path."""
        with self._lock:
            return dict(self._held[run_id][1]) if run_id in self._held else {}

    def keep(self, run_id: int, segments: Iterable[tuple[str, Read]]) -> bool:
        """Keep a run's segments instead of those that are held; whether there is room. Where there is none, they go."""
        held = dict(segments)
        now = time.monotonic()
        with self._lock:
            self._forget(run_id)
            for old in [of for of, (kept, _) in self._held.items() if kept < now - _FORGOTTEN_SECONDS]:
                self._forget(old)
            if self._rows + _size(held) > self._most:
                return False
            self._held[run_id] = (now, held)
            self._rows += _size(held)
        return True

    def drop(self, run_id: int) -> None:
        """Those of a run are judged, or another worker's by now."""
        with self._lock:
            self._forget(run_id)

    def _forget(self, run_id: int) -> None:
        _, held = self._held.pop(run_id, (0.0, {}))
        self._rows -= _size(held)


def _size(held: dict[str, Read]) -> int:
    return sum(len(one.block) for one in held.values())
