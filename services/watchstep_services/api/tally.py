"""Requests that were let through and that the storage of limits has not heard of yet."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

_EVERY_SECONDS = 1.0
_MOST_KEPT = 10_000


@dataclass
class _Count:
    """Of one caller.

    Attributes:
        waiting: requests that the storage has not heard of.
        told: when it last heard of some.
        exact_until: until then it hears of each.
    """

    waiting: int = 0
    told: float = -math.inf
    exact_until: float = -math.inf


class Tally:
    """Counts of callers. Thread-safe.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counts: OrderedDict[tuple[str, str], _Count] = OrderedDict()
        self._lock = threading.Lock()

    def spared(self, who: tuple[str, str], most: int) -> bool:
        """Count one, unless the storage is to hear of it.

        Args:
            who: asks.
            most: so many may wait.
        """
        with self._lock:
            held = self._counts.get(who)
            now = self._clock()
            if (
                held is None
                or held.waiting + 1 >= most
                or now - held.told >= _EVERY_SECONDS
                or now < held.exact_until
            ):
                return False
            held.waiting += 1
            return True

    def taken(self, who: tuple[str, str]) -> int:
        """How many have waited, beside the one that is told now."""
        with self._lock:
            held = self._counts.setdefault(who, _Count())
            self._counts.move_to_end(who)
            while len(self._counts) > _MOST_KEPT:
                self._counts.popitem(last=False)
            waited, held.waiting, held.told = held.waiting, 0, self._clock()
            return waited

    def refused(self, who: tuple[str, str], seconds: float) -> None:
        """For so long each request is told."""
        with self._lock:
            self._counts.setdefault(who, _Count()).exact_until = self._clock() + seconds
