from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.sdk.format.blocks import statistics_of
from watchstep_rules.signals.system_samples import Recent, surely_above, surely_below

shares = st.lists(st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.25, 0.5, 0.7, 1.0])), max_size=20)


@given(rows=st.lists(shares, min_size=1, max_size=4), limit=st.sampled_from([0.1, 0.5, 0.7, 0.9]))
def test_what_is_sure_is_so(rows: list[list[float]], limit: float) -> None:
    measured = statistics_of(rows)
    below, above = surely_below(measured, limit), surely_above(measured, limit)
    for row, samples in enumerate(rows):
        truly = sum(sample < limit for sample in samples)
        assert below[row] <= truly
        assert above[row] <= len(samples) - truly
        if truly in {0, len(samples)}:  # where all are on one side the extremes tell
            assert (below[row], above[row]) == (truly, len(samples) - truly)
        else:
            assert min(below[row], above[row]) >= 1


def test_bins_are_conclusive_within_their_resolution() -> None:
    measured = statistics_of([[0.0, 0.1, 0.3, 0.6, 0.9], [float("nan"), 0.2], []])
    assert surely_below(measured, 0.5).tolist() == [3, 1, 0]
    assert surely_above(measured, 0.5).tolist() == [2, 0, 0]
    assert surely_above(measured, np.array([0.25, 0.1, 1.0])).tolist() == [3, 1, 0]
    assert surely_above(measured, np.full(3, np.nan)).tolist() == [0, 0, 0]


@given(shares=st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_a_recent_mean_lies_between_the_samples(shares: list[float]) -> None:
    recent = Recent()
    for share in shares:
        recent = recent.after(20 * share, 20, 500)
    assert min(shares) - 1e-6 <= recent.mean <= max(shares) + 1e-6
    assert recent.seen == 20 * len(shares)


def test_what_is_long_ago_is_forgotten() -> None:
    recent = Recent().after(500, 500, 100.0)
    for _ in range(80):
        recent = recent.after(0, 20, 100.0)
    assert recent.mean < 1e-4
    assert np.isnan(Recent().mean)
