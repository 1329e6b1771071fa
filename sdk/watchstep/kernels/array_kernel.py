"""Statistics of arrays in host memory, by numpy operations over chunks that stay in cache.

Sums are accumulated in float64 by numpy's pairwise summation within a chunk, and chunks are merged by
`watchstep.format.statistics.merge_rows`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from watchstep.format.histogram import Histograms
from watchstep.format.statistics import StatisticsBatch, merge_rows

_CHUNK = 1 << 16
_LAYOUT = {
    np.dtype(np.float32): (np.uint32, 23, 127, 8),
    np.dtype(np.float64): (np.uint64, 52, 1023, 11),
}
"""Unsigned type of the same width, bits of the mantissa, exponent bias, bits of the exponent: IEEE 754."""


def measure_array(array: NDArray[Any]) -> StatisticsBatch:
    """Statistics of one array, as one row.

    Args:
        array: any shape; float64 and wide integers are taken as float64, all else as float32 where that is exact.
    """
    flat = np.ascontiguousarray(array).reshape(-1)
    flat = flat.astype(_working_type(flat.dtype), copy=False)
    if flat.size <= _CHUNK:
        return _measure_chunk(flat)
    parts = [_measure_chunk(flat[start : start + _CHUNK]) for start in range(0, flat.size, _CHUNK)]
    return merge_rows(StatisticsBatch.concatenate(parts), np.zeros(len(parts), np.intp), 1)


def _working_type(dtype: np.dtype[Any]) -> type[np.float32 | np.float64]:
    if dtype == np.float32 or dtype.itemsize <= 2:
        return np.float32
    return np.float64


def _measure_chunk(x: NDArray[Any]) -> StatisticsBatch:
    if x.size == 0:
        return StatisticsBatch.neutral(1)
    nan, pos_inf, neg_inf = 0, 0, 0
    size = x.size
    finite = np.isfinite(x)
    if not finite.all():
        nan = int(np.isnan(x).sum())
        pos_inf = int(np.isposinf(x).sum())
        neg_inf = size - int(finite.sum()) - nan - pos_inf
        x = x[finite]
    zero = x.size - int(np.count_nonzero(x))
    counts = [size, nan, pos_inf, neg_inf, zero, int((x < 0).sum())]
    values, histogram = _values(x), _histogram(x)
    return StatisticsBatch.from_matrices(np.array([counts], np.int64), np.array([values]), histogram)


def _values(x: NDArray[Any]) -> list[float]:
    if x.size == 0:
        return [np.nan, np.nan, np.nan, np.nan, 0.0, 0.0, 0.0]
    magnitude = np.abs(x)
    nonzero = magnitude[magnitude > 0]
    wide = x.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        mean = float(wide.mean())
        if not np.isfinite(mean):  # the sum overflowed, the mean cannot
            mean = float((wide / x.size).sum())
        from_mean = wide - mean
        return [
            float(x.min()),
            float(x.max()),
            float(nonzero.min()) if nonzero.size else np.nan,
            mean,
            float(np.multiply(from_mean, from_mean, out=from_mean).sum()),
            float(magnitude.sum(dtype=np.float64)),
            float(np.multiply(wide, wide, out=wide).sum()),
        ]


def _histogram(x: NDArray[Any]) -> Histograms:
    """Count by the sign and exponent bits, then give those of zero exponent (zeros, subnormals) their true bin."""
    unsigned, mantissa, bias, width = _LAYOUT[x.dtype]
    found = np.bincount((x.view(unsigned) >> unsigned(mantissa)).astype(np.int64), minlength=2 << width)
    code = np.flatnonzero(found)
    exponent = (code & ((1 << width) - 1)) - bias
    normal = exponent > -bias
    bins = 2 * exponent[normal] + (code[normal] >> width)
    counts = found[code[normal]]
    if not normal.all():
        small = x[(x != 0) & (np.abs(x) < np.finfo(x.dtype).smallest_normal)]
        powers = np.frexp(small.astype(np.float64))[1].astype(np.int64) - 1
        small_bins, small_counts = np.unique(2 * powers + (small < 0), return_counts=True)
        bins, counts = np.concatenate([bins, small_bins]), np.concatenate([counts, small_counts])
    order = np.argsort(bins)
    return Histograms(
        np.array([0, len(bins)], np.int64), bins[order].astype(np.int16), counts[order].astype(np.int64)
    )
