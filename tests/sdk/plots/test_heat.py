from __future__ import annotations

import io

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from watchstep.plots.binned import continued, dense, shares, without_finite
from watchstep.plots.heat import HeatScale, heat_png, scale_of
from watchstep.plots.tensor_plot import power_label
from watchstep.reading.queries import HistogramSeries

CELLS = st.lists(
    st.lists(st.one_of(st.just(float("nan")), st.floats(-1e30, 1e30)), min_size=5, max_size=5),
    min_size=1,
    max_size=4,
)


@given(CELLS)
def test_a_value_is_valid_until_the_next_measurement(cells: list[list[float]]) -> None:
    result = continued(np.array(cells))
    for row, shown in zip(cells, result, strict=True):
        latest = float("nan")
        for value, now in zip(row, shown, strict=True):
            latest = latest if np.isnan(value) else value
            np.testing.assert_equal(now, latest)


def test_the_picture_has_a_pixel_for_each_cell() -> None:
    from PIL import Image

    values = np.array([[1.0, 10.0, np.nan], [100.0, 1000.0, 1.0]])
    nonfinite = np.array([[False, False, False], [False, False, True]])
    image = Image.open(io.BytesIO(heat_png(values, scale_of(values), nonfinite))).convert("RGBA")
    assert image.size == (3, 2)
    assert image.getpixel((0, 0)) == (0x44, 0x01, 0x54, 255)
    assert image.getpixel((1, 1)) == (0xFD, 0xE7, 0x25, 255)
    assert image.getpixel((2, 1)) == (0xD5, 0x5E, 0x00, 255)
    assert image.getpixel((2, 0)) == (0, 0, 0, 0)  # not measured: transparent


def test_a_scale_is_logarithmic_for_positive_values_of_many_sizes() -> None:
    assert scale_of(np.array([1.0, 2.0, np.nan])) == HeatScale(1.0, 2.0, is_log=False)
    assert scale_of(np.array([0.0, 1e-6, 1.0])) == HeatScale(1e-6, 1.0, is_log=True)
    assert scale_of(np.array([-1.0, 1e6])) == HeatScale(-1.0, 1e6, is_log=False)
    assert scale_of(np.array([np.nan])) == HeatScale(0.0, 0.0, is_log=False)


def test_some_outliers_are_outside_of_the_scale() -> None:
    values = np.concatenate([np.linspace(1.0, 2.0, 999), [1e30]])
    scale = scale_of(values, 0.005)
    assert scale.high <= 2.0
    assert scale.positions(values).max() == 1.0


def histogram_of(columns: dict[tuple[int, int], list[int]]) -> HistogramSeries:
    """Columns by sign and power, with the counts of each row."""
    ends = {key: (key[0] * 2.0 ** key[1], key[0] * 2.0 ** (key[1] + 1)) for key in columns}
    order = sorted(columns, key=lambda key: ends[key])
    counts = np.array([columns[key] for key in order], np.int64).T
    rows = len(counts)
    lower = np.array([min(ends[key]) for key in order])
    upper = np.array([max(ends[key]) for key in order])
    none = np.zeros(rows, np.int64)
    return HistogramSeries(np.arange(rows + 1), lower, upper, counts, none, none)


@given(
    st.dictionaries(
        st.tuples(st.sampled_from([-1, 1]), st.integers(-40, 40)),
        st.lists(st.integers(0, 9), min_size=3, max_size=3),
        min_size=1,
        max_size=12,
    )
)
def test_a_dense_histogram_has_all_powers_and_the_same_counts(
    columns: dict[tuple[int, int], list[int]],
) -> None:
    histogram = histogram_of(columns)
    full = dense(histogram)
    assert (np.diff(full.lower) > 0).all()
    for row in range(3):
        counts = dict(zip(full.lower.tolist(), full.counts[row].tolist(), strict=True))
        for lower, count in zip(histogram.lower.tolist(), histogram.counts[row].tolist(), strict=True):
            assert counts.pop(lower) == count
        assert not any(counts.values())
    smallest = min(power for _, power in columns)
    for side in (full.upper[full.upper < 0], full.lower[full.lower > 0]):
        if len(side):
            assert abs(side).min() == 2.0**smallest


def test_shares_and_rows_without_a_finite_element() -> None:
    histogram = HistogramSeries(
        np.arange(5),
        np.array([1.0]),
        np.array([2.0]),
        np.array([[4], [0], [0], [0]]),
        zeros=np.array([0, 0, 3, 0]),
        nonfinite=np.array([0, 0, 0, 5]),
    )
    np.testing.assert_equal(shares(histogram)[:, 0], [1.0, np.nan, 0.0, 0.0])
    assert without_finite(histogram).tolist() == [False, False, False, True]


def test_labels_of_powers() -> None:
    histogram = dense(histogram_of({(-1, 3): [1], (1, -2): [1]}))
    labels = [power_label(histogram, column) for column in range(len(histogram.lower))]
    assert labels[0] == "-2^3"
    assert labels[-1] == "2^-2"
