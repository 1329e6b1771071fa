"""What the Triton kernels leave for one tensor: a row of 64-bit numbers, and how it reads as statistics."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from watchstep.format.statistics import Histograms, StatisticsBatch

HEAD: Final = 16
CODES: Final = 512
"""Bins by the nine upper bits of a float32: sign, then exponent field."""
SUBNORMALS: Final = 64
"""Bins of subnormal float32: 32 for the highest bit of the mantissa of those above zero, 32 below."""
WIDTH: Final = HEAD + CODES + SUBNORMALS

NAN, POS_INF, NEG_INF, HIGH, LOW, ABS_LOW, FINITE, MEAN, M2, ABS_SUM, SQUARE_SUM = range(11)
"""Places in a row's head. Those from `MEAN` on are float64, by their bits; the extremes are as `_extremes` reads them."""

_BIAS = 127
_SMALLEST = -149
_MANTISSA = 23
_SIGN_BIT = 2**31


def read_rows(rows: NDArray[np.int64], elements: NDArray[np.int64]) -> StatisticsBatch:
    """Statistics of n tensors.

    Args:
        rows: shape (n, `WIDTH`).
        elements: shape (n,), how many elements each tensor has.
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
    """Smallest, largest, and smallest magnitude; NaN where there is none.

    In the row each is above zero, so that a row of zeros stands for none, and the largest found is the one sought:
    2**31 + key, 2**31 - key, 2**31 - magnitude. A key is a float32's bits, those below the sign inverted where it is
    set: in the order of the numbers.
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
    # Where there is none the bits mean nothing, and may be those of a signalling NaN.
    with np.errstate(invalid="ignore"):
        return bits.astype(np.int32).view(np.float32).astype(np.float64)


def _histograms(bins: NDArray[np.int64]) -> Histograms:
    """Without zeros, and without NaN and infinity, whose exponent field is 255."""
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
