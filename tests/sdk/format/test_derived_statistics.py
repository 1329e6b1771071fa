from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.sdk.format.blocks import arrays, statistics_of
from watchstep.format import statistics
from watchstep.format.statistics import (
    DERIVED,
    Histograms,
    StatisticsBatch,
    may_leave,
    overflow_share,
    quantile_bounds,
    underflow_share,
)

BY_NUMPY: dict[str, Callable[[NDArray[Any]], Any]] = {
    "sum": np.sum,
    "variance": np.var,
    "std": np.std,
    "l1": lambda x: np.linalg.norm(x, 1),
    "l2": np.linalg.norm,
    "rms": lambda x: np.sqrt(np.mean(x * x)),
    "abs_mean": lambda x: np.abs(x).mean(),
    "abs_variance": lambda x: np.abs(x).var(),
    "abs_std": lambda x: np.abs(x).std(),
    "abs_max": lambda x: np.abs(x).max(),
    "zero_share": lambda x: np.mean(x == 0),
    "nonfinite_share": lambda x: np.mean(~np.isfinite(x)),
}


@pytest.mark.parametrize("name", sorted(DERIVED))
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e15])
def test_figures_are_those_of_numpy(name: str, scale: float) -> None:
    random = np.random.default_rng(7)
    tensors = [scale * random.standard_normal(size) * (random.random(size) > 0.2) for size in (1, 5, 400)]
    figures = DERIVED[name](statistics_of([tensor.tolist() for tensor in tensors]))
    assert figures.dtype == np.float64
    assert figures == pytest.approx([BY_NUMPY[name](x) for x in tensors], rel=1e-9)


def test_every_derived_figure_is_compared_with_numpy() -> None:
    assert set(BY_NUMPY) == set(DERIVED)


@pytest.mark.parametrize("values", [[], [math.nan, math.inf]])
def test_a_tensor_without_finite_elements_has_no_mean_figures(values: list[float]) -> None:
    batch = statistics_of([values])
    for figure in (
        statistics.variance,
        statistics.std,
        statistics.rms,
        statistics.abs_mean,
        statistics.abs_std,
        statistics.abs_variance,
        statistics.abs_max,
    ):
        assert np.isnan(figure(batch)).all()
    for norm in (statistics.l1, statistics.l2, statistics.total):
        assert norm(batch) == pytest.approx([math.nan if values else 0.0], nan_ok=True)
    assert np.isnan(quantile_bounds(batch, 0.5)).all()
    assert np.isnan(underflow_share(batch, "fp16")).all()


@given(
    st.lists(st.floats(-1e100, 1e100), min_size=1, max_size=20),
    st.sampled_from(["as they are", "of one magnitude", "positive"]),
)
def test_the_variance_of_magnitudes_is_never_negative_or_above_the_variance(
    values: list[float], kind: str
) -> None:
    if kind == "of one magnitude":
        values = [math.copysign(values[0], value) for value in values]
    elif kind == "positive":
        values = [abs(value) for value in values]
    batch = statistics_of([values])
    (spread,), (of_magnitudes,) = statistics.variance(batch), statistics.abs_variance(batch)
    assert 0 <= of_magnitudes <= spread
    assert statistics.abs_std(batch)[0] == math.sqrt(of_magnitudes)
    exact = float(np.abs(values).var())
    assert of_magnitudes == pytest.approx(exact, abs=1e-13 * float(np.square(values).mean()))
    if kind == "positive":
        assert of_magnitudes == pytest.approx(spread, rel=1e-12, abs=1e-15 * float(np.square(values).mean()))


def test_sums_of_very_large_elements_overflow_without_a_warning() -> None:
    batch = statistics_of([[1e308, 1e308], [-1e308] * 4, [1e200, -1e200]])
    assert statistics.total(batch).tolist() == [math.inf, -math.inf, 0.0]
    assert (statistics.abs_variance(batch) >= 0).all()


def test_shares_of_an_empty_tensor_do_not_exist() -> None:
    assert np.isnan(statistics.zero_share(statistics_of([[]]))).all()
    assert statistics.nonfinite_share(statistics_of([[math.nan, 1.0]])).tolist() == [0.5]


@pytest.mark.parametrize(
    ("number_format", "smallest", "beyond"),
    [("fp16", 2.0**-24, 2.0**16), ("bf16", 2.0**-133, 2.0**128), ("fp8_e4m3", 2.0**-9, 2.0**9)],
)
def test_shares_begin_where_a_format_ends(number_format: str, smallest: float, beyond: float) -> None:
    below, above = math.nextafter(smallest, 0), math.nextafter(beyond, 0)
    batch = statistics_of([[smallest, -below, above, -beyond, 0.0, math.nan, math.inf]])
    assert underflow_share(batch, number_format).tolist() == [0.25]
    assert overflow_share(batch, number_format).tolist() == [0.25]


@given(
    st.lists(st.lists(st.floats(allow_nan=False, width=64), max_size=4), min_size=1, max_size=4),
    st.integers(-40, 40),
)
def test_extremes_show_what_a_format_loses(arrays: list[list[float]], power: int) -> None:
    batch = statistics_of(arrays)
    for number_format in ("fp16", "bf16", "fp8_e4m3"):
        lost = underflow_share(batch, number_format, power) + overflow_share(batch, number_format, power)
        assert (may_leave(batch, number_format, power) == (np.nan_to_num(lost) > 0)).all()


def test_shares_do_not_exist_without_elements_that_could_be_lost() -> None:
    batch = statistics_of([[0.0], [1.0], [], [1e-30]])
    assert underflow_share(batch, "fp16") == pytest.approx([math.nan, 0.0, math.nan, 1.0], nan_ok=True)


@given(arrays, st.floats(0, 1))
def test_quantile_bounds_contain_the_quantile(values: list[float], q: float) -> None:
    lower, upper = quantile_bounds(statistics_of([values]), q)
    finite = sorted(value for value in values if math.isfinite(value))
    if not finite:
        assert np.isnan([lower, upper]).all()
        return
    quantile = finite[max(1, math.ceil(q * len(finite))) - 1]
    assert lower[0] <= quantile <= upper[0]
    assert lower[0] >= finite[0]
    assert upper[0] <= finite[-1]
    if quantile > 0:
        assert upper[0] <= 2 * lower[0]
    elif quantile < 0:
        assert lower[0] >= 2 * upper[0]
    else:
        assert lower[0] == upper[0] == 0


def test_without_a_histogram_the_extremes_are_the_bounds() -> None:
    columns = vars(statistics_of([[-3.0, 5.0]])) | {"histogram": Histograms.empty(1)}
    lower, upper = quantile_bounds(StatisticsBatch(**columns), 0.5)
    assert (lower[0], upper[0]) == (-3.0, 5.0)
