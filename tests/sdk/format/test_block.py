"""Blocks of rows, views of them, their order and their histograms."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sdk.format.blocks import INFOS, Row, block_of, blocks, gradient, rows_of
from watchstep.format.block import Block, Places, concatenate, sort_key, together, view
from watchstep.format.statistics import BIN_RANGE, Histograms, exponent_of_bin, is_negative_bin, sum_rows
from watchstep.format.tensors import Placement

# Blocks


def series(block: Block) -> list[tuple[object, ...]]:
    return [(block.info(row).name, int(block.worker[row]), block.mode_name(row)) for row in range(len(block))]


@given(blocks, st.data())
def test_take_picks_rows_in_any_order(block: Block, data: st.DataObject) -> None:
    picks = data.draw(st.lists(st.integers(0, len(block) - 1), max_size=8)) if len(block) else []
    every = rows_of(block)
    assert rows_of(block.take(np.array(picks, np.intp))) == [every[pick] for pick in picks]


@given(blocks, st.integers(-1, 4))
def test_tail_is_the_last_rows_of_each_series_in_their_order(block: Block, rows: int) -> None:
    names = series(block)
    expected_rows = [row for row in range(len(block)) if names[row:].count(names[row]) <= rows]
    assert rows_of(block.tail(rows)) == [rows_of(block)[row] for row in expected_rows]


@given(blocks, st.integers(0, 3))
def test_a_tail_has_itself_as_tail(block: Block, rows: int) -> None:
    assert rows_of(block.tail(rows).tail(rows)) == rows_of(block.tail(rows))
    assert rows_of(block.tail(len(block))) == rows_of(block)


@given(blocks)
def test_series_keys_distinguish_series(block: Block) -> None:
    names, keys = series(block), block.series_key().tolist()
    assert len(set(names)) == len(set(keys)) == len(set(zip(names, keys, strict=True)))


@given(blocks, st.randoms(use_true_random=False))
def test_the_canonical_order_does_not_depend_on_the_order_of_arrival(block: Block, random: object) -> None:
    # Two rows of one place in one step are one row sent twice; the catalogue's order is the block's own.
    key = np.stack([block.step, block.mode, block.worker, block.tensor, *vars(block.places).values()])
    block = block.take(np.sort(np.unique(key, axis=1, return_index=True)[1]))
    order = list(range(len(block)))
    random.shuffle(order)  # type: ignore[attr-defined]
    assert rows_of(block.take(np.array(order, np.intp)).ordered()) == rows_of(block.ordered())
    placed = [(row[0], row[2]) for row in rows_of(block.ordered())]
    assert placed == sorted(placed)


@given(st.lists(blocks, max_size=4))
def test_concatenate_keeps_every_row(parts: list[Block]) -> None:
    together = concatenate(parts)
    wanted = [row for part in parts for row in rows_of(part)]
    assert rows_of(together) == wanted
    assert len({info.name for info in together.catalogue}) == len(together.catalogue)


@given(blocks, blocks, blocks)
def test_concatenate_associates(a: Block, b: Block, c: Block) -> None:
    left, right = concatenate([concatenate([a, b]), c]), concatenate([a, concatenate([b, c])])
    assert rows_of(left) == rows_of(right)
    assert left.catalogue == right.catalogue


@given(blocks, st.integers(0, 16))
def test_parts_of_a_block_concatenate_to_it(block: Block, cut: int) -> None:
    every = np.arange(len(block))
    assert rows_of(concatenate([block.take(every[:cut]), block.take(every[cut:])])) == rows_of(block)


def test_a_tensor_keeps_its_last_description() -> None:
    old = gradient("a")
    new = replace(old, shape=(3,))
    together = concatenate([block_of([Row(1, old, [1.0])]), block_of([Row(2, new, [1.0])])])
    assert together.catalogue == (new,)


def test_where_and_mask_of_tensors_choose_rows() -> None:
    block = block_of([Row(step, INFOS[step % 2], [float(step)]) for step in range(4)])
    chosen = block.where(block.mask_of_tensors([info == INFOS[1] for info in block.catalogue]))
    assert chosen.step.tolist() == [1, 3]
    assert Block.empty().mask_of_tensors([]).tolist() == []


def test_an_empty_block_has_no_rows_and_concatenates_to_nothing() -> None:
    assert len(Block.empty()) == len(concatenate([])) == len(concatenate([Block.empty()])) == 0
    assert rows_of(Block.empty().ordered()) == rows_of(Block.empty().tail(3)) == []


@given(
    st.lists(
        st.builds(
            Placement, st.integers(0, 3), st.just(4), st.integers(0, 2), st.sampled_from(["local", "reduced"])
        )
    )
)
def test_places_are_placements_in_columns(placements: list[Placement]) -> None:
    places = Places.of(placements)
    columns = [column.tolist() for column in vars(places).values()]
    assert columns[0] == [place.shard_index for place in placements]
    assert columns[3] == [("local", "reduced").index(place.stage) for place in placements]
    twice = Places.concatenate([places, places])
    assert [column.tolist() for column in vars(twice).values()] == [column * 2 for column in columns]


# Views


@given(blocks, st.data())
def test_a_view_contains_the_rows_that_taking_gives(block: Block, data: st.DataObject) -> None:
    places = st.lists(st.integers(0, len(block) - 1), max_size=8) if len(block) else st.just([])
    rows = np.array(data.draw(places), np.intp)
    seen = view(block, rows)
    assert len(seen) == len(seen.statistics) == len(rows)
    assert rows_of(seen) == rows_of(block.take(rows))
    backwards = np.arange(len(rows))[::-1]
    assert rows_of(seen.take(backwards)) == rows_of(block.take(rows[::-1]))
    assert rows_of(view(block, rows).ordered()) == rows_of(block.take(rows).ordered())


@given(blocks, blocks)
def test_two_blocks_together_are_one_after_the_other(first: Block, second: Block) -> None:
    assert rows_of(together(first, second)) == rows_of(concatenate([first, second]))
    half = len(first) // 2
    head, tail = view(first, np.arange(half)), view(first, np.arange(half, len(first)))
    assert rows_of(together(head, tail)) == rows_of(first)


@given(blocks)
def test_a_view_may_be_changed_in_a_column_as_a_block_may(block: Block) -> None:
    seen = view(block, np.arange(len(block)))
    later = replace(seen, step=seen.step + 1)
    assert later.step.tolist() == (block.step + 1).tolist()
    assert len(later) == len(block)


def test_only_what_is_read_is_made() -> None:
    block = Block.empty()
    seen = view(block, np.empty(0, np.intp))
    assert "step" not in vars(seen)
    assert len(seen.step) == 0
    assert seen.step is seen.step
    with pytest.raises(AttributeError, match="steps"):
        seen.steps  # type: ignore[attr-defined]  # noqa: B018 - reading it is what is tried


# Sort keys


SMALL = st.integers(-3, 3)
LARGE = st.sampled_from([-(2**63), -(2**40), -1, 0, 1, 2**40, 2**62, 2**63 - 1])
ROWS = st.lists(st.tuples(SMALL, LARGE, SMALL, LARGE), max_size=12)


@given(ROWS)
def test_rows_sort_by_their_key_as_by_their_columns(rows: list[tuple[int, int, int, int]]) -> None:
    columns = np.array(rows, np.int64).reshape(-1, 4).T
    key = sort_key(*columns)
    assert key.dtype == np.int64
    assert np.argsort(key, kind="stable").tolist() == np.lexsort(columns[::-1]).tolist()
    for row, number in zip(rows, key, strict=True):
        assert [other == row for other in rows] == (key == number).tolist()


def test_narrow_columns_do_not_overflow() -> None:
    key = sort_key(np.array([-128, 127], np.int8), np.array([2, 1], np.int32))
    assert np.argsort(key).tolist() == [0, 1]


# Histograms


HistogramRow = dict[int, int]
row_lists = st.lists(
    st.dictionaries(st.integers(*BIN_RANGE), st.integers(1, 2**40), max_size=6).map(
        lambda row: dict(sorted(row.items()))
    ),
    max_size=6,
)


def histograms_of(rows: list[HistogramRow]) -> Histograms:
    return Histograms(
        np.cumsum([0, *map(len, rows)]).astype(np.int64),
        np.array([entry for row in rows for entry in row], np.int16),
        np.array([count for row in rows for count in row.values()], np.int64),
    )


def plain(histograms: Histograms) -> list[HistogramRow]:
    rows = [histograms.row(index) for index in range(len(histograms))]
    return [dict(zip(bins.tolist(), counts.tolist(), strict=True)) for bins, counts in rows]


def added(rows: list[HistogramRow], group: list[int], groups: int) -> list[HistogramRow]:
    sums: list[Counter[int]] = [Counter() for _ in range(groups)]
    for row, place in zip(rows, group, strict=True):
        sums[place].update(row)
    return [dict(sorted(total.items())) for total in sums]


@given(row_lists)
def test_rows_read_back(rows: list[HistogramRow]) -> None:
    assert plain(histograms_of(rows)) == rows


@given(row_lists, st.data())
def test_take_picks_rows_in_any_order_and_number(rows: list[HistogramRow], data: st.DataObject) -> None:
    picks = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8)) if rows else []
    taken = histograms_of(rows).take(np.array(picks, np.intp))
    assert plain(taken) == [rows[pick] for pick in picks]


@given(row_lists, row_lists, row_lists)
def test_concatenate_puts_batches_one_after_the_other(
    a: list[HistogramRow], b: list[HistogramRow], c: list[HistogramRow]
) -> None:
    assert plain(Histograms.concatenate([histograms_of(a), histograms_of(b), histograms_of(c)])) == a + b + c


def test_concatenate_of_nothing_is_empty() -> None:
    assert len(Histograms.concatenate([])) == 0
    assert plain(Histograms.empty(2)) == [{}, {}]


@given(row_lists, st.integers(1, 4), st.data())
def test_sum_rows_adds_counts_by_bin_and_group(
    rows: list[HistogramRow], groups: int, data: st.DataObject
) -> None:
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
