from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from watchstep.reading.binning import bin_values

VALUES = st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")) | st.just(float("inf")), max_size=80)


@given(VALUES, st.integers(1, 20), st.integers(1, 5))
def test_points_cover_all_rows_once(values: list[float], points: int, distance: int) -> None:
    steps = np.arange(len(values)) * distance
    binned = bin_values(steps, np.array(values), points)
    assert len(binned.step) <= max(points, min(points, len(values)))
    assert int(binned.count.sum()) == len(values)
    assert (binned.step[1:] > binned.last_step[:-1]).all()
    for position in range(len(binned.step)):
        inside = (steps >= binned.step[position]) & (steps <= binned.last_step[position])
        rows = np.array(values)[inside]
        finite = rows[np.isfinite(rows)]
        assert len(rows) == binned.count[position]
        assert len(rows) - len(finite) == binned.nonfinite[position]
        if len(finite):
            assert (binned.min[position], binned.max[position]) == (finite.min(), finite.max())
            np.testing.assert_allclose(binned.mean[position], finite.mean(), rtol=1e-9, atol=1e-6)
        else:
            assert np.isnan([binned.min[position], binned.max[position], binned.mean[position]]).all()
