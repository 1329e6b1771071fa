from __future__ import annotations

import numpy as np
from hypothesis import given

from tests.sdk.format.blocks import Row, block_of, blocks, gradient
from watchstep.format.block import Block
from watchstep_rules.signals.series import SeriesRows


def plain_names(block: Block) -> list[str]:
    return [f"{block.info(row).name}@{block.worker[row]}/{block.mode_name(row)}" for row in range(len(block))]


@given(blocks)
def test_rows_of_a_series_are_adjacent_and_in_order(block: Block) -> None:
    rows, names = SeriesRows.of(block, by_mode=True), plain_names(block)
    assert sorted(rows.names) == sorted(set(names))
    assert [rows.names[number] for number in rows.series] == names
    for name, places in zip(rows.names, rows.rows(), strict=True):
        assert places.tolist() == [place for place, other in enumerate(names) if other == name]


@given(blocks)
def test_preceding_rows_are_of_the_same_series(block: Block) -> None:
    rows, names = SeriesRows.of(block, by_mode=True), plain_names(block)
    values = np.arange(len(block), dtype=np.int64)
    before = rows.before(values, -1)
    for row, name in enumerate(names):
        earlier = [place for place in range(row) if names[place] == name]
        assert before[row] == (earlier[-1] if earlier else -1)
    last = {name: place for place, name in enumerate(names)}
    assert dict(zip(rows.names, rows.last(values), strict=True)) == last


def test_modes_are_distinguished_only_if_requested() -> None:
    block = block_of([Row(0, gradient("a"), [1.0]), Row(1, gradient("a"), [1.0], mode="eval")])
    assert SeriesRows.of(block).names == ["a.weight:gradient@0"]
    assert SeriesRows.of(block, by_mode=True).names == [
        "a.weight:gradient@0/train",
        "a.weight:gradient@0/eval",
    ]
