"""Statistics and checksums of arrays in host memory with numpy.

Statistics use numpy operations over chunks that fit in the cache. Sums are accumulated in float64 by numpy's pairwise summation within a chunk, and chunks are merged by
`watchstep.format.statistics.merge_rows`.

Checksums cover the bits of tensors: equal bits have equal checksums on every device and in every implementation.
They show whether replicas have bitwise equal weights, and whether a weight has changed. -0 and +0 differ, and
NaN are distinguished by their bits. Only the order of the elements and their bits matter, not shape or type.

Definition. Elements, in their order, are words: the unsigned integers of their bits, of 8, 16 or 32
bits; elements of 64 bits are two words of 32, the low half first. All arithmetic is of 64 bits and wraps around. ``mixed``
is the last part of SplitMix64 (Steele, Lea, Flood 2014), ``step`` its increment:

    key(j)   = mixed((j + 1) * step) | 1                               j = 0 … 1023
    block(b) = sum of key(j) * (w ^ w >> 16), w = word 1024 * b + j    words past the end are zero
    checksum = mixed(sum of mixed(block(b) + (b + 1) * step) + words * step) >> 11

A float64 represents the remaining 53 bits exactly.

Strength. If two tensors of the same size differ in one word, the sums of that block differ, because keys are odd. If they
differ in more, sums of products with odd keys drawn at random are equal with a probability of at most ``2 ** (t - 63)``,
where ``2 ** t`` divides all differences of ``w ^ w >> 16`` in the block (Carter, Wegman 1979): at most ``2 ** -48`` for
elements of 8 or 16 bits, and for those of 32 bits unless each difference is only in bits 16 and up, all in the same way; never more
than ``2 ** -32``. Blocks are mixed with their index before they are summed, so that their differences cancel only by chance, with a
probability of about ``2 ** -64``. 53 of the last 64 bits are kept, which adds ``2 ** -53``. Keys are fixed: these bounds apply to
accidents (memory faults, races, lost updates), and give no protection against a deliberate collision.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from watchstep.format.statistics import Histograms, StatisticsBatch, merge_rows

_CHUNK = 1 << 16
MAX_OVERLAPPING_BYTES = 64 * 2**20
"""Size up to which a view with overlapping elements is measured as it is; of a larger one its distinct memory is measured."""
_LAYOUT = {
    np.dtype(np.float32): (np.uint32, 23, 127, 8),
    np.dtype(np.float64): (np.uint64, 52, 1023, 11),
}
"""Unsigned type of the same width, bits of the mantissa, exponent bias, bits of the exponent: IEEE 754."""


def measure_array(array: NDArray[Any]) -> StatisticsBatch:
    """Return the statistics of one array, as one row.

    Args:
        array: An array of any shape. float64 and wide integers are converted to float64, all others to float32 if that is exact.
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
    """Count by the sign and exponent bits, then move elements with zero exponent (zeros, subnormals) to their true bin."""
    unsigned, mantissa, bias, width = _LAYOUT[x.dtype]
    bin_counts = np.bincount((x.view(unsigned) >> unsigned(mantissa)).astype(np.int64), minlength=2 << width)
    code = np.flatnonzero(bin_counts)
    exponent = (code & ((1 << width) - 1)) - bias
    normal = exponent > -bias
    bins = 2 * exponent[normal] + (code[normal] >> width)
    counts = bin_counts[code[normal]]
    if not normal.all():
        small = x[(x != 0) & (np.abs(x) < np.finfo(x.dtype).smallest_normal)]
        powers = np.frexp(small.astype(np.float64))[1].astype(np.int64) - 1
        small_bins, small_counts = np.unique(2 * powers + (small < 0), return_counts=True)
        bins, counts = np.concatenate([bins, small_bins]), np.concatenate([counts, small_counts])
    order = np.argsort(bins)
    return Histograms(
        np.array([0, len(bins)], np.int64), bins[order].astype(np.int16), counts[order].astype(np.int64)
    )


BLOCK = 1024
"""Number of words of a block."""

STEP = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
DROPPED = 11
"""Number of discarded bits of the last 64."""

_SLICE = 64 * BLOCK


def checksum_array(array: NDArray[Any]) -> int:
    """Return the checksum of an array in host memory, below ``2 ** 53``.

    Args:
        array: An array of any shape and strides, with elements of 1, 2, 4 or 8 bytes, or complex.

    Raises:
        TypeError: Elements have another width, or are Python objects.
    """
    words = _words(array)
    keys = _mixed(np.arange(1, BLOCK + 1, dtype=np.uint64) * np.uint64(STEP)) | np.uint64(1)
    total = np.zeros(1, np.uint64)
    for start in range(0, len(words), _SLICE):
        part = words[start : start + _SLICE].astype(np.uint64)
        part ^= part >> np.uint64(16)
        part = np.pad(part, (0, -len(part) % BLOCK)).reshape(-1, BLOCK)
        first = start // BLOCK
        order = np.arange(first + 1, first + 1 + len(part), dtype=np.uint64) * np.uint64(STEP)
        total += _mixed((part * keys).sum(axis=1) + order).sum()
    total += np.array([len(words)], np.uint64) * np.uint64(STEP)
    return int(_mixed(total)[0] >> np.uint64(DROPPED))


def _words(array: NDArray[Any]) -> NDArray[Any]:
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.kind == "c":
        flat = flat.view(flat.real.dtype)
    if flat.dtype.hasobject or flat.dtype.itemsize not in {1, 2, 4, 8}:
        raise TypeError(
            f"elements of type {flat.dtype} have no checksum: their bits are not 1, 2, 4 or 8 bytes"
        )
    words: NDArray[Any] = flat.view(f"u{min(flat.dtype.itemsize, 4)}")
    return words


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(multiplier)
    x ^= x >> np.uint64(SHIFTS[-1])
    return x
