"""How far a training loss has come since it began, and what it does now."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from watchstep.statistics import Floats
from watchstep_rules.figures.loss_series import LossSeries, noise
from watchstep_rules.figures.robust import medians as medians_of_rows

_SHORT = 20
_EXPLODED = 10.0
"""How far the median of the first losses lies above the first, and the highest above the median, after an explosion.

A low first loss alone (one easy batch) or a loss that begins at nothing and grows (a divergence from a start) has no such overshoot.
"""


class Beginning(NamedTuple):
    """What is kept of a series.

    Attributes:
        seen: losses so far.
        start: median of the first ones, None before there are so many, or where one was not finite; the first, where they exploded.
        lowest: lowest mean of twenty losses in a row, None before there are so many.
        signed: a loss was below zero: this is no measure of error.
        peak: highest of the first ones, where they exploded; 0 where they did not.
    """

    seen: int = 0
    start: float | None = None
    lowest: float | None = None
    signed: bool = False
    peak: float = 0.0


@dataclass(frozen=True)
class Progress:
    """Columns over the rows of a series, float64 of shape (n,), NaN before there are enough losses.

    Attributes:
        start: median of the first losses; the first one, where they exploded.
        peak: the highest of them, where they exploded; 0 where they did not.
        level: mean of the last half of the patience.
        earlier: mean of the half before.
        before_that: mean of half a patience before that, NaN where it reaches into the beginning.
        middle: median over the patience.
        noise: standard deviation from loss to loss, over the patience.
        lowest: lowest mean of twenty losses so far.
        signed: bool: a loss was below zero by then.
    """

    start: Floats
    peak: Floats
    level: Floats
    earlier: Floats
    before_that: Floats
    middle: Floats
    noise: Floats
    lowest: Floats
    signed: NDArray[np.bool_]
    half: int

    @property
    def uncertainty(self) -> Floats:
        """Standard error of ``earlier - level``, were losses independent."""
        return self.noise * math.sqrt(2 / self.half)


def lookback(warmup: int, patience: int) -> int:
    """How many earlier losses `progress` needs."""
    return max(warmup, patience + patience // 2, _SHORT)


def progress(series: LossSeries, past: Beginning, warmup: int, patience: int) -> tuple[Progress, Beginning]:
    """Follow a series.

    Args:
        series: the losses; their context holds `lookback` rows.
        past: as the last call returned it.
        warmup: first losses whose median is the start.
        patience: losses that are looked at, at least 4.
    """
    half = max(2, patience // 2)
    seen = past.seen + 1 + np.arange(len(series.values))
    level = series.trailing(half, lambda windows: windows.mean(axis=1))
    window = series.trailing(2 * half, lambda windows: windows.mean(axis=1))
    longer = series.trailing(3 * half, lambda windows: windows[:, :half].mean(axis=1))
    spread = series.trailing(2 * half, noise)
    short = series.trailing(_SHORT, lambda windows: windows.mean(axis=1))
    medians = series.trailing(warmup, medians_of_rows)
    start = np.full(len(seen), np.nan if past.start is None else past.start)
    peak = np.full(len(seen), past.peak)
    if past.seen < warmup <= past.seen + len(seen):
        place = warmup - past.seen - 1
        first, highest = (series.trailing(warmup, figure)[place] for figure in (_first, _highest))
        start[place:] = medians[place]
        if 0 < _EXPLODED * first <= medians[place] and highest >= _EXPLODED * medians[place]:
            start[place:], peak[place:] = first, highest
    lowest = np.fmin.accumulate(np.concatenate([[np.nan if past.lowest is None else past.lowest], short]))[1:]
    signed = np.logical_or.accumulate(np.concatenate([[past.signed], series.values < 0]))[1:]
    young = seen < warmup + 2 * half
    columns = Progress(
        start=start,
        peak=peak,
        level=np.where(young, np.nan, level),
        earlier=2 * window - level,
        before_that=np.where(seen < warmup + 3 * half, np.nan, longer),
        middle=series.trailing(2 * half, medians_of_rows),
        noise=spread,
        lowest=lowest,
        signed=signed,
        half=half,
    )
    return columns, Beginning(
        int(seen[-1]), _known(start[-1]), _known(lowest[-1]), bool(signed[-1]), float(peak[-1])
    )


def _first(windows: Floats) -> Floats:
    return windows[:, 0]


def _highest(windows: Floats) -> Floats:
    highest: Floats = windows.max(axis=1)
    return highest


def _known(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
