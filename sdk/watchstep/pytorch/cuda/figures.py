"""Results of the Triton kernels for one tensor: layout of a row of 64-bit numbers, and its conversion to statistics."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from watchstep.format.statistics import Histograms, StatisticsBatch

HEAD: Final = 16
CODES: Final = 512
"""Number of bins by the nine upper bits of a float32: sign, then exponent field."""
SUBNORMALS: Final = 64
"""Number of bins of subnormal float32 by the highest bit of the mantissa: 32 for positive ones, then 32 for negative ones."""
WIDTH: Final = HEAD + CODES + SUBNORMALS

NAN, POS_INF, NEG_INF, HIGH, LOW, ABS_LOW, FINITE, MEAN, M2, ABS_SUM, SQUARE_SUM = range(11)
"""Indices in the head of a row. Values from `MEAN` on are the bits of a float64; `_extremes` defines the encoding of the extremes."""

_BIAS = 127
_SMALLEST = -149
_MANTISSA = 23
_SIGN_BIT = 2**31


def read_rows(rows: NDArray[np.int64], elements: NDArray[np.int64]) -> StatisticsBatch:
    """Return the statistics of n tensors.

    Args:
        rows: Rows of shape (n, `WIDTH`).
        elements: Number of elements of each tensor, shape (n,).
    """
    head = rows[:, :HEAD]
    histogram = _histograms(rows[:, HEAD:])
    owners = np.repeat(np.arange(len(rows)), np.diff(histogram.offsets))
    nonzero, negative = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    np.add.at(nonzero, owners, histogram.counts)
    np.add.at(negative, owners, histogram.counts * (histogram.bins & 1))
    nan, pos_inf, neg_inf = (head[:, place] for place in (NAN, POS_INF, NEG_INF))
    finite = elements - nan - pos_inf - neg_inf
    counts = np.stack([elements, nan, pos_inf, neg_inf, finite - nonzero, negative], axis=1)
    sums = np.ascontiguousarray(head[:, MEAN : SQUARE_SUM + 1]).view(np.float64).copy()
    sums[finite == 0, 0] = np.nan
    values = np.concatenate([_extremes(head, finite > 0, nonzero > 0), sums], axis=1)
    return StatisticsBatch.from_matrices(counts, values, histogram)


def _extremes(
    head: NDArray[np.int64], some: NDArray[np.bool_], some_nonzero: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Return minimum, maximum and minimum magnitude; NaN if there is none.

    A row stores them as positive numbers, 2**31 + key, 2**31 - key and 2**31 - magnitude, so that zero means no value, and the
    extreme is the largest number. A key is the bits of a float32, with the bits below the sign inverted if it is negative, so
    that keys have the order of the numbers.
    """
    low, high = _SIGN_BIT - head[:, LOW], head[:, HIGH] - _SIGN_BIT
    extremes = [_float_of_key(low), _float_of_key(high), _float_of_key(_SIGN_BIT - head[:, ABS_LOW])]
    return np.stack(
        [
            np.where(extreme, value, np.nan)
            for extreme, value in zip((some, some, some_nonzero), extremes, strict=True)
        ],
        axis=1,
    )


def _float_of_key(key: NDArray[np.int64]) -> NDArray[np.float64]:
    bits = np.where(key < 0, key ^ (_SIGN_BIT - 1), key)
    # Without a value the bits are meaningless, and may be those of a signalling NaN.
    with np.errstate(invalid="ignore"):
        return bits.astype(np.int32).view(np.float32).astype(np.float64)


def _histograms(bins: NDArray[np.int64]) -> Histograms:
    """Return histograms without zeros, NaN and infinity. The exponent field of the last two is 255."""
    code = np.arange(CODES)
    field, sign = code & 0xFF, code >> 8
    normal = np.flatnonzero((field > 0) & (field < 0xFF))
    small = np.arange(SUBNORMALS)
    below = np.flatnonzero(small % 32 < _MANTISSA)
    place = np.concatenate([normal, CODES + below])
    meaning = np.concatenate(
        [2 * (field[normal] - _BIAS) + sign[normal], 2 * (small[below] % 32 + _SMALLEST) + small[below] // 32]
    )
    order = np.argsort(meaning)
    dense = bins[:, place[order]]
    owners, columns = np.nonzero(dense)
    offsets = np.searchsorted(owners, np.arange(len(bins) + 1)).astype(np.int64)
    return Histograms(offsets, meaning[order][columns].astype(np.int16), dense[owners, columns])
