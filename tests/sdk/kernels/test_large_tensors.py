"""Tensors with more than 2**31 elements. Only a few pages of their memory are written, so they take little."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from watchstep.kernels import native_kernel
from watchstep.kernels.native_kernel import KINDS, MemoryRange

ELEMENTS = 2**31 + 12_345


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere reading pages that were never written may take memory"
)
def test_elements_past_2_to_the_31_count() -> None:
    kernel = native_kernel.load()
    if kernel is None:
        pytest.skip("the compiled kernel is not built")
    memory = np.zeros(ELEMENTS, np.uint8)
    memory[[0, 2**31 - 1, 2**31, ELEMENTS - 1]] = [
        0x3C,
        0xC0,
        0x7C,
        0x7F,
    ]  # as float8_e5m2: 1, -2, infinity, NaN
    row = kernel.measure([MemoryRange(memory.ctypes.data, ELEMENTS, KINDS["float8_e5m2"])]).collect()
    counts = (row.count[0], row.zero[0], row.negative[0], row.pos_inf[0], row.nan[0])
    assert counts == (ELEMENTS, ELEMENTS - 4, 1, 1, 1)
    assert (row.min[0], row.max[0], row.abs_sum[0]) == (-2, 1, 3)
    bins, found = row.histogram.row(0)
    assert dict(zip(bins.tolist(), found.tolist(), strict=True)) == {0: 1, 3: 1}
