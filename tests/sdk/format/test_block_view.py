from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sdk.format.blocks import blocks, rows_of
from watchstep.format.block import Block, concatenate, together, view


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
