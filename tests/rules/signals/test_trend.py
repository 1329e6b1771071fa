from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sdk.format.blocks import Row, block_of, tensor
from watchstep.format.block import Block
from watchstep_rules.signals.loss_series import Trend, as_flags, improvement

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
