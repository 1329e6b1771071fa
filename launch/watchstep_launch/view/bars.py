"""A loss as a line of bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

_NOT_FINITE = "\N{MULTIPLICATION SIGN}"
_HEIGHTS = "▁▂▃▄▅▆▇█"
_FEWEST = 8

Points = Sequence[float | None]
"""Values, None where there is none that is finite."""


@dataclass(frozen=True)
class Bars:
    """A bar for each point; where they do not fit, one for several points."""

    points: tuple[float | None, ...]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """From a few bars to all of them."""
        return Measurement(min(_FEWEST, len(self.points)), len(self.points))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """As many as there is room for."""
        yield Text(line_of_bars(fewer(self.points, options.max_width)), no_wrap=True, overflow="crop")


def line_of_bars(points: Points) -> str:
    """From the least to the largest; a cross where something is not finite."""
    finite = [value for value in points if value is not None and math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    return "".join(_bar(value, low, high) for value in points)


def fewer(points: Points, most: int) -> Points:
    """Their means in at most so many points; none of several of which one is not finite."""
    count, most = len(points), max(1, most)
    if count <= most:
        return points
    return [_mean(points[count * place // most : count * (place + 1) // most]) for place in range(most)]


def _mean(points: Points) -> float | None:
    finite = [value / len(points) for value in points if value is not None and math.isfinite(value)]
    return math.fsum(finite) if len(finite) == len(points) else None


def _bar(value: float | None, low: float, high: float) -> str:
    if value is None or not math.isfinite(value):
        return _NOT_FINITE
    share = (value / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.0
    return _HEIGHTS[min(len(_HEIGHTS) - 1, int(share * len(_HEIGHTS)))]
