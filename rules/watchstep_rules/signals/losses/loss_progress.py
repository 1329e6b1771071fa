"""How far a training loss has come since it began, and what it does now."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from watchstep.format.statistics import Floats
from watchstep_rules.signals.losses.loss_series import NOTHING, LossSeries, noise
from watchstep_rules.signals.losses.trend import Trend
from watchstep_rules.signals.ranges.robust import medians as medians_of_rows

_SHORT = 20
_PROGRESS = 4.0
"""Standard errors by which a loss must have fallen over all of its past: noise is so far down once in 30,000 looks."""
_CAPPED = 4.0
"""Times its start a loss counts as at most in its trend: one explosion would tilt the line for good."""
_EXPLODED = 10.0
"""How far the median of the first losses lies above the first, and the highest above the median, after an explosion.

A low first loss alone (one easy batch) or a loss that begins at nothing and grows (a divergence from a start) has no such overshoot.
"""


class Beginning(NamedTuple):
    """What is kept of a series.

    Attributes:
        seen: losses so far.
        start: median of the first ones, None before there are so many, where one was not finite, where it or the first one is next to nothing,
            and where the attempt resumes a run; the first, where they exploded.
        lowest: lowest mean of twenty losses in a row, None before there are so many.
        signed: a loss was below zero: this is no measure of error.
        peak: highest of the first ones, where they exploded; 0 where they did not.
        first_step: of the first loss.
        trend: of the losses after the first ones.
        fell: the trend has shown a fall.
    """

    seen: int = 0
    start: float | None = None
    lowest: float | None = None
    signed: bool = False
    peak: float = 0.0
    first_step: int = 0
    trend: Trend = Trend()
    fell: bool = False


@dataclass(frozen=True)
class LossProgressColumns:
    """Columns over the rows of a series, float64 of shape (n,), NaN before there are enough losses.

    What not every rule asks for is worked out where it is asked for.

    Attributes:
        series: the losses.
        warmup: first losses, whose median is the start.
        half: half of the patience, in losses.
        seen: losses so far.
        start: median of the first losses; the first one, where they exploded.
        peak: the highest of them, where they exploded; 0 where they did not.
        lowest: lowest mean of twenty losses so far.
        signed: bool: a loss was below zero by then.
        fell: bool: since the first losses it has fallen by four standard errors of its trend, at this loss or before.
        trends: of the losses since the first ones, as of each row.
    """

    series: LossSeries
    warmup: int
    half: int
    seen: NDArray[np.int64]
    start: Floats
    peak: Floats
    lowest: Floats
    signed: NDArray[np.bool_]
    fell: NDArray[np.bool_]
    trends: list[Trend]

    @cached_property
    def _newest(self) -> Floats:
        return self.series.trailing(self.half, _mean)

    @cached_property
    def level(self) -> Floats:
        """Mean of the last half of the patience."""
        return np.where(self.seen < self.warmup + 2 * self.half, np.nan, self._newest)

    @cached_property
    def earlier(self) -> Floats:
        """Mean of the half before."""
        return 2 * self.series.trailing(2 * self.half, _mean) - self._newest

    @cached_property
    def before_that(self) -> Floats:
        """Mean of half a patience before that, NaN where it reaches into the beginning."""
        longer = self.series.trailing(3 * self.half, lambda windows: _mean(windows[:, : self.half]))
        return np.where(self.seen < self.warmup + 3 * self.half, np.nan, longer)

    @cached_property
    def middle(self) -> Floats:
        """Median over the patience."""
        return self.series.trailing(2 * self.half, medians_of_rows)

    @cached_property
    def noise(self) -> Floats:
        """Standard deviation from loss to loss, over the patience."""
        return self.series.trailing(2 * self.half, noise)

    @cached_property
    def confidence(self) -> Floats:
        """Fall of the trend, in standard errors."""
        return np.array([trend.confidence for trend in self.trends])

    @cached_property
    def error(self) -> Floats:
        """Standard error of that fall; infinite before there are ten losses."""
        return np.array([trend.error for trend in self.trends])

    @property
    def uncertainty(self) -> Floats:
        """Standard error of ``earlier - level``, were losses independent."""
        return self.noise * math.sqrt(2 / self.half)

    @property
    def mean(self) -> Floats:
        """Over the patience."""
        return (self.earlier + self.level) / 2

    @property
    def mean_error(self) -> Floats:
        """Standard error of `mean`, were losses independent."""
        return self.noise / math.sqrt(2 * self.half)


def lookback(warmup: int, patience: int) -> int:
    """How many earlier losses `progress` needs."""
    return max(warmup, patience + patience // 2, _SHORT)


def progress(
    series: LossSeries, past: Beginning, warmup: int, patience: int
) -> tuple[LossProgressColumns, Beginning]:
    """Follow a series.

    Args:
        series: the losses; their context holds `lookback` rows.
        past: as the last call returned it.
        warmup: first losses whose median is the start.
        patience: losses that are looked at, at least 4.
    """
    half = max(2, patience // 2)
    seen = past.seen + 1 + np.arange(len(series.values))
    short = series.trailing(_SHORT, _mean)
    start = np.full(len(seen), np.nan if past.start is None else past.start)
    peak = np.full(len(seen), past.peak)
    first_step = past.first_step if past.seen else int(series.steps[0])
    if past.seen < warmup <= past.seen + len(seen):
        place = warmup - past.seen - 1
        first, highest = (series.trailing(warmup, figure)[place] for figure in (_first, _highest))
        start[place:] = middle = series.trailing(warmup, medians_of_rows)[place]
        if NOTHING < _EXPLODED * first <= middle and highest >= _EXPLODED * middle:
            start[place:], peak[place:] = first, highest
        if _resumes(first_step, int(series.steps[place]), warmup) or not min(first, start[place]) > NOTHING:
            start[place:], peak[place:] = np.nan, 0.0
    lowest = np.fmin.accumulate(np.concatenate([[np.nan if past.lowest is None else past.lowest], short]))[1:]
    signed = np.logical_or.accumulate(np.concatenate([[past.signed], series.values < 0]))[1:]
    trends = _trends(series.values, start, seen - warmup, past.trend)
    has_fallen = [trend.confidence >= _PROGRESS for trend in trends]
    fell = np.logical_or.accumulate([past.fell, *has_fallen])[1:]
    columns = LossProgressColumns(series, warmup, half, seen, start, peak, lowest, signed, fell, trends)
    return columns, Beginning(
        int(seen[-1]),
        _known(start[-1]),
        _known(lowest[-1]),
        bool(signed[-1]),
        float(peak[-1]),
        first_step,
        trends[-1],
        bool(fell[-1]),
    )


def _resumes(first: int, later: int, warmup: int) -> bool:
    """Whether losses begin so late that the attempt goes on with a run: later than three of their distances, and the warm-up."""
    return first > warmup + 3 * (later - first) / max(1, warmup - 1)


def _trends(values: Floats, start: Floats, since_warmup: NDArray[np.int64], trend: Trend) -> list[Trend]:
    """The trend after each loss; the first losses are left out, and where there is no start all are."""
    caps = np.where(since_warmup > 0, _CAPPED * start, np.nan)
    trends = []
    for value in np.where(np.isnan(values), np.nan, np.minimum(values, caps)).tolist():
        trend = trend.after(value)
        trends.append(trend)
    return trends


def _mean(windows: Floats) -> Floats:
    mean: Floats = windows.mean(axis=1)
    return mean


def _first(windows: Floats) -> Floats:
    return windows[:, 0]


def _highest(windows: Floats) -> Floats:
    highest: Floats = windows.max(axis=1)
    return highest


def _known(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
