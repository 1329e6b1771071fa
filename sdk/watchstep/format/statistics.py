"""Statistics of one tensor at one step as columns, signed exponent histograms, and the figures derived from them.

Signed exponent histograms: how many elements have each power-of-two magnitude.

An element ``x`` that is finite and not zero has exponent ``e = floor(log2(|x|))`` and falls into the bin
``2 * e + (x < 0)``: its exponent and sign in one small integer. float64 needs bins -2148 … 2047. Histograms are
sparse: only bins that are not empty are kept, in ascending order.

Merging of rows:

Sums and extremes are over *finite* elements; ``count`` is over all. Rows of disjoint shards merge without the
data: they form a commutative monoid whose counts, extremes and histograms are exact and whose sums carry float64
rounding. Means and second moments merge by Chan, Golub, LeVeque (1979), "Updating formulae and a pairwise algorithm
for computing sample variances".

Derived figures have one definition, for recording, reading and rules. Their functions take a batch of n rows and return
float64 of shape (n,); NaN where the figure does not exist because no element is finite or the tensor is empty. A stored
sum over no finite element is 0, a derived norm is NaN: a gradient of NaNs has not vanished. Norms of an empty tensor are 0,
as in numpy.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from watchstep.errors import ConfigError

EXPONENT_RANGE = (-1074, 1023)
"""Smallest and largest exponent of a finite float64, including subnormals."""

_SPARE, _SMALL = 8, 2**16
"""Maximum size of a table: so many entries per stored bin, plus a constant."""

_PORTION = 1_000_000
"""Bins that are copied at a time."""

BIN_RANGE = (2 * EXPONENT_RANGE[0], 2 * EXPONENT_RANGE[1] + 1)


@dataclass(frozen=True)
class Histograms:
    """Histograms of n tensors in compressed rows.

    Attributes:
        offsets: int64, shape (n + 1,); row i owns ``bins[offsets[i]:offsets[i + 1]]``.
        bins: int16, ascending within a row.
        counts: int64, same shape as bins, all positive.
    """

    offsets: NDArray[np.int64]
    bins: NDArray[np.int16]
    counts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def bytes(self) -> int:
        """Size in memory."""
        return self.offsets.nbytes + self.bins.nbytes + self.counts.nbytes

    @property
    def size(self) -> int:
        """Number of bins of all rows; 0 if they were not read."""
        return len(self.bins)

    def size_of(self, chosen: NDArray[np.bool_]) -> int:
        """Return the number of bins of the rows selected by a mask; 0 if they were not read."""
        return int(np.diff(self.offsets)[chosen].sum())

    def row(self, index: int) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        """Return bins and counts of one tensor."""
        part = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return self.bins[part], self.counts[part]

    def take(self, rows: NDArray[np.intp]) -> Histograms:
        """Return the histograms of some rows, in that order."""
        lengths = np.diff(self.offsets)[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        starts = self.offsets[:-1][rows] - offsets[:-1]
        bins, counts = np.empty(offsets[-1], self.bins.dtype), np.empty(offsets[-1], self.counts.dtype)
        # In portions, because the indices of all bins would take several times their memory.
        portions = np.searchsorted(offsets, np.arange(_PORTION, offsets[-1], _PORTION))
        for first, end in itertools.pairwise((0, *portions.tolist(), len(rows))):
            part = slice(int(offsets[first]), int(offsets[end]))
            index = np.arange(part.start, part.stop) + np.repeat(starts[first:end], lengths[first:end])
            bins[part], counts[part] = self.bins[index], self.counts[index]
        return Histograms(offsets, bins, counts)

    @classmethod
    def concatenate(cls, parts: list[Histograms]) -> Histograms:
        """Concatenate the histograms of several batches. The result is unread if those of any batch are."""
        if any(isinstance(part, UnreadHistograms) and len(part) for part in parts):
            return UnreadHistograms(sum(len(part) for part in parts))
        parts = [part for part in parts if not isinstance(part, UnreadHistograms)]
        lengths = [np.diff(part.offsets) for part in parts]
        offsets = np.concatenate([[0], np.cumsum(np.concatenate([*lengths, np.empty(0, np.int64)]))])
        bins = np.concatenate([np.empty(0, np.int16), *(part.bins for part in parts)])
        counts = np.concatenate([np.empty(0, np.int64), *(part.counts for part in parts)])
        return cls(offsets.astype(np.int64), bins, counts)

    @classmethod
    def empty(cls, rows: int) -> Histograms:
        """Return empty histograms."""
        return cls(np.zeros(rows + 1, np.int64), np.empty(0, np.int16), np.empty(0, np.int64))


class UnreadHistograms(Histograms):
    """Placeholder for histograms that a reader omitted. Access to their content raises `ConfigError`."""

    def __init__(self, rows: int) -> None:
        object.__setattr__(self, "_rows", rows)

    def __len__(self) -> int:
        rows: int = vars(self)["_rows"]
        return rows

    @property
    def size(self) -> int:
        """Nothing was read."""
        return 0

    def size_of(self, chosen: NDArray[np.bool_]) -> int:  # noqa: ARG002 - as in the class above
        """Nothing was read."""
        return 0

    def take(self, rows: NDArray[np.intp]) -> Histograms:
        """Return a placeholder for some rows."""
        return UnreadHistograms(len(rows))

    def __getattr__(self, name: str) -> Any:
        if name not in type(self).__dataclass_fields__:
            raise AttributeError(name)
        raise ConfigError(
            f"histogram.{name}: the histograms of these rows were not read",
            "a rule that looks into them says so: Needs(…, histograms=True); of segments with too many bins they are not evaluated",
        )


def exponent_of_bin(bins: NDArray[np.int16]) -> NDArray[np.int16]:
    """Return the exponent of each bin's power of two."""
    return bins >> 1


def is_negative_bin(bins: NDArray[np.int16]) -> NDArray[np.bool_]:
    """Return whether each bin counts elements below zero."""
    return (bins & 1).astype(np.bool_)


def sum_rows(histograms: Histograms, group: NDArray[np.intp], groups: int) -> Histograms:
    """Sum histograms by group. The sums of unread histograms are unread.

    Args:
        histograms: Histograms of n rows.
        group: int, shape (n,), the group of each row, 0 … groups - 1.
        groups: Number of rows of the result.
    """
    if isinstance(histograms, UnreadHistograms):
        return UnreadHistograms(groups)
    if len(histograms.bins) == 0:
        return Histograms.empty(groups)
    low = int(histograms.bins.min())
    width = int(histograms.bins.max()) - low + 1
    owner = np.repeat(np.asarray(group, np.int64), np.diff(histograms.offsets))
    key = owner * width + (histograms.bins.astype(np.int64) - low)
    if groups * width <= _SPARE * len(key) + _SMALL:  # counted in a table of all possible bins
        table = np.zeros(groups * width, np.int64)
        np.add.at(table, key, histograms.counts)
        keys = np.flatnonzero(table)
        counts = table[keys]
    else:
        keys, inverse = np.unique(key, return_inverse=True)
        counts = np.zeros(len(keys), np.int64)
        np.add.at(counts, inverse, histograms.counts)
    offsets = np.searchsorted(keys, np.arange(groups + 1) * width).astype(np.int64)
    return Histograms(offsets, (keys % width + low).astype(np.int16), counts)


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
        """Return statistics of no tensors."""
        return cls.from_matrices(np.empty((0, 6), np.int64), np.empty((0, 7)), Histograms.empty(0))

    @classmethod
    def neutral(cls, rows: int) -> StatisticsBatch:
        """Return the monoid's neutral element: the statistics of tensors without elements."""
        values = np.zeros((rows, len(VALUE_COLUMNS)))
        values[:, : len(EXTREME_COLUMNS) + 1] = np.nan
        return cls.from_matrices(np.zeros((rows, 6), np.int64), values, Histograms.empty(rows))

    @classmethod
    def concatenate(cls, parts: list[StatisticsBatch]) -> StatisticsBatch:
        """Concatenate several batches."""
        if not parts:
            return cls.empty()
        columns = {
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in (*COUNT_COLUMNS, *VALUE_COLUMNS)
        }
        return cls(**columns, histogram=Histograms.concatenate([part.histogram for part in parts]))

    def take(self, rows: NDArray[np.intp]) -> StatisticsBatch:
        """Return some rows, in that order."""
        columns = {
            field.name: getattr(self, field.name)[rows] for field in fields(self) if field.name != "histogram"
        }
        return StatisticsBatch(**columns, histogram=self.histogram.take(rows))

    @property
    def bytes(self) -> int:
        """Approximate size in memory."""
        columns = len(COUNT_COLUMNS) + len(VALUE_COLUMNS)
        return 8 * columns * len(self) + self.histogram.bytes

    @functools.cached_property
    def finite(self) -> Counts:
        """Number of elements that are neither NaN nor infinite."""
        return self.count - self.nan - self.pos_inf - self.neg_inf

    @functools.cached_property
    def nonfinite(self) -> Counts:
        """Number of elements that are NaN or infinite."""
        return self.nan + self.pos_inf + self.neg_inf


def scalars(values: list[float]) -> StatisticsBatch:
    """Return the statistics of one-element tensors."""
    if len(values) == 1:
        return _scalar(float(values[0]))
    x = np.asarray(values, np.float64)
    finite = np.isfinite(x)
    finite_values = np.where(finite, x, np.nan)
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
        min=finite_values,
        max=finite_values,
        abs_min=np.where(nonzero, np.abs(x), np.nan),
        mean=finite_values,
        m2=np.zeros(len(x)),
        abs_sum=np.abs(some),
        square_sum=square,
        histogram=histogram,
    )


def _scalar(value: float) -> StatisticsBatch:
    """Return `scalars` of one value. Every step has losses, and two dozen operations on arrays of one number take ten times as long."""
    finite = math.isfinite(value)
    number, some = (value, value) if finite else (math.nan, 0.0)
    bins, size = np.empty(0, np.int16), math.nan
    if some != 0:
        bins, size = np.array([2 * (math.frexp(value)[1] - 1) + (value < 0)], np.int16), abs(value)
    counts = (1, math.isnan(value), value == math.inf, value == -math.inf, value == 0, finite and value < 0)
    figures = (number, number, size, number, 0.0, abs(some), some * some)
    histogram = Histograms(np.array([0, len(bins)], np.int64), bins, np.ones(len(bins), np.int64))
    return StatisticsBatch.from_matrices(np.array([counts], np.int64), np.array([figures]), histogram)


def merge_rows(batch: StatisticsBatch, group: NDArray[np.intp], groups: int) -> StatisticsBatch:
    """Merge rows by group, in their order.

    Args:
        batch: Statistics of n rows. The rows of one group are of disjoint parts of one tensor.
        group: int, shape (n,), the group of each row, 0 … groups - 1.
        groups: Number of rows of the result. A group without rows is neutral.
    """
    merge = Merge(batch, group, groups)
    return StatisticsBatch(**{field.name: merge.column(field.name) for field in fields(StatisticsBatch)})


class Merge:
    """Merges rows by group, one column at a time. `merge_rows` merges all columns."""

    def __init__(self, batch: StatisticsBatch, group: NDArray[np.intp], groups: int) -> None:
        self._batch = batch
        self._group = group
        self._groups = groups

    def column(self, name: str) -> Any:
        """Return one column of the merged rows, or their histograms for ``histogram``."""
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
    """Return mean and m2 of the union. With d_i the distance of part i from its mean, m2 = sum(m2_i + n_i * d_i**2)."""
    sizes = batch.finite.astype(np.float64)
    some = sizes > 0
    group, sizes = group[some], sizes[some]
    total = np.zeros(groups)
    np.add.at(total, group, sizes)
    share = sizes / total[group]
    mean = np.zeros(groups)
    np.add.at(mean, group, batch.mean[some] * share)
    # A second pass over the parts removes the rounding of the first. Near float64's limit it would overflow.
    rest = np.zeros(groups)
    np.add.at(rest, group, (batch.mean[some] - mean[group]) * share)
    mean += np.where(np.isfinite(rest), rest, 0.0)
    distance = batch.mean[some] - mean[group]
    m2 = np.zeros(groups)
    np.add.at(m2, group, batch.m2[some] + sizes * distance * distance)
    mean[total == 0] = np.nan
    return mean, m2


Derivation = Callable[[StatisticsBatch], Floats]

_FORMATS = {
    # smallest subnormal's exponent, largest finite's exponent: IEEE 754, bfloat16, OCP FP8 E4M3
    "fp16": (-24, 15),
    "bf16": (-133, 127),
    "fp8_e4m3": (-9, 8),
}
"""Exponents that a number format can represent. Smaller magnitudes become zero, larger ones infinity or saturate."""


def _over(numerator: Floats, denominator: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(denominator > 0, numerator / denominator, np.nan)


def _of_finite(batch: StatisticsBatch, norm: Floats) -> Floats:
    """Return the norm, or NaN for a non-empty tensor without finite elements."""
    return np.where((batch.finite == 0) & (batch.count > 0), np.nan, norm)


def variance(batch: StatisticsBatch) -> Floats:
    """Population variance (ddof 0) of the finite elements."""
    return _over(batch.m2, batch.finite.astype(np.float64))


def std(batch: StatisticsBatch) -> Floats:
    """Population standard deviation (ddof 0) of the finite elements."""
    return np.sqrt(variance(batch))


def total(batch: StatisticsBatch) -> Floats:
    """Sum of the finite elements: ``mean * n``. In `DERIVED` its name is ``sum``."""
    finite = batch.finite.astype(np.float64)
    with np.errstate(over="ignore"):
        return _of_finite(batch, np.where(finite > 0, batch.mean * finite, 0.0))


def abs_variance(batch: StatisticsBatch) -> Floats:
    """Population variance (ddof 0) of the magnitudes of the finite elements.

    ``var|x| = E[x^2] - E[|x|]^2 = var(x) - (E|x| - |E x|) (E|x| + |E x|)``. The last form subtracts nothing where all elements have one
    sign. Its rounding is at most that of ``var(x)``, and the result is limited to 0 … ``var(x)``.
    """
    spread, magnitude, mean = variance(batch), abs_mean(batch), np.abs(batch.mean)
    with np.errstate(over="ignore", invalid="ignore"):
        excess = np.maximum(magnitude - mean, 0.0) * (magnitude + mean)
        difference = np.where(np.isinf(spread), np.inf, spread - excess)
    return np.maximum(difference, 0.0)


def abs_std(batch: StatisticsBatch) -> Floats:
    """Population standard deviation (ddof 0) of the magnitudes of the finite elements: the root of `abs_variance`."""
    return np.sqrt(abs_variance(batch))


def l1(batch: StatisticsBatch) -> Floats:
    """Sum of magnitudes of the finite elements (the vector norm, whatever the tensor's shape)."""
    return _of_finite(batch, batch.abs_sum.astype(np.float64))


def l2(batch: StatisticsBatch) -> Floats:
    """Root of the sum of squares of the finite elements (the vector norm)."""
    return _of_finite(batch, np.sqrt(batch.square_sum))


def rms(batch: StatisticsBatch) -> Floats:
    """Root of the mean square of the finite elements."""
    return np.sqrt(_over(batch.square_sum, batch.finite.astype(np.float64)))


def abs_mean(batch: StatisticsBatch) -> Floats:
    """Mean magnitude of the finite elements."""
    return _over(batch.abs_sum, batch.finite.astype(np.float64))


def abs_max(batch: StatisticsBatch) -> Floats:
    """Largest magnitude of a finite element."""
    return np.fmax(np.abs(batch.min), np.abs(batch.max))


def zero_share(batch: StatisticsBatch) -> Floats:
    """Share of all elements that are zero."""
    return _over(batch.zero.astype(np.float64), batch.count.astype(np.float64))


def nonfinite_share(batch: StatisticsBatch) -> Floats:
    """Share of all elements that are NaN or infinite."""
    return _over(batch.nonfinite.astype(np.float64), batch.count.astype(np.float64))


DERIVED: dict[str, Derivation] = {
    "sum": total,
    **{
        function.__name__: function
        for function in (
            variance,
            std,
            l1,
            l2,
            rms,
            abs_mean,
            abs_variance,
            abs_std,
            abs_max,
            zero_share,
            nonfinite_share,
        )
    },
}
"""The derived figures by name."""


def underflow_share(batch: StatisticsBatch, number_format: str, powers: Floats | int = 0) -> Floats:
    """Share of the finite, non-zero elements below a format's smallest subnormal.

    Args:
        batch: n rows.
        number_format: ``fp16``, ``bf16`` or ``fp8_e4m3``.
        powers: Integer power of two by which each row is multiplied first; one number, or shape (n,).
    """
    lowest, _ = _FORMATS[number_format]
    return _share_of_bins(batch, lambda exponents: exponents < lowest, powers)


def overflow_share(batch: StatisticsBatch, number_format: str, powers: Floats | int = 0) -> Floats:
    """Share of the finite, non-zero elements at or above the power of two that follows a format's largest number.

    Args:
        batch: n rows.
        number_format: ``fp16``, ``bf16`` or ``fp8_e4m3``.
        powers: Integer power of two by which each row is multiplied first; one number, or shape (n,).
    """
    _, highest = _FORMATS[number_format]
    return _share_of_bins(batch, lambda exponents: exponents > highest, powers)


def may_leave(batch: StatisticsBatch, number_format: str, powers: Floats | int = 0) -> NDArray[np.bool_]:
    """Return whether some element is too small or too large for a format, by the extremes only, without reading histograms.

    Args:
        batch: n rows.
        number_format: As for `underflow_share`.
        powers: As for `underflow_share`.
    """
    lowest, highest = _FORMATS[number_format]
    smallest, largest = (np.frexp(figure)[1] - 1 + powers for figure in (batch.abs_min, abs_max(batch)))
    outside: NDArray[np.bool_] = (batch.abs_min > 0) & ((smallest < lowest) | (largest > highest))
    return outside


def _share_of_bins(batch: StatisticsBatch, chosen: Callable[..., np.ndarray], powers: Floats | int) -> Floats:
    histogram = batch.histogram
    exponents = exponent_of_bin(histogram.bins)
    if np.any(powers):
        of_row = np.broadcast_to(powers, len(batch)).astype(np.int64)
        exponents = exponents + np.repeat(of_row, np.diff(histogram.offsets))
    part = _sums_of_rows(histogram.counts * chosen(exponents), histogram.offsets)
    whole = _sums_of_rows(histogram.counts, histogram.offsets)
    return _over(part, whole)


def _sums_of_rows(counts: NDArray[np.int64], offsets: NDArray[np.int64]) -> Floats:
    """Return sums over the bins of each row. They are exact, like the counts."""
    until = np.concatenate([[0], np.cumsum(counts)])
    sums: Floats = (until[offsets[1:]] - until[offsets[:-1]]).astype(np.float64)
    return sums


def quantile_bounds(batch: StatisticsBatch, q: float) -> tuple[Floats, Floats]:
    """Return bounds of the q-quantile of the finite elements.

    The element of rank ``ceil(q * n)`` (at least 1) in ascending order falls into one power-of-two bin, or is zero;
    the bin's edges, narrowed by the smallest and largest element, are returned.

    Args:
        batch: n rows.
        q: 0 … 1.

    Returns:
        Lower and upper bounds; NaN if no element is finite.
    """
    lower, upper = np.full(len(batch), np.nan), np.full(len(batch), np.nan)
    finite = batch.finite
    for row in range(len(batch)):
        if finite[row] == 0:
            continue
        low, high = _bin_of_rank(batch, row, max(1, int(np.ceil(q * finite[row]))))
        lower[row], upper[row] = max(low, batch.min[row]), min(high, batch.max[row])
    return lower, upper


def _bin_of_rank(batch: StatisticsBatch, row: int, rank: int) -> tuple[float, float]:
    bins, counts = batch.histogram.row(row)
    negative = is_negative_bin(bins)
    powers = exponent_of_bin(bins).astype(np.int64)
    below = np.flatnonzero(negative)[::-1]
    above = np.flatnonzero(~negative)
    with np.errstate(over="ignore"):
        edges = [(-np.ldexp(1.0, powers[i] + 1), -np.ldexp(1.0, powers[i]), counts[i]) for i in below]
        edges.append((0.0, 0.0, batch.zero[row]))
        edges.extend((np.ldexp(1.0, powers[i]), np.ldexp(1.0, powers[i] + 1), counts[i]) for i in above)
    seen = 0
    for low, high, bin_counts in edges:
        seen += int(bin_counts)
        if seen >= rank:
            return float(low), float(high)
    # The histogram was not recorded completely: only the extremes are known.
    return -np.inf, np.inf
