"""Progress of the training loss: its fall since the start, and its current course.

It separates a training that has converged from one that is stuck. `follow_rates` finds jumps and drops of the learning rate, from the
recorded ``optimizer:learning_rate/0``, which has a row at every change.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from watchstep.format.block import Block, view
from watchstep.format.statistics import Floats
from watchstep.format.tensors import MODES, TensorInfo
from watchstep_rules.signals.loss_series import NOTHING, LossSeries, Trend, noise
from watchstep_rules.signals.robust import medians as medians_of_rows
from watchstep_rules.signals.series import SeriesRows
from watchstep_rules.signals.tensor_selection import has_role, rows_where

_NAME = re.compile(r"(?:.*\.)?optimizer(?:_\d+)?:learning_rate/")
_WORDS = re.compile(
    r"; (?P<name>\S+:learning_rate/\S*) (?:fell|rose) from (?P<before>\S+) to (?P<after>\S+) at step (?P<step>\d+)$"
)
_ABRUPT = 3.0
_TRAIN = MODES.index("train")


class RateChange(BaseModel):
    """An abrupt change of a learning rate: by a factor of at least three from one value to the next.

    Attributes:
        name: the metric; of several that changed at one step, the one with the largest change.
        step: the step of the first update with the new value.
        before: the value before.
        after: the new value.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    step: int
    before: float
    after: float

    @property
    def words(self) -> str:
        """The change as a suffix of a finding's message."""
        verb = "fell" if self.after < self.before else "rose"
        return f"; {self.name} {verb} from {self.before:.3g} to {self.after:.3g} at step {self.step}"

    @classmethod
    def parse(cls, message: str) -> RateChange | None:
        """The change at the end of a finding's message; None if there is none."""
        match = _WORDS.search(message)
        if match is None:
            return None
        try:
            before, after = float(match["before"]), float(match["after"])
        except ValueError:
            return None
        return cls(name=match["name"], step=int(match["step"]), before=before, after=after)


class Rates(BaseModel):
    """The last value of each learning rate, and the last change that was abrupt."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    last: dict[str, float] = {}
    change: RateChange | None = None


def follow_rates(rates: Rates, block: Block) -> tuple[Rates, list[RateChange]]:
    """Follow the learning rates through a block of whole steps.

    Returns:
        The rates after the block, and the abrupt changes by step, starting with the last one before the block. The lowest worker counts.
    """
    rows = np.flatnonzero(
        rows_where(block, _is_rate) & (block.mode == _TRAIN) & (block.statistics.finite > 0)
    )
    changes = [] if rates.change is None else [rates.change]
    if not len(rows):
        return rates, changes
    last = dict(rates.last)
    statistics = block.statistics
    lowest: dict[tuple[int, str], float] = {}
    for row in rows[np.lexsort((block.worker[rows], block.step[rows]))].tolist():
        lowest.setdefault((int(block.step[row]), block.info(row).name), float(statistics.mean[row]))
    for (step, name), value in sorted(lowest.items()):
        before = last.get(name, value)
        last[name] = value
        # A rate that rises from zero is a warm-up.
        if (
            min(before, value) < 0
            or before == 0
            or max(before, value) < _ABRUPT * min(before, value)
            or before == value
        ):
            continue
        change = RateChange(name=name, step=step, before=before, after=value)
        if changes and changes[-1].step == step:
            if _ratio(change) > _ratio(changes[-1]):
                changes[-1] = change
        else:
            changes.append(change)
    return Rates(last=last, change=changes[-1] if changes else None), changes


def last_before(changes: list[RateChange], step: int, within: int) -> RateChange | None:
    """The last change up to a step, if it is at most ``within`` steps before."""
    change = next((change for change in reversed(changes) if change.step <= step), None)
    return change if change is not None and step - change.step <= within else None


def _ratio(change: RateChange) -> float:
    low, high = sorted((change.before, change.after))
    return high / low if low > 0 else np.inf


def _is_rate(info: TensorInfo) -> bool:
    return info.role == "metric" and _NAME.match(info.name) is not None


_FIRST = 5
_MEMORY = 0.9
_NEWEST = 3


class LossProgress(NamedTuple):
    """The progress of a loss so far.

    Attributes:
        seen: number of finite values, up to the first few.
        first: mean of the first few values.
        smooth: exponentially weighted mean over about the last ten values.
        newest: magnitudes of the last three values, the newest last.
        signs: 1 if a value was negative, plus 2 if one was positive.
    """

    seen: int = 0
    first: float = 0.0
    smooth: float = 0.0
    newest: tuple[float, ...] = ()
    signs: int = 0

    def after(self, value: float) -> LossProgress:
        """Add a finite value."""
        newest = (*self.newest, abs(value))[-_NEWEST:]
        signs = self.signs | (value < 0) | 2 * (value > 0)
        if self.seen < _FIRST:
            mean = (self.first * self.seen + value) / (self.seen + 1)
            return LossProgress(self.seen + 1, mean, mean, newest, signs)
        smooth = _MEMORY * self.smooth + (1 - _MEMORY) * value
        return LossProgress(self.seen, self.first, smooth, newest, signs)

    @property
    def low(self) -> float:
        """The current level of the loss: its mean, or the largest of the last three values if that is less.

        The mean lags far behind a loss that falls by a factor of ten at each step (full batches, second-order optimizers).
        """
        return min(abs(self.smooth), max(self.newest, default=math.inf))

    def converged(self, share: float) -> bool:
        """Whether the loss has fallen to a share of its first values."""
        return self.seen > 0 and self.low <= share * abs(self.first)


class Courses(NamedTuple):
    """The losses over the steps of a block, after each of them.

    Attributes:
        known: whether there has been a loss, bool of shape (steps,).
        names: names of the losses.
        low: the level of each loss, shape (steps,); infinite before its first value.
        first: the mean of the first few values of each loss, shape (steps,).
        risen: whether each loss is not below its first values, and has had one sign, shape (steps,).
        present: whether each loss has a value at the step, shape (steps,).
    """

    known: NDArray[np.bool_]
    names: list[str]
    low: list[Floats]
    first: list[Floats]
    risen: list[NDArray[np.bool_]]
    present: list[NDArray[np.bool_]]

    def any_converged(self, share: float) -> NDArray[np.bool_]:
        """Whether some loss has fallen to a share of its first values, by step."""
        converged = np.zeros(len(self.known), np.bool_)
        for low, first in zip(self.low, self.first, strict=True):
            converged |= low <= share * np.abs(first)
        return converged

    def any_named(self, chosen: Callable[[str], bool]) -> NDArray[np.bool_]:
        """Whether there has been a loss with a chosen name, by step."""
        exists = np.zeros(len(self.known), np.bool_)
        for name, low in zip(self.names, self.low, strict=True):
            if chosen(name):
                exists |= np.isfinite(low)
        return exists


def follow_loss(
    kept: Mapping[str, LossProgress], block: Block, numbers: NDArray[np.intp]
) -> tuple[dict[str, LossProgress], Courses]:
    """Follow the losses of a block.

    Args:
        kept: the progress of each loss before the block, by ``loss@worker``.
        block: rows by step.
        numbers: the index of each row's step, ascending.

    Returns:
        The progress of each loss after the block, and their courses over its steps.
    """
    steps = int(numbers[-1]) + 1 if len(numbers) else 0
    rows = np.flatnonzero(rows_where(block, has_role, "loss"))
    rows = rows[block.statistics.finite[rows] > 0]
    losses, courses = dict(kept), Courses(np.zeros(steps, np.bool_), [], [], [], [], [])
    loss_rows = view(block, rows)
    by_series = SeriesRows.of(loss_rows)
    rows_of_series = dict(zip(by_series.names, by_series.rows(), strict=True))
    for name in [*kept, *(name for name in rows_of_series if name not in kept)]:
        before = losses.get(name, LossProgress())
        positions = rows_of_series.get(name, np.empty(0, np.intp))
        course = _course(before, loss_rows.statistics.mean[positions].tolist()) if len(positions) else []
        losses[name] = course[-1] if course else before
        step_numbers = numbers[rows[positions]]
        course_index = np.searchsorted(step_numbers, np.arange(steps), side="right")
        exists = np.array([point.seen > 0 for point in (before, *course)], np.bool_)[course_index]
        courses.known[:] |= exists
        low = np.array([point.low for point in (before, *course)])[course_index]
        first = np.array([point.first for point in (before, *course)])[course_index]
        courses.names.append(name.rpartition("@")[0])
        courses.low.append(np.where(exists, low, np.inf))
        courses.first.append(first)
        risen = [p.smooth >= p.first and p.signs in (1, 2) for p in (before, *course)]
        courses.risen.append(np.array(risen, np.bool_)[course_index] & exists)
        courses.present.append(np.isin(np.arange(steps), step_numbers))
    return losses, courses


def _course(before: LossProgress, values: list[float]) -> list[LossProgress]:
    course = []
    for value in values:
        before = before.after(value)
        course.append(before)
    return course


_SHORT = 20
_PROGRESS = 4.0
"""Standard errors by which a loss must fall over its whole past: noise falls this far once in 30,000 checks."""
_CAPPED = 4.0
"""Cap of a loss in its trend, as a multiple of its start: one explosion would tilt the line permanently."""
_EXPLODED = 10.0
"""Minimum factor from the first loss to the median of the first losses, and from the median to the highest, in an explosion.

A low first loss alone (one easy batch), or a loss that grows from zero (divergence from the start), has no such overshoot.
"""


class Beginning(NamedTuple):
    """State of a series.

    Attributes:
        seen: number of losses so far.
        start: median of the first losses, or the first loss if they exploded. None before there are enough, if one was not finite,
            if the median or the first loss is nearly zero, and if the attempt resumes a run.
        lowest: lowest mean of twenty consecutive losses, None before there are twenty.
        signed: whether a loss was negative, so that it does not measure an error.
        peak: highest of the first losses if they exploded, else 0.
        first_step: step of the first loss.
        trend: trend of the losses after the first losses.
        fell: whether the trend has shown a fall.
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

    Columns that not every rule needs are computed on first use.

    Attributes:
        series: the losses.
        warmup: number of first losses; their median is the start.
        half: half of the patience, in losses.
        seen: number of losses so far.
        start: median of the first losses, or the first loss if they exploded.
        peak: highest of the first losses if they exploded, else 0.
        lowest: lowest mean of twenty losses so far.
        signed: bool: a loss has been negative.
        fell: bool: since the first losses, the loss has fallen by four standard errors of its trend, at this loss or before.
        trends: trend of the losses after the first losses, at each row.
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
        """Mean over the last half of the patience."""
        return np.where(self.seen < self.warmup + 2 * self.half, np.nan, self._newest)

    @cached_property
    def earlier(self) -> Floats:
        """Mean over the half of the patience before `level`."""
        return 2 * self.series.trailing(2 * self.half, _mean) - self._newest

    @cached_property
    def before_that(self) -> Floats:
        """Mean over half a patience before `earlier`; NaN where it overlaps the first losses."""
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
        """Standard error of the fall; infinite before there are ten losses."""
        return np.array([trend.error for trend in self.trends])

    @property
    def uncertainty(self) -> Floats:
        """Standard error of ``earlier - level`` for independent losses."""
        return self.noise * math.sqrt(2 / self.half)

    @property
    def mean(self) -> Floats:
        """Mean over the patience."""
        return (self.earlier + self.level) / 2

    @property
    def mean_error(self) -> Floats:
        """Standard error of `mean` for independent losses."""
        return self.noise / math.sqrt(2 * self.half)


def lookback(warmup: int, patience: int) -> int:
    """Return the number of earlier losses that `progress` needs."""
    return max(warmup, patience + patience // 2, _SHORT)


def progress(
    series: LossSeries, past: Beginning, warmup: int, patience: int
) -> tuple[LossProgressColumns, Beginning]:
    """Follow a series.

    Args:
        series: the losses; their context has `lookback` rows.
        past: state from the last call.
        warmup: number of first losses; their median is the start.
        patience: number of losses to consider, at least 4.
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
    """Return whether the attempt resumes a run: its first step is later than three loss intervals plus the warm-up."""
    return first > warmup + 3 * (later - first) / max(1, warmup - 1)


def _trends(values: Floats, start: Floats, since_warmup: NDArray[np.int64], trend: Trend) -> list[Trend]:
    """Return the trend after each loss, without the first losses; without a start, all losses are left out."""
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
