"""Arrays go to Arrow and back unchanged, agree with Arrow's own conversions, and bring no pandas."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from watchstep.format.block import from_codes, from_numbers, from_words, to_numbers

DTYPES = [np.int8, np.int16, np.int32, np.int64, np.float64]


@given(st.lists(st.integers(-128, 127)), st.sampled_from(DTYPES), st.integers(0, 5))
def test_numbers_survive_a_round_trip(values: list[int], dtype: Any, skipped: int) -> None:
    numbers = np.array(values, dtype)
    array = from_numbers(numbers)
    assert array.equals(pa.array(numbers))
    array.validate(full=True)
    found = to_numbers(pa.chunked_array([array.slice(skipped), array], array.type))
    assert found.dtype == dtype
    assert found.tolist() == [*values[skipped:], *values]


@given(st.lists(st.floats()), st.integers(0, 9))
def test_nan_is_null_and_survives_a_round_trip(values: list[float], skipped: int) -> None:
    array = from_numbers(np.array(values, np.float64), nan_is_null=True)
    array.validate(full=True)
    assert array.equals(pa.array(np.array(values, np.float64), from_pandas=True))
    np.testing.assert_array_equal(to_numbers(array.slice(skipped)), values[skipped:])


@given(st.lists(st.text(st.characters(codec="utf-8"))), st.data())
def test_words_are_arrows(words: list[str], data: st.DataObject) -> None:
    assert from_words(words).equals(pa.array(words, pa.string()))
    codes = data.draw(st.lists(st.integers(0, len(words) - 1))) if words else []
    assert from_codes(np.array(codes, np.int8), words).to_pylist() == [words[code] for code in codes]


def test_what_lies_apart_in_memory_is_copied() -> None:
    assert to_numbers(from_numbers(np.arange(10)[::3])).tolist() == [0, 3, 6, 9]
    assert to_numbers(from_numbers(np.broadcast_to(np.int32(7), 3))).tolist() == [7, 7, 7]


def test_what_no_segment_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="1 of 2 integers are null"):
        to_numbers(pa.array([1, None]))
    with pytest.raises(TypeError, match="timestamp"):
        to_numbers(pa.array([], pa.timestamp("s")))


_SEGMENT = """
import sys
from typing import Any
import numpy as np
from watchstep.format.block import Block, Places
from watchstep.format.statistics import Histograms
from watchstep.format.segment import decode, encode
from watchstep.format.statistics import StatisticsBatch
from watchstep.format.tensors import TensorInfo
zero = np.zeros(1, np.int32)
block = Block(
    step=zero.astype(np.int64), mode=zero.astype(np.int8), worker=zero, time_ns=zero.astype(np.int64), tensor=zero,
    catalogue=(TensorInfo("a", ("weights",), "weight", "", "", 0, (1,)),),
    places=Places(zero, zero + 1, zero, zero.astype(np.int8)),
    statistics=StatisticsBatch.from_matrices(np.zeros((1, 6), np.int64), np.ones((1, 7)), Histograms.empty(1)),
)
assert len(decode(encode(block), "s")) == 1
assert "pandas" not in sys.modules and "pyarrow.compute" not in sys.modules, "imported"
"""


def test_a_segment_needs_no_pandas() -> None:
    pytest.importorskip("pandas")
    done = subprocess.run([sys.executable, "-c", _SEGMENT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
