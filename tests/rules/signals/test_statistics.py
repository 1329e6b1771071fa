"""Medians, rounding, trends and shares of samples."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.sdk.format.blocks import Row, block_of, statistics_of, tensor
from watchstep.format.block import Block
from watchstep.format.statistics import Floats
from watchstep_rules.signals.loss_series import Trend, as_flags, improvement
from watchstep_rules.signals.robust import medians, nanmedians, quantiles, round_significant, round_value
from watchstep_rules.signals.system_samples import Recent, surely_above, surely_below

# Medians and quantiles


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


# Rounding


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


# Trends


EMPTY = Block.empty()


def trend_of(values: list[float]) -> Trend:
    trend = Trend()
    for value in values:
        trend = trend.after(value)
    return trend


@given(st.lists(st.floats(-1e3, 1e3), min_size=10, max_size=80))
def test_the_line_is_that_of_least_squares(values: list[float]) -> None:
    trend = trend_of(values)
    slope = np.polyfit(np.arange(len(values)), values, 1)[0]
    assert trend.fall == pytest.approx(-slope * len(values), rel=1e-6, abs=1e-6)


def test_noise_alone_is_seldom_a_fall_and_its_confidence_scatters_by_one() -> None:
    random = np.random.default_rng(7)
    seen = [trend_of(random.normal(3.0, 0.2, 200).tolist()).confidence for _ in range(300)]
    assert np.std(seen) == pytest.approx(1.0, abs=0.15)
    assert max(seen) < 4


def test_too_few_values_and_values_that_are_no_numbers_show_nothing() -> None:
    assert (trend_of([3.0, 2.0, 1.0]).fall, trend_of([3.0]).error) == (0.0, math.inf)
    assert trend_of([1.0] * 20).confidence == 0
    assert trend_of([*np.linspace(2, 1, 20), math.nan, math.inf]).confidence > 10


def metric(name: str, values: list[float], mode: str = "train") -> Block:
    collection = "losses" if "loss" in name else "metrics"
    info = tensor(name, collection, shape=())
    return block_of([Row(step, info, [value], mode) for step, value in enumerate(values)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "values", "since"),
    [
        ("accuracy", [0.5 + step / 100 for step in range(30)], 9),
        ("rewards/margins", [step / 100 for step in range(30)], 9),
        ("accuracy", [0.5] * 30, None),
        ("accuracy", [0.5 - step / 100 for step in range(30)], None),
        ("temperature", [0.5 + step / 100 for step in range(30)], None),
        ("val_loss", [2 - step / 50 for step in range(30)], 9),
        ("val_loss", [2 - step / 1e5 for step in range(30)], None),
    ],
)
def test_what_is_better_counts_from_the_step_at_which_it_shows(
    name: str, values: list[float], since: int | None
) -> None:
    block = metric(name, values)
    state, found = improvement({}, None, EMPTY, block)
    assert found == since
    half = len(values) // 2
    first = improvement({}, None, EMPTY, block.where(block.step < half))
    assert improvement(*first, EMPTY, block.where(block.step >= half)) == (state, found)
    assert as_flags(found, np.array([8, 9])).tolist() == [False, since is not None]


# Samples of the system


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
