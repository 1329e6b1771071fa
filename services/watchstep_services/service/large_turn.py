"""Turns of large evaluations: one at a time in a process, and the projects that wait for it in turn."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict

RETRY_SECONDS = 2.0
"""So long after it was postponed a run with a large evaluation is due again."""

_PATIENCE_SECONDS = 5 * RETRY_SECONDS
"""A project that has not asked again for so long waits no more: another worker has evaluated its run, or it was deleted."""

_MAX_WAITING = 1000
"""Projects whose last turn is remembered."""


class LargeTurn:
    """Which project's large evaluation may be judged and committed now. Thread-safe.

    Where several projects wait, the one whose last turn began longest ago is next, whichever asks first: a project with many large evaluations
    delays those of another by one evaluation.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = False
        self._waiting: dict[str, float] = {}
        self._last_turns: OrderedDict[str, float] = OrderedDict()

    def take(self, project: str) -> bool:
        """Take the turn, if it is free and no other project comes first. Who does not get it asks again after `RETRY_SECONDS`.

        Args:
            project: of the run.

        Returns:
            Whether it is taken; then `release` is to be called.
        """
        with self._lock:
            now = time.monotonic()
            self._waiting = {
                name: asked for name, asked in self._waiting.items() if now - asked < _PATIENCE_SECONDS
            }
            own = self._last_turns.get(project, 0.0)
            others = (self._last_turns.get(name, 0.0) for name in self._waiting if name != project)
            if self._is_taken or any(other < own for other in others):
                self._waiting[project] = now
                return False
            self._is_taken = True
            self._waiting.pop(project, None)
            self._last_turns[project] = now
            self._last_turns.move_to_end(project)
            while len(self._last_turns) > _MAX_WAITING:
                self._last_turns.popitem(last=False)
            return True

    def release(self) -> None:
        """The evaluation is committed, or has failed."""
        with self._lock:
            self._is_taken = False
