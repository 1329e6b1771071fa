from __future__ import annotations

import warnings

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from watchstep.format.statistics import Floats
from watchstep_rules.signals.robust import medians, nanmedians, quantiles

VALUES = st.one_of(st.floats(-1e300, 1e300), st.sampled_from([np.nan, np.inf, 0.0, -0.0]))
WINDOWS = st.tuples(st.integers(0, 6), st.integers(1, 7)).flatmap(
    lambda shape: arrays.arrays(np.float64, shape, elements=VALUES)
)


@given(WINDOWS)
def test_medians_are_those_of_numpy(windows: Floats) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numpy, about rows that are NaN
        plain, of_finite = np.median(windows, axis=1), np.nanmedian(windows, axis=1)
    assert np.array_equal(medians(windows), plain, equal_nan=True)
    assert np.array_equal(nanmedians(windows), of_finite, equal_nan=True)


@given(WINDOWS, st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
def test_quantiles_are_those_of_numpy(windows: Floats, share: float) -> None:
    windows = np.where(np.isinf(windows), np.nan, windows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as above
        plain = np.quantile(windows, share, axis=1)
    assert np.array_equal(quantiles(windows, share), plain, equal_nan=True)
