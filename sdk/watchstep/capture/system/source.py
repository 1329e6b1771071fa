"""What the sampler asks: something that knows some figures."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Protocol

_PART = 65_536


class FigureSource(Protocol):
    """Knows figures of one kind."""

    def sample(self, seconds: float) -> dict[str, float]:
        """Figures by name, as they are now.

        Args:
            seconds: since the last call; rates are over that, and left out at the first call.

        Raises:
            OSError, ValueError: they cannot be had.
        """
        ...

    def close(self) -> None:
        """Give back what is held."""
        ...


class Counters:
    """Totals that only grow, and what was added to each since it was last looked at."""

    def __init__(self) -> None:
        self._before: Mapping[str, float] = {}

    def added(self, totals: Mapping[str, float]) -> dict[str, float]:
        """What was added, by name; a total that is new, or fell, is left out."""
        before, self._before = self._before, totals
        return {
            name: total - before[name]
            for name, total in totals.items()
            if name in before and total >= before[name]
        }


def content(path: str) -> bytes:
    """What a file of the kernel's says, with the least work.

    Raises:
        OSError: it cannot be read.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = part = os.read(file, _PART)
        while part:  # a reading gives a page of some files at most
            part = os.read(file, _PART)
            text += part
    finally:
        os.close(file)
    return text
