from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from watchstep.format.block import sort_key

SMALL = st.integers(-3, 3)
LARGE = st.sampled_from([-(2**63), -(2**40), -1, 0, 1, 2**40, 2**62, 2**63 - 1])
ROWS = st.lists(st.tuples(SMALL, LARGE, SMALL, LARGE), max_size=12)


@given(ROWS)
def test_rows_sort_by_their_key_as_by_their_columns(rows: list[tuple[int, int, int, int]]) -> None:
    columns = np.array(rows, np.int64).reshape(-1, 4).T
    key = sort_key(*columns)
    assert key.dtype == np.int64
    assert np.argsort(key, kind="stable").tolist() == np.lexsort(columns[::-1]).tolist()
    for row, number in zip(rows, key, strict=True):
        assert [other == row for other in rows] == (key == number).tolist()


def test_narrow_columns_do_not_overflow() -> None:
    key = sort_key(np.array([-128, 127], np.int8), np.array([2, 1], np.int32))
    assert np.argsort(key).tolist() == [0, 1]
