"""The fixed row of figures for one tensor at one step, in columns, and how rows merge.

Sums and extremes are over *finite* elements; ``count`` is over all. Rows of disjoint shards merge without the
data: they form a commutative monoid whose counts, extremes and histograms are exact and whose sums carry float64
rounding. Means and second moments merge by Chan, Golub, LeVeque (1979), "Updating formulae and a pairwise algorithm
for computing sample variances".
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from watchstep.histogram import Histograms, sum_rows

Counts = NDArray[np.int64]
Floats = NDArray[np.float64]
Number = TypeVar("Number", Counts, Floats)

COUNT_COLUMNS = ("count", "nan", "pos_inf", "neg_inf", "zero", "negative")
EXTREME_COLUMNS = ("min", "max", "abs_min")
SUM_COLUMNS = ("mean", "m2", "abs_sum", "square_sum")
VALUE_COLUMNS = (*EXTREME_COLUMNS, *SUM_COLUMNS)


@dataclass(frozen=True)
class StatisticsBatch:
    """Statistics of n tensors, one array of shape (n,) for each figure.

    Attributes:
        count: elements, of any kind.
        nan: elements that are NaN.
        pos_inf: elements that are +inf.
        neg_inf: elements that are -inf.
        zero: elements equal to zero, of either sign.
        negative: finite elements below zero.
        min: smallest finite element; NaN where there is none.
        max: largest finite element; NaN where there is none.
        abs_min: smallest magnitude of a finite, non-zero element; NaN where there is none.
        mean: mean of the finite elements; NaN where there is none.
        m2: sum of squared differences of the finite elements from their mean.
        abs_sum: sum of magnitudes of the finite elements.
        square_sum: sum of squares of the finite elements.
        histogram: signed exponent histograms of the finite, non-zero elements.
    """

    count: Counts
    nan: Counts
    pos_inf: Counts
    neg_inf: Counts
    zero: Counts
    negative: Counts
    min: Floats
    max: Floats
    abs_min: Floats
    mean: Floats
    m2: Floats
    abs_sum: Floats
    square_sum: Floats
    histogram: Histograms

    def __len__(self) -> int:
        return len(self.count)

    @classmethod
    def from_matrices(cls, counts: Counts, values: Floats, histogram: Histograms) -> StatisticsBatch:
        """Build from matrices.

        Args:
            counts: int64, shape (n, 6), in the order of `COUNT_COLUMNS`.
            values: float64, shape (n, 7), in the order of `VALUE_COLUMNS`.
            histogram: n rows.
        """
        named = dict(zip(COUNT_COLUMNS, counts.T, strict=True))
        valued = dict(zip(VALUE_COLUMNS, values.T, strict=True))
        return cls(**named, **valued, histogram=histogram)

    @classmethod
    def empty(cls) -> StatisticsBatch:
        """Statistics of no tensor."""
        return cls.from_matrices(np.empty((0, 6), np.int64), np.empty((0, 7)), Histograms.empty(0))

    @classmethod
    def neutral(cls, rows: int) -> StatisticsBatch:
        """The monoid's neutral element: the statistics of tensors with no elements."""
        values = np.zeros((rows, len(VALUE_COLUMNS)))
        values[:, : len(EXTREME_COLUMNS) + 1] = np.nan
        return cls.from_matrices(np.zeros((rows, 6), np.int64), values, Histograms.empty(rows))

    @classmethod
    def concatenate(cls, parts: list[StatisticsBatch]) -> StatisticsBatch:
        """Several batches, one after the other."""
        if not parts:
            return cls.empty()
        columns = {
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in (*COUNT_COLUMNS, *VALUE_COLUMNS)
        }
        return cls(**columns, histogram=Histograms.concatenate([part.histogram for part in parts]))

    def take(self, rows: NDArray[np.intp]) -> StatisticsBatch:
        """Some rows, in that order."""
        columns = {
            field.name: getattr(self, field.name)[rows] for field in fields(self) if field.name != "histogram"
        }
        return StatisticsBatch(**columns, histogram=self.histogram.take(rows))

    @property
    def bytes(self) -> int:
        """Of memory, about."""
        columns = len(COUNT_COLUMNS) + len(VALUE_COLUMNS)
        return 8 * columns * len(self) + self.histogram.bytes

    @functools.cached_property
    def finite(self) -> Counts:
        """Elements that are neither NaN nor infinite."""
        return self.count - self.nan - self.pos_inf - self.neg_inf

    @functools.cached_property
    def nonfinite(self) -> Counts:
        """Elements that are NaN or infinite."""
        return self.nan + self.pos_inf + self.neg_inf


def scalars(values: list[float]) -> StatisticsBatch:
    """Statistics of one-element tensors."""
    if len(values) == 1:
        return _scalar(float(values[0]))
    x = np.asarray(values, np.float64)
    finite = np.isfinite(x)
    held = np.where(finite, x, np.nan)
    nonzero = finite & (x != 0)
    some = np.where(finite, x, 0.0)
    exponents = np.frexp(x[nonzero])[1] - 1
    histogram = Histograms(
        np.concatenate([[0], np.cumsum(nonzero)]).astype(np.int64),
        (2 * exponents + (x[nonzero] < 0)).astype(np.int16),
        np.ones(int(nonzero.sum()), np.int64),
    )
    with np.errstate(over="ignore"):
        square = some * some
    return StatisticsBatch(
        count=np.ones(len(x), np.int64),
        nan=np.isnan(x).astype(np.int64),
        pos_inf=np.isposinf(x).astype(np.int64),
        neg_inf=np.isneginf(x).astype(np.int64),
        zero=(x == 0).astype(np.int64),
        negative=(finite & (x < 0)).astype(np.int64),
        min=held,
        max=held,
        abs_min=np.where(nonzero, np.abs(x), np.nan),
        mean=held,
        m2=np.zeros(len(x)),
        abs_sum=np.abs(some),
        square_sum=square,
        histogram=histogram,
    )


def _scalar(value: float) -> StatisticsBatch:
    """As `scalars` of one: every step has losses, and two dozen operations on arrays of one number take tenfold the time."""
    finite = math.isfinite(value)
    held, some = (value, value) if finite else (math.nan, 0.0)
    bins, size = np.empty(0, np.int16), math.nan
    if some != 0:
        bins, size = np.array([2 * (math.frexp(value)[1] - 1) + (value < 0)], np.int16), abs(value)
    counts = (1, math.isnan(value), value == math.inf, value == -math.inf, value == 0, finite and value < 0)
    figures = (held, held, size, held, 0.0, abs(some), some * some)
    histogram = Histograms(np.array([0, len(bins)], np.int64), bins, np.ones(len(bins), np.int64))
    return StatisticsBatch.from_matrices(np.array([counts], np.int64), np.array([figures]), histogram)


def merge_rows(batch: StatisticsBatch, group: NDArray[np.intp], groups: int) -> StatisticsBatch:
    """Merge rows by group, in the order in which they stand.

    Args:
        batch: n rows, those of one group from disjoint parts of one tensor.
        group: int, shape (n,), the group of each row, 0 … groups - 1.
        groups: how many rows the result has; a group with no row is neutral.
    """
    merge = Merge(batch, group, groups)
    return StatisticsBatch(**{field.name: merge.column(field.name) for field in fields(StatisticsBatch)})


class Merge:
    """The merge of rows by group, column by column: as `merge_rows` does all."""

    def __init__(self, batch: StatisticsBatch, group: NDArray[np.intp], groups: int) -> None:
        self._batch = batch
        self._group = group
        self._groups = groups

    def column(self, name: str) -> Any:
        """One column of the merged rows; ``histogram``: their histograms."""
        if name == "histogram":
            return sum_rows(self._batch.histogram, self._group, self._groups)
        if name in {"mean", "m2"}:
            return self._moments[name == "m2"]
        values = getattr(self._batch, name)
        if name in COUNT_COLUMNS:
            return _added(values, self._group, np.zeros(self._groups, np.int64))
        if name in EXTREME_COLUMNS:
            best = np.full(self._groups, np.nan)
            (np.fmax if name == "max" else np.fmin).at(best, self._group, values)
            return best
        with np.errstate(over="ignore", invalid="ignore"):
            return _added(values, self._group, np.zeros(self._groups))

    @functools.cached_property
    def _moments(self) -> tuple[Floats, Floats]:
        with np.errstate(over="ignore", invalid="ignore"):
            return _moments(self._batch, self._group, self._groups)


def _added(values: Number, group: NDArray[np.intp], zeros: Number) -> Number:
    np.add.at(zeros, group, values)
    return zeros


def _moments(batch: StatisticsBatch, group: NDArray[np.intp], groups: int) -> tuple[Floats, Floats]:
    """Mean and m2 of the union: with d the parts' distance from its mean, m2 = sum(m2_i + n_i * d_i**2)."""
    sizes = batch.finite.astype(np.float64)
    some = sizes > 0
    group, sizes = group[some], sizes[some]
    total = np.zeros(groups)
    np.add.at(total, group, sizes)
    share = sizes / total[group]
    mean = np.zeros(groups)
    np.add.at(mean, group, batch.mean[some] * share)
    # A second pass over the parts takes out the rounding of the first; near float64's limit it would overflow.
    rest = np.zeros(groups)
    np.add.at(rest, group, (batch.mean[some] - mean[group]) * share)
    mean += np.where(np.isfinite(rest), rest, 0.0)
    distance = batch.mean[some] - mean[group]
    m2 = np.zeros(groups)
    np.add.at(m2, group, batch.m2[some] + sizes * distance * distance)
    mean[total == 0] = np.nan
    return mean, m2
