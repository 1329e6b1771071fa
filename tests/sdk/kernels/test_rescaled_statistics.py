"""Statistics of scaled tensors, without the scale; and of parts, merged to the whole."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from watchstep.format.statistics import COUNT_COLUMNS, VALUE_COLUMNS, StatisticsBatch
from watchstep.kernels.array_kernel import measure_array
from watchstep.kernels.measurement import Completed, Merged, Rescaled

ELEMENTS = st.lists(
    st.floats(-1e6, 1e6, width=32).filter(lambda x: x == 0 or abs(x) > 1e-6)
    | st.sampled_from([np.nan, np.inf, -np.inf]),
    max_size=30,
)


def measured(values: list[float]) -> Completed:
    return Completed(measure_array(np.asarray(values, np.float64)))


def assert_close(found: StatisticsBatch, due: StatisticsBatch) -> None:
    for name in COUNT_COLUMNS:
        assert getattr(found, name).tolist() == getattr(due, name).tolist()
    for name in VALUE_COLUMNS:
        np.testing.assert_allclose(getattr(found, name), getattr(due, name), rtol=1e-9, atol=1e-9)


def assert_same_bins(found: StatisticsBatch, due: StatisticsBatch) -> None:
    assert found.histogram.offsets.tolist() == due.histogram.offsets.tolist()
    assert found.histogram.bins.tolist() == due.histogram.bins.tolist()
    assert found.histogram.counts.tolist() == due.histogram.counts.tolist()


@given(ELEMENTS, st.integers(-20, 40))
def test_a_power_of_two_is_exact(values: list[float], exponent: int) -> None:
    scale = 2.0**exponent
    found = Rescaled(measured([value * scale for value in values]), lambda: scale).collect()
    due = measured(values).collect()
    for name in ("min", "max", "abs_min"):
        np.testing.assert_array_equal(getattr(found, name), getattr(due, name))
    assert_close(found, due)
    assert_same_bins(found, due)


@given(ELEMENTS, st.floats(1e-3, 1e6))
def test_other_numbers_are_within_rounding_and_one_bin(values: list[float], scale: float) -> None:
    found = Rescaled(measured([value * scale for value in values]), lambda: scale).collect()
    due = measured(values).collect()
    assert_close(found, due)
    assert found.histogram.counts.sum() == due.histogram.counts.sum()
    if len(due.histogram.bins):
        assert abs(int(found.histogram.bins[0] >> 1) - int(due.histogram.bins[0] >> 1)) <= 1


@given(st.lists(st.lists(ELEMENTS, min_size=1, max_size=4), min_size=1, max_size=4))
def test_parts_are_the_whole(tensors: list[list[list[float]]]) -> None:
    parts = [(owner, measured(part)) for owner, group in enumerate(tensors) for part in group]
    merged = Merged([part for _, part in parts], [owner for owner, _ in parts], len(tensors))
    whole = StatisticsBatch.concatenate(
        [measured(list(chain.from_iterable(group))).collect() for group in tensors]
    )
    assert_close(merged.collect(), whole)
    assert_same_bins(merged.collect(), whole)
    assert merged.nonfinite == bool(whole.nonfinite.any())


@pytest.mark.parametrize(("values", "bad"), [([1.0], False), ([1.0, np.nan], True)])
def test_what_is_not_finite_stays_so(values: list[float], bad: bool) -> None:
    assert Rescaled(measured(values), lambda: 2.0).nonfinite == bad
