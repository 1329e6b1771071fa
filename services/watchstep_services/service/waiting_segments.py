"""How many more announced segments a project may have waiting for their evaluation.

The count is of the whole project, so it is not part of each announcement. Each process counts at the first announcement, every half minute,
and once a second while little is left; in between it subtracts what it has accepted. So each process may exceed the limit by
as much as the limit.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

MOST_OF_PROJECT = 20_000
"""Waiting segments of a project from which on announcements are ignored: those of five runs at the limit of a run."""

_COUNTED_SECONDS = 30.0
_AGAIN_SECONDS = 1.0
_LITTLE = 1_000
_MOST_PROJECTS = 10_000


class WaitingRoom:
    """Room for announced segments of each project. Thread-safe.

    Args:
        most: limit of the waiting segments of a project.
        clock: clock in seconds.
    """

    def __init__(self, most: int = MOST_OF_PROJECT, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self._clock = clock
        self._room: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, project: str, count: Callable[[], int]) -> int:
        """How many segments the project may add.

        Args:
            project: the project.
            count: returns the project's waiting segments; called without the lock.
        """
        now = self._clock()
        with self._lock:
            room, counted = self._room.get(project, (0, now - _COUNTED_SECONDS))
        if now - counted < (_AGAIN_SECONDS if room < _LITTLE else _COUNTED_SECONDS):
            return max(0, room)
        room = self.most - count()
        with self._lock:
            self._room[project] = room, now
            self._room.move_to_end(project)
            while len(self._room) > _MOST_PROJECTS:
                self._room.popitem(last=False)
        return max(0, room)

    def take(self, project: str, segments: int) -> None:
        """Subtract segments that were added."""
        with self._lock:
            if project in self._room:
                room, counted = self._room[project]
                self._room[project] = room - segments, counted
