from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from watchstep_rules.signals.robust import round_significant, round_value

HALVES = st.builds(
    lambda digits, power: (digits + 0.5) * 10.0**power, st.integers(1000, 9999), st.integers(-30, 30)
)
POWERS = st.builds(
    lambda power, apart: float(np.nextafter(10.0**power, apart)),
    st.integers(-40, 40),
    st.sampled_from([0.0, 1.0, np.inf]),
)


@given(st.lists(st.one_of(st.floats(), HALVES, POWERS)))
def test_many_numbers_are_shortened_as_one_is(values: list[float]) -> None:
    shortened = round_significant(np.array(values, np.float64))
    assert shortened.tobytes() == np.array(
        [round_value(value) for value in values], np.float64
    ).tobytes() or (
        np.isnan(values).any()
        and np.array_equal(shortened, [round_value(value) for value in values], equal_nan=True)
    )
