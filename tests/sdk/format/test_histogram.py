from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from watchstep.format.statistics import BIN_RANGE, Histograms, exponent_of_bin, is_negative_bin, sum_rows

Row = dict[int, int]
row_lists = st.lists(
    st.dictionaries(st.integers(*BIN_RANGE), st.integers(1, 2**40), max_size=6).map(
        lambda row: dict(sorted(row.items()))
    ),
    max_size=6,
)


def histograms_of(rows: list[Row]) -> Histograms:
    return Histograms(
        np.cumsum([0, *map(len, rows)]).astype(np.int64),
        np.array([entry for row in rows for entry in row], np.int16),
        np.array([count for row in rows for count in row.values()], np.int64),
    )


def plain(histograms: Histograms) -> list[Row]:
    rows = [histograms.row(index) for index in range(len(histograms))]
    return [dict(zip(bins.tolist(), counts.tolist(), strict=True)) for bins, counts in rows]


def added(rows: list[Row], group: list[int], groups: int) -> list[Row]:
    sums: list[Counter[int]] = [Counter() for _ in range(groups)]
    for row, place in zip(rows, group, strict=True):
        sums[place].update(row)
    return [dict(sorted(total.items())) for total in sums]


@given(row_lists)
def test_rows_read_back(rows: list[Row]) -> None:
    assert plain(histograms_of(rows)) == rows


@given(row_lists, st.data())
def test_take_picks_rows_in_any_order_and_number(rows: list[Row], data: st.DataObject) -> None:
    picks = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8)) if rows else []
    taken = histograms_of(rows).take(np.array(picks, np.intp))
    assert plain(taken) == [rows[pick] for pick in picks]


@given(row_lists, row_lists, row_lists)
def test_concatenate_puts_batches_one_after_the_other(a: list[Row], b: list[Row], c: list[Row]) -> None:
    assert plain(Histograms.concatenate([histograms_of(a), histograms_of(b), histograms_of(c)])) == a + b + c


def test_concatenate_of_nothing_is_empty() -> None:
    assert len(Histograms.concatenate([])) == 0
    assert plain(Histograms.empty(2)) == [{}, {}]


@given(row_lists, st.integers(1, 4), st.data())
def test_sum_rows_adds_counts_by_bin_and_group(rows: list[Row], groups: int, data: st.DataObject) -> None:
    group = data.draw(st.lists(st.integers(0, groups - 1), min_size=len(rows), max_size=len(rows)))
    total = sum_rows(histograms_of(rows), np.array(group, np.intp), groups)
    assert plain(total) == added(rows, group, groups)
    assert all(list(row) == sorted(row) for row in plain(total))


@given(st.integers(-1074, 1023), st.booleans())
def test_a_bin_holds_exponent_and_sign(exponent: int, negative: bool) -> None:
    entry = np.array([2 * exponent + negative], np.int16)
    assert exponent_of_bin(entry)[0] == exponent
    assert is_negative_bin(entry)[0] == negative


def test_many_groups_of_bins_far_apart_add_up() -> None:
    rows = 64
    low, high = BIN_RANGE
    bins = np.tile(np.array([low, high], np.int16), rows)
    offsets = np.arange(rows + 1, dtype=np.int64) * 2
    histograms = Histograms(offsets, bins, np.arange(2 * rows, dtype=np.int64) + 1)
    summed = sum_rows(histograms, np.arange(rows) // 2, rows // 2)
    for group in range(rows // 2):
        first = 4 * group + 1
        assert summed.row(group)[0].tolist() == [low, high]
        assert summed.row(group)[1].tolist() == [2 * first + 2, 2 * first + 4]
