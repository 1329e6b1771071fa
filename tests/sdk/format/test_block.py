from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.sdk.format.blocks import INFOS, Row, block_of, blocks, gradient, rows_of
from watchstep.format.block import Block, Places, concatenate
from watchstep.format.tensors import Placement


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
