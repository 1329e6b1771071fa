"""How far the training loss has come: what tells a training that has converged from one that is stuck."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from watchstep.format.block import Block, view
from watchstep.format.statistics import Floats
from watchstep_rules.signals.series import SeriesRows
from watchstep_rules.signals.tensor_selection import has_role, rows_where

_FIRST = 5
_MEMORY = 0.9
_NEWEST = 3


class LossProgress(NamedTuple):
    """A loss so far.

    Attributes:
        seen: finite values, counted up to the first few.
        first: mean of the first few.
        smooth: exponentially weighted mean over about the last ten.
        newest: sizes of the last three, the newest last.
    """

    seen: int = 0
    first: float = 0.0
    smooth: float = 0.0
    newest: tuple[float, ...] = ()

    def after(self, value: float) -> LossProgress:
        """With one more finite value."""
        newest = (*self.newest, abs(value))[-_NEWEST:]
        if self.seen < _FIRST:
            mean = (self.first * self.seen + value) / (self.seen + 1)
            return LossProgress(self.seen + 1, mean, mean, newest)
        return LossProgress(self.seen, self.first, _MEMORY * self.smooth + (1 - _MEMORY) * value, newest)

    @property
    def low(self) -> float:
        """What the loss has come down to: its mean, or the largest of the last three where that is less.

        The mean lags: a loss that falls by ten at each step (full batches, second-order optimizers) is long gone from it.
        """
        return min(abs(self.smooth), max(self.newest, default=math.inf))

    def converged(self, share: float) -> bool:
        """Whether the loss has come down to a share of what it was at first."""
        return self.seen > 0 and self.low <= share * abs(self.first)


class Courses(NamedTuple):
    """The losses over the steps of a block, after each of them.

    Attributes:
        known: whether there has been a loss, bool of shape (steps,).
        names: of the losses.
        low: of each loss what it has come down to, shape (steps,), infinite before its first value.
        first: of each loss the mean of the first few, shape (steps,).
    """

    known: NDArray[np.bool_]
    names: list[str]
    low: list[Floats]
    first: list[Floats]

    def any_converged(self, share: float) -> NDArray[np.bool_]:
        """Whether some loss has come down to a share of what it was at first, by step."""
        found = np.zeros(len(self.known), np.bool_)
        for low, first in zip(self.low, self.first, strict=True):
            found |= low <= share * np.abs(first)
        return found

    def any_named(self, chosen: Callable[[str], bool]) -> NDArray[np.bool_]:
        """Whether there has been a loss whose name is chosen, by step."""
        found = np.zeros(len(self.known), np.bool_)
        for name, low in zip(self.names, self.low, strict=True):
            if chosen(name):
                found |= np.isfinite(low)
        return found


def follow(
    kept: Mapping[str, LossProgress], block: Block, numbers: NDArray[np.intp]
) -> tuple[dict[str, LossProgress], Courses]:
    """Follow the losses of a block.

    Args:
        kept: of each loss, by ``loss@worker``.
        block: rows by step.
        numbers: the number of each row's step, ascending.

    Returns:
        What is to be kept of each loss, and how they go from step to step.
    """
    steps = int(numbers[-1]) + 1 if len(numbers) else 0
    rows = np.flatnonzero(rows_where(block, has_role, "loss"))
    rows = rows[block.statistics.finite[rows] > 0]
    losses, courses = dict(kept), Courses(np.zeros(steps, np.bool_), [], [], [])
    held = view(block, rows)
    by_series = SeriesRows.of(held)
    of_series = dict(zip(by_series.names, by_series.rows(), strict=True))
    for name in [*kept, *(name for name in of_series if name not in kept)]:
        before = losses.get(name, LossProgress())
        places = of_series.get(name, np.empty(0, np.intp))
        course = _course(before, held.statistics.mean[places].tolist()) if len(places) else []
        losses[name] = course[-1] if course else before
        at = numbers[rows[places]]
        every = np.searchsorted(at, np.arange(steps), side="right")
        known = np.array([one.seen > 0 for one in (before, *course)], np.bool_)[every]
        courses.known[:] |= known
        low = np.array([one.low for one in (before, *course)])[every]
        first = np.array([one.first for one in (before, *course)])[every]
        courses.names.append(name.rpartition("@")[0])
        courses.low.append(np.where(known, low, np.inf))
        courses.first.append(first)
    return losses, courses


def _course(before: LossProgress, values: list[float]) -> list[LossProgress]:
    course = []
    for value in values:
        before = before.after(value)
        course.append(before)
    return course
