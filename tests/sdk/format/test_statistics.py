from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sdk.format.blocks import arrays, statistics_of
from tests.sdk.reference import ExactRow, exact_row
from watchstep.format.statistics import COUNT_COLUMNS, EXTREME_COLUMNS, StatisticsBatch, merge_rows, scalars

EPS = Fraction(np.finfo(np.float64).eps)
TINY = Fraction(np.finfo(np.float64).tiny)  # where float64 loses relative precision
parts = st.lists(arrays, min_size=1, max_size=6)


def merged(batch: StatisticsBatch) -> StatisticsBatch:
    return merge_rows(batch, np.zeros(len(batch), np.intp), 1)


def joined(*batches: StatisticsBatch) -> StatisticsBatch:
    return merged(StatisticsBatch.concatenate(list(batches)))


def assert_exact_part(row: StatisticsBatch, due: ExactRow) -> None:
    """Counts, extremes and the histogram, to the last bit."""
    for name in (*COUNT_COLUMNS, *EXTREME_COLUMNS):
        value, wanted = getattr(row, name)[0], getattr(due, name)
        assert math.isnan(value) if wanted is None else value == wanted, name
    bins, counts = row.histogram.row(0)
    assert dict(zip(bins.tolist(), counts.tolist(), strict=True)) == due.histogram


def assert_sums(row: StatisticsBatch, due: ExactRow, rounds: int) -> None:
    """The stated bounds, after so many additions.

    With e = rounds * eps and M the largest magnitude: sums of non-negative terms are within e of themselves; the mean
    within e * M; m2 within e * (m2 + M * sqrt(n * m2)) + n * (e * M)**2, from m2 = sum(m2_i + n_i * d_i**2) with each
    distance d_i within e * M.
    """
    e = 4 * (rounds + 4) * EPS
    for name in ("abs_sum", "square_sum"):
        wanted = getattr(due, name)
        assert abs(Fraction(getattr(row, name)[0]) - wanted) <= e * wanted + TINY, name
    if due.mean is None:
        assert math.isnan(row.mean[0])
        assert row.m2[0] == 0
        return
    largest = max(abs(Fraction(due.min or 0)), abs(Fraction(due.max or 0)))
    finite = int(row.finite[0])
    assert abs(Fraction(row.mean[0]) - due.mean) <= e * largest + TINY
    root = Fraction(math.sqrt(finite * due.m2))
    bound = e * (due.m2 + largest * root) + finite * (e * largest) ** 2
    assert abs(Fraction(row.m2[0]) - due.m2) <= bound + TINY


@given(st.lists(st.floats(), max_size=8))
def test_scalars_are_the_rows_of_single_elements(values: list[float]) -> None:
    batch = scalars(values)
    assert len(batch) == len(values)
    for index, value in enumerate(values):
        row, due = batch.take(np.array([index])), exact_row([value])
        assert_exact_part(row, due)
        assert row.mean[0] == value or due.mean is None
        assert row.m2[0] == 0
        assert row.abs_sum[0] == (abs(value) if math.isfinite(value) else 0)
        assert row.square_sum[0] == (value * value if math.isfinite(value) else 0)


@given(parts)
def test_merging_any_partition_gives_the_row_of_the_whole(partition: list[list[float]]) -> None:
    whole = [value for part in partition for value in part]
    row = merged(statistics_of(partition))
    assert len(row) == 1
    assert_exact_part(row, exact_row(whole))
    assert_sums(row, exact_row(whole), len(whole) + len(partition))


@given(arrays)
def test_the_neutral_element_changes_nothing(values: list[float]) -> None:
    row, neutral = statistics_of([values]), StatisticsBatch.neutral(1)
    for both in (joined(row, neutral), joined(neutral, row)):
        assert_same(both, row)


@given(parts, st.randoms(use_true_random=False))
def test_merging_commutes(partition: list[list[float]], random: object) -> None:
    order = list(range(len(partition)))
    random.shuffle(order)  # type: ignore[attr-defined]
    batch = statistics_of(partition)
    due = exact_row([value for part in partition for value in part])
    assert_close(merged(batch.take(np.array(order))), merged(batch), due)


@given(arrays, arrays, arrays)
def test_merging_associates(a: list[float], b: list[float], c: list[float]) -> None:
    x, y, z = (statistics_of([part]) for part in (a, b, c))
    assert_close(joined(joined(x, y), z), joined(x, joined(y, z)), exact_row([*a, *b, *c]))


def assert_same(actual: StatisticsBatch, expected: StatisticsBatch) -> None:
    for name in actual.__dataclass_fields__:
        if name != "histogram":
            np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name), err_msg=name)
    for name in ("offsets", "bins", "counts"):
        np.testing.assert_array_equal(getattr(actual.histogram, name), getattr(expected.histogram, name))


def assert_close(actual: StatisticsBatch, expected: StatisticsBatch, due: ExactRow) -> None:
    """Exact where merging is exact; the sums of both within the bound of the exact ones."""
    for row in (actual, expected):
        assert_exact_part(row, due)
        assert_sums(row, due, due.count + 6)


@given(st.lists(arrays, max_size=6), st.integers(1, 4), st.data())
def test_each_group_is_merged_by_itself(tensors: list[list[float]], groups: int, data: st.DataObject) -> None:
    group = data.draw(st.lists(st.integers(0, groups - 1), min_size=len(tensors), max_size=len(tensors)))
    rows = merge_rows(statistics_of(tensors), np.array(group, np.intp), groups)
    assert len(rows) == groups
    for index in range(groups):
        own = [tensor for tensor, place in zip(tensors, group, strict=True) if place == index]
        alone = merged(statistics_of(own)) if own else StatisticsBatch.neutral(1)
        assert_same(rows.take(np.array([index])), alone)


@given(st.lists(st.floats(min_value=-1.7e308, max_value=1.7e308), min_size=1, max_size=8))
def test_near_the_limit_of_float64_the_mean_stays_between_the_extremes(values: list[float]) -> None:
    row = merged(scalars(values))
    assert_exact_part(row, exact_row(values))
    slack = 16 * float(EPS) * max(map(abs, values))
    assert row.min[0] - slack <= row.mean[0] <= row.max[0] + slack
    assert row.m2[0] >= 0


def test_a_large_common_offset_does_not_eat_the_variance() -> None:
    values = [1e8 + step for step in range(1000)]
    row = merged(statistics_of([values[:1], values[1:10], values[10:]]))
    due = exact_row(values)
    assert_sums(row, due, 1003)
    assert row.m2[0] == pytest.approx(float(due.m2), rel=1e-12)


def test_finite_and_nonfinite_count_elements() -> None:
    batch = statistics_of([[1.0, math.nan, math.inf, -math.inf, 0.0], []])
    assert batch.finite.tolist() == [2, 0]
    assert batch.nonfinite.tolist() == [3, 0]


def test_nothing_concatenates_to_nothing() -> None:
    assert len(StatisticsBatch.concatenate([])) == 0
    assert len(StatisticsBatch.empty()) == 0
    assert len(scalars([])) == 0


@pytest.mark.parametrize(
    "value",
    [0.0, -0.0, 1.0, -2.5, 5e-324, -1e-310, 1e200, -1.7976931348623157e308, math.inf, -math.inf, math.nan],
)
def test_a_scalar_by_itself_has_the_statistics_that_it_has_among_others(value: float) -> None:
    alone, among = scalars([value]), scalars([value, 1.0]).take(np.array([0]))
    for field in dataclasses.fields(StatisticsBatch):
        if field.name != "histogram":
            actual, expected = getattr(alone, field.name), getattr(among, field.name)
            assert (actual.dtype, actual.shape, actual.tobytes()) == (
                expected.dtype,
                expected.shape,
                expected.tobytes(),
            )
    bins, counts = alone.histogram.row(0)
    wanted_bins, wanted_counts = among.histogram.row(0)
    assert (bins.dtype, bins.tolist()) == (wanted_bins.dtype, wanted_bins.tolist())
    assert (counts.dtype, counts.tolist()) == (wanted_counts.dtype, wanted_counts.tolist())
