"""The compiled kernel's rows of NumPy arrays, and how near to them the rows of a device must be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from watchstep.format.statistics import COUNT_COLUMNS, EXTREME_COLUMNS, StatisticsBatch, abs_mean
from watchstep.kernels import native_kernel
from watchstep.kernels.native_kernel import KINDS, MemoryRange


def native_rows(arrays: Sequence[NDArray[Any]]) -> StatisticsBatch:
    """One row per array."""
    kernel = native_kernel.load()
    assert kernel is not None
    contiguous = [np.ascontiguousarray(array) for array in arrays]
    ranges = [MemoryRange(array.ctypes.data, array.size, KINDS[array.dtype.name]) for array in contiguous]
    return kernel.measure(ranges).collect()


def assert_same_rows(rows: StatisticsBatch, native: StatisticsBatch) -> None:
    """Counts, extremes and histograms exactly; sums within the bounds that the compiled kernel states."""
    for name in (*COUNT_COLUMNS, *EXTREME_COLUMNS):
        np.testing.assert_array_equal(getattr(rows, name), getattr(native, name), err_msg=name)
    for name in ("offsets", "bins", "counts"):
        np.testing.assert_array_equal(getattr(rows.histogram, name), getattr(native.histogram, name))
    tiny = 1e-320
    np.testing.assert_allclose(rows.abs_sum, native.abs_sum, rtol=4e-6, atol=tiny)
    np.testing.assert_allclose(rows.square_sum, native.square_sum, rtol=4e-6, atol=tiny)
    np.testing.assert_array_equal(np.isnan(rows.mean), np.isnan(native.mean))
    error = np.abs(rows.mean - native.mean) > 4e-6 * abs_mean(native) + tiny
    assert not error.any(), (rows.mean, native.mean)
    with np.errstate(invalid="ignore"):  # both may be infinite
        slack = 8e-6 * native.m2 + 1e-13 * native.square_sum + tiny
        is_near = np.abs(rows.m2 - native.m2) <= slack
    assert (is_near | (rows.m2 == native.m2)).all(), (rows.m2, native.m2)
