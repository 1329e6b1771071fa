"""Deviations: the tensors that left the range of their own run at a step, the most unusual first. They are evidence for a reader of an alert.

A rule fires for one tensor. Others may have changed at the same step, or more. `deviations_of` compares each statistic of each
tensor at a step with its own earlier values, and ranks the tensors. It never raises an alert.

**Usual range.** The last `MAX_STEPS` values of a series (tensor, worker, replica, stage, mode) before the step. A resistant line
through the medians of their first and last third removes drift. The median absolute deviation of what remains is the spread. Up to a
third of the values may be outliers without moving either. Statistics that are never negative are compared by their logarithm, so
that a fall to a thousandth is as unusual as a rise by a thousand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from watchstep.format.statistics import Floats
from watchstep.format.tensors import MODES, TensorInfo
from watchstep.reading import queries
from watchstep.reading.columns import Columns, Selection
from watchstep.reading.run import Run
from watchstep_rules.rule import cause_rank

STATISTICS = ("mean", "rms", "abs_max", "nonfinite_share")
"""The compared statistics. New nonfinite values rank first."""

MAX_DEVIATIONS = 5
MIN_SPREADS = 6.0
"""In normal noise, one value in 500 million is so far away. Deviations are evidence, and need not be exhaustive."""

MIN_STEPS = 16
"""Minimum number of earlier values of a series. With fewer, the spread is not meaningful."""

_MIN_STEPS_OF_SHARE = 3
"""The same for the share of values that are not finite: it is usually 0, without a spread."""

MAX_STEPS = 200
ONSET_STEPS = 20
"""A series without a row at the step is compared at its first row within this number of steps."""

_MAX_SERIES = 2000
_MAX_ROWS = 500_000
_MAX_SPREADS = 1e6
_FEWEST_FOR_READ = 50
_READ_STEPS = (200, 2_000, 20_000)

_LEAST_SPREAD = 0.01
"""Spread, relative to the level, of a series that hardly changes; otherwise rounding in a frozen tensor would rank first.

The level of a mean is at least the median rms of its tensor.
"""

_TINY = 1e-38
_LARGEST = float(np.finfo(np.float64).max)
_MAX_EXPONENT = 709.0
_MODES = (MODES.index("train"), MODES.index("global"))
_NO_WIDTH = 1e-30
"""A usual range that is narrower has one value."""
_SERIES = ("tensor", "worker", "replica", "stage", "mode")


class Deviation(BaseModel):
    """A tensor whose statistic left its usual range."""

    model_config = ConfigDict(frozen=True)

    tensor: str
    statistic: str = Field(
        description="The statistic of this tensor that deviates most: mean, rms, abs_max or nonfinite_share."
    )
    worker: int = Field(description="The worker whose values deviate most.")
    step: int = Field(description="The first recorded step at or after the requested step.")
    value: float = Field(description="The value at that step.")
    low: float = Field(
        description="The lower end of the usual range: three spreads below the expected value."
    )
    high: float = Field(
        description="The upper end of the usual range: three spreads above the expected value."
    )
    spreads: float = Field(
        description="Distance of the value from the expected value in spreads; at most 1,000,000."
    )

    def as_line(self) -> str:
        """Format the deviation as one line of text."""
        if self.statistic == "nonfinite_share":
            return f"{self.tensor}: {self.value:.3%} of its elements are not finite at step {self.step} (worker {self.worker})"
        if self.high - self.low < _NO_WIDTH:
            usual = (self.low + self.high) / 2
            return (
                f"{self.tensor}: {self.statistic} {self.value:.3g} at step {self.step}, always {usual:.3g} before "
                f"(worker {self.worker})"
            )
        away = f"more than {_MAX_SPREADS:,.0f}" if self.spreads >= _MAX_SPREADS else f"{self.spreads:,.0f}"
        return (
            f"{self.tensor}: {self.statistic} {self.value:.3g} at step {self.step}, usually {self.low:.3g} to {self.high:.3g}, "
            f"{away} deviations away (worker {self.worker})"
        )


@dataclass(frozen=True)
class RunDeviations:
    """The result of `read_deviations`.

    Attributes:
        deviations: deviations, the most unusual first.
        tensors_left_out: number of tensors that were not compared because there are too many.
        superseded: whether a later attempt repeated the step, so that the values of this attempt are no longer read.
    """

    deviations: list[Deviation]
    tensors_left_out: int = 0
    superseded: bool = False


def deviations_of(blocks: Sequence[Columns], names: Sequence[str], step: int) -> list[Deviation]:
    """Rank tensors by their distance from their own earlier values.

    Args:
        blocks: columns of `STATISTICS` and of identity, each of shape (n,), with rows in any order and split anywhere.
        names: names of the tensors that the column ``tensor`` indexes.
        step: step to compare with the steps before it.

    Returns:
        At most `MAX_DEVIATIONS`, one for each tensor, the most unusual first, ties in the order of ``names``.
    """
    worst: dict[int, Deviation] = {}
    for columns in _series(blocks):
        index = int(columns["tensor"][0])
        for statistic in STATISTICS:
            with np.errstate(all="ignore"):
                deviation = _deviation(columns, names[index], statistic, step)
            if deviation is not None and (index not in worst or _rank(deviation) < _rank(worst[index])):
                worst[index] = deviation
    order = sorted(worst, key=lambda index: (_rank(worst[index]), index))
    return [worst[index] for index in order[:MAX_DEVIATIONS]]


def _rank(deviation: Deviation) -> tuple[bool, float]:
    """Return the sort key, most unusual first: new nonfinite values, then by spreads."""
    is_new_damage = deviation.statistic == "nonfinite_share" and deviation.spreads >= _MAX_SPREADS
    return not is_new_damage, -deviation.spreads


def read_deviations(run: Run, attempt: str, step: int) -> RunDeviations:
    """Compute `deviations_of` a run in train mode, from a bounded number of rows.

    Args:
        run: the run.
        attempt: attempt of the step. Earlier steps that it did not run itself come from the attempt before it.
        step: usually the first step of an alert's findings.

    Raises:
        StoreError: the store cannot be read.
        OverBudgetError: reading exceeds the run's budget.
    """
    attempts = run.index.attempts()
    later = attempts[attempts.index(attempt) + 1 :] if attempt in attempts else []
    if any(located.object.first <= step for name in later for located in run.index.objects(name)):
        return RunDeviations([], superseded=True)
    infos = run.index.tensors()
    onset = Selection((), None, step, step + ONSET_STEPS - 1)
    onset_columns = run.index.consistently(partial(run.index.collect, onset))
    workers = max(1, len(np.unique(onset_columns["worker"])))
    chosen = sorted(infos, key=_order)[: max(1, _MAX_SERIES // workers)]
    tensor_names = frozenset(info.name for info in chosen)
    columns: Columns = {}
    for window in _READ_STEPS:
        first = max(0, step - min(window, max(MAX_STEPS, _MAX_ROWS // (len(chosen) * workers or 1))))
        selection = Selection((), tensor_names, first, step + ONSET_STEPS - 1)
        columns = run.index.consistently(
            partial(queries.columns_of, run.index, STATISTICS, selection, merge=True)
        )
        if first == 0 or len(np.unique(columns["step"])) >= _FEWEST_FOR_READ:
            break
    # Ties, such as of tensors that are all NaN, are in the order of data flow.
    flow = sorted(range(len(infos)), key=lambda place: (cause_rank(infos[place]), infos[place].name))
    places = np.empty(len(infos), np.int64)
    places[flow] = np.arange(len(infos))
    columns = {**columns, "tensor": places[columns["tensor"]]}
    deviations = deviations_of([columns], [infos[place].name for place in flow], step)
    return RunDeviations(deviations, len(infos) - len(chosen))


def _order(info: TensorInfo) -> tuple[int, str]:
    return info.order, info.name


def _series(blocks: Sequence[Columns]) -> Iterator[Columns]:
    """Yield the rows of each series by step, ties by value, so that the result does not depend on the order of blocks."""
    needed = (*_SERIES, "step", *STATISTICS)
    columns = {name: np.concatenate([block[name] for block in blocks]) for name in needed} if blocks else {}
    if not columns:
        return
    rows = np.flatnonzero(np.isin(columns["mode"], _MODES))
    rows = rows[np.lexsort([columns[name][rows] for name in reversed(needed)])]
    if not len(rows):
        return
    changes = np.zeros(len(rows), np.bool_)
    for name in _SERIES:
        changes[1:] |= columns[name][rows][1:] != columns[name][rows][:-1]
    for series_rows in np.split(rows, np.flatnonzero(changes)):
        yield {name: column[series_rows] for name, column in columns.items()}


def _deviation(columns: Columns, name: str, statistic: str, step: int) -> Deviation | None:
    steps: NDArray[np.int64] = columns["step"].astype(np.int64)
    values: Floats = columns[statistic].astype(np.float64)
    onset = np.flatnonzero((steps >= step) & (steps < step + ONSET_STEPS) & np.isfinite(values))
    before = np.flatnonzero((steps < step) & np.isfinite(values))[-MAX_STEPS:]
    if not len(onset) or len(before) < (_MIN_STEPS_OF_SHARE if statistic == "nonfinite_share" else MIN_STEPS):
        return None
    onset_step, value = int(steps[onset[0]]), float(values[onset[0]])
    past = values[before]
    logarithmic = statistic in ("rms", "abs_max")
    if logarithmic and float(np.median(past)) <= 0:
        return None  # a tensor of zeros, such as a bias before its first update, has no scale to compare with
    if logarithmic:
        past, current = np.log(np.maximum(past, _TINY)), float(np.log(max(value, _TINY)))
    else:
        current = value
    distance = (steps[before] - onset_step).astype(np.float64)
    slope = _slope(distance, past)
    residuals = past - slope * distance
    expected = float(np.median(residuals))
    level = 1.0 if logarithmic else abs(expected)
    if statistic == "mean":
        # A mean is compared with the size of the tensor's values: one that is zero by symmetry has no level of its own.
        size = columns["rms"][before].astype(np.float64)
        level = max(level, float(np.median(size[np.isfinite(size)])) if np.isfinite(size).any() else 0.0)
        if level == 0:
            return None
    floor = _LEAST_SPREAD * level
    spread = max(1.4826 * float(np.median(np.abs(residuals - expected))), floor, _TINY)
    spreads = min(abs(current - expected) / spread, _MAX_SPREADS)
    if not spreads >= MIN_SPREADS:  # NaN from overflow is not a deviation
        return None
    low, high = expected - 3 * spread, expected + 3 * spread
    if logarithmic:
        low, high = math.exp(min(low, _MAX_EXPONENT)), math.exp(min(high, _MAX_EXPONENT))
    return Deviation(
        tensor=name,
        statistic=statistic,
        worker=int(columns["worker"][onset[0]]),
        step=onset_step,
        value=value,
        low=max(low, -_LARGEST),
        high=min(high, _LARGEST),
        spreads=spreads,
    )


def _slope(x: Floats, y: Floats) -> float:
    """Return the slope between the medians of the first and the last third of the points, which are ordered by ``x``."""
    third = len(x) // 3
    width = float(np.median(x[-third:]) - np.median(x[:third]))
    return float(np.median(y[-third:]) - np.median(y[:third])) / width if width else 0.0
