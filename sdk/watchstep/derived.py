"""Figures that follow from a statistics row. One definition, used when saving, reading and judging.

Every function takes a batch of n rows and returns float64 of shape (n,); NaN where the figure does not exist: no element
is finite, or the tensor is empty. What is stored are sums over finite elements, which merge and are 0 there; a norm that is
read is not: a gradient that is all NaN has not vanished. Of an empty tensor alone norms are 0, as numpy's are.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from watchstep.histogram import exponent_of_bin, is_negative_bin
from watchstep.statistics import Floats, StatisticsBatch

Derivation = Callable[[StatisticsBatch], Floats]

_FORMATS = {
    # smallest subnormal's exponent, largest finite's exponent: IEEE 754, bfloat16, OCP FP8 E4M3
    "fp16": (-24, 15),
    "bf16": (-133, 127),
    "fp8_e4m3": (-9, 8),
}
"""Exponents that a number format can hold; magnitudes below are lost to zero, above to infinity or saturation."""


def _over(numerator: Floats, denominator: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(denominator > 0, numerator / denominator, np.nan)


def _of_finite(batch: StatisticsBatch, norm: Floats) -> Floats:
    """NaN where there are elements, and none is finite."""
    return np.where((batch.finite == 0) & (batch.count > 0), np.nan, norm)


def variance(batch: StatisticsBatch) -> Floats:
    """Population variance (ddof 0) of the finite elements."""
    return _over(batch.m2, batch.finite.astype(np.float64))


def std(batch: StatisticsBatch) -> Floats:
    """Population standard deviation (ddof 0) of the finite elements."""
    return np.sqrt(variance(batch))


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
    function.__name__: function
    for function in (variance, std, l1, l2, rms, abs_mean, abs_max, zero_share, nonfinite_share)
}
"""The derived figures by name."""


def underflow_share(batch: StatisticsBatch, number_format: str, powers: Floats | int = 0) -> Floats:
    """Share of the finite, non-zero elements below a format's smallest subnormal.

    Args:
        batch: n rows.
        number_format: ``fp16``, ``bf16`` or ``fp8_e4m3``.
        powers: each row is multiplied by two to this power before, a whole number; one number, or shape (n,).
    """
    lowest, _ = _FORMATS[number_format]
    return _share_of_bins(batch, lambda exponents: exponents < lowest, powers)


def overflow_share(batch: StatisticsBatch, number_format: str, powers: Floats | int = 0) -> Floats:
    """Share of the finite, non-zero elements at or above the power of two over a format's largest.

    Args:
        batch: n rows.
        number_format: ``fp16``, ``bf16`` or ``fp8_e4m3``.
        powers: each row is multiplied by two to this power before, a whole number; one number, or shape (n,).
    """
    _, highest = _FORMATS[number_format]
    return _share_of_bins(batch, lambda exponents: exponents > highest, powers)


def may_leave(batch: StatisticsBatch, number_format: str, powers: Floats | int = 0) -> NDArray[np.bool_]:
    """Whether some element is too small or too large for a format: told by the extremes, histograms are not read.

    Args:
        batch: n rows.
        number_format: as above.
        powers: as above.
    """
    lowest, highest = _FORMATS[number_format]
    smallest, largest = (np.frexp(figure)[1] - 1 + powers for figure in (batch.abs_min, abs_max(batch)))
    left: NDArray[np.bool_] = (batch.abs_min > 0) & ((smallest < lowest) | (largest > highest))
    return left


def _share_of_bins(batch: StatisticsBatch, chosen: Callable[..., np.ndarray], powers: Floats | int) -> Floats:
    held = batch.histogram
    exponents = exponent_of_bin(held.bins)
    if np.any(powers):
        of_row = np.broadcast_to(powers, len(batch)).astype(np.int64)
        exponents = exponents + np.repeat(of_row, np.diff(held.offsets))
    part = _sums_of_rows(held.counts * chosen(exponents), held.offsets)
    whole = _sums_of_rows(held.counts, held.offsets)
    return _over(part, whole)


def _sums_of_rows(counts: NDArray[np.int64], offsets: NDArray[np.int64]) -> Floats:
    """Sums over the bins of each row: exact, as the counts are."""
    until = np.concatenate([[0], np.cumsum(counts)])
    sums: Floats = (until[offsets[1:]] - until[offsets[:-1]]).astype(np.float64)
    return sums


def quantile_bounds(batch: StatisticsBatch, q: float) -> tuple[Floats, Floats]:
    """Bounds between which the q-quantile of the finite elements lies.

    The element of rank ``ceil(q * n)`` (at least 1) in ascending order falls into one power-of-two bin, or is zero;
    the bin's edges, narrowed by the smallest and largest element, are returned.

    Args:
        batch: n rows.
        q: 0 … 1.

    Returns:
        Lower and upper bounds; NaN where there is no finite element.
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
    for low, high, held in edges:
        seen += int(held)
        if seen >= rank:
            return float(low), float(high)
    # The histogram was not recorded, or not wholly: what is known are the extremes.
    return -np.inf, np.inf
