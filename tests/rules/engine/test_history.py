from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.sdk.format.blocks import blocks, rows_of
from watchstep.format.block import Block
from watchstep_rules.engine.rule_inputs import History, joined, trimmed


def plain(history: History) -> list[tuple[object, ...]]:
    return [(int(place), *row) for place, row in zip(history.position, rows_of(history.block), strict=True)]


@given(st.lists(blocks, max_size=6), st.integers(0, 3), st.integers(-1, 6))
def test_what_is_kept_can_be_rebuilt_from_the_segments_that_hold_it(
    parts: list[Block], lookback: int, sealed: int
) -> None:
    numbered = list(enumerate(parts))
    whole = trimmed(joined(numbered, History.empty()), lookback, sealed)
    kept = set(whole.positions)
    again = [(place, block) for place, block in numbered if place in kept]
    assert plain(trimmed(joined(again, History.empty()), lookback, sealed)) == plain(whole)


@given(st.lists(blocks, max_size=6), st.integers(0, 3), st.integers(-1, 6), st.integers(-1, 6))
def test_trimming_on_the_way_changes_nothing(
    parts: list[Block], lookback: int, first: int, second: int
) -> None:
    numbered = list(enumerate(parts))
    sealed = max(first, second)
    step_by_step = History.empty()
    for part in numbered:
        step_by_step = trimmed(joined([part], step_by_step), lookback, min(first, second))
    whole = joined(numbered, History.empty())
    assert plain(trimmed(step_by_step, lookback, sealed)) == plain(trimmed(whole, lookback, sealed))
