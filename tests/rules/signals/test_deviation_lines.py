"""Deviations as lines of text."""

from __future__ import annotations

import pytest

from watchstep_rules.signals.deviations import Deviation


@pytest.mark.parametrize(
    ("statistic", "value", "low", "line"),
    [
        (
            "nonfinite_share",
            0.000244,
            -3e-38,
            "a:output: 0.024% of its elements are not finite at step 8 (worker 1)",
        ),
        (
            "mean",
            2.0,
            -3e-38,
            "a:output: mean 2 at step 8, usually 0 to 0.5, more than 1,000,000 spreads away (worker 1)",
        ),
    ],
)
def test_a_range_that_follows_from_zeros_is_no_number_of_its_own(
    statistic: str, value: float, low: float, line: str
) -> None:
    deviation = Deviation(
        tensor="a:output", statistic=statistic, worker=1, step=8, value=value, low=low, high=0.5, spreads=1e6
    )
    assert deviation.as_line() == line
