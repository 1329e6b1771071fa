"""Losses that leave the range they had: known as they are recorded, so that the steps that follow are measured whole."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

_WINDOW = 64
_FEWEST = 16
_EVERY = 16
"""Losses between two looks at the range; a single loss is compared with one number."""

_DEVIATIONS = 8.0
_RISE = 0.25
_NORMAL = 1.4826
_MOST_SERIES = 32


class LossRange:
    """The range of the last losses of one name: median and median absolute deviation, which do not notice single outliers (Hampel 1974)."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=_WINDOW)
        self._until_look = _FEWEST
        self._level = 0.0
        self._unit = 1.0
        self._limit = math.inf

    def excess(self, loss: float) -> float:
        """How far a loss is above the range, in units of the least distance that counts: 1 or more, or 0 within the range.

        The unit is the largest of eight robust standard deviations and a quarter of the level. What is NaN or infinite is no loss of a
        range: the gate sees it.
        """
        if not math.isfinite(loss):
            return 0.0
        excess = (loss - self._level) / self._unit if loss > self._limit else 0.0
        self._last.append(loss)
        self._until_look -= 1
        if not self._until_look:
            self._look()
        return excess

    def _look(self) -> None:
        self._until_look = _EVERY
        middle = len(self._last) // 2
        self._level = sorted(self._last)[middle]
        spread = _NORMAL * sorted(abs(loss - self._level) for loss in self._last)[middle]
        self._unit = max(_DEVIATIONS * spread, _RISE * abs(self._level))
        self._limit = self._level + self._unit if self._unit > 0 else math.inf


class LossOnsets:
    """Asks for bursts of measuring where a training loss leaves its range. On the training thread."""

    def __init__(self, burst: Callable[[float], bool]) -> None:
        """Begin with no losses.

        Args:
            burst: called with the excess of a loss above its range; whether measuring begins because of it.
        """
        self._burst = burst
        self._ranges: dict[tuple[str, bool], LossRange] = {}

    def seen(self, name: str, loss: float, *, derived: bool) -> bool:
        """A training loss; whether everything is measured from now on because of it.

        Args:
            name: of the loss.
            loss: its value.
            derived: it was found at ``backward()``. What the program logs by the same name has a range of its own.
        """
        held = self._ranges.get((name, derived))
        if held is None:
            if len(self._ranges) >= _MOST_SERIES:
                return False
            held = self._ranges[name, derived] = LossRange()
        excess = held.excess(loss)
        return excess > 0 and self._burst(excess)
