from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.sdk.format.blocks import Row, block_of, blocks, gradient, rows_of
from watchstep.format.block import Block
from watchstep_rules.engine.rule_inputs import History, joined, trimmed


def plain(history: History) -> list[tuple[object, ...]]:
    return [(int(place), *row) for place, row in zip(history.position, rows_of(history.block), strict=True)]


@given(st.lists(blocks, max_size=6), st.integers(0, 3), st.integers(-1, 6))
def test_what_is_retained_can_be_rebuilt_from_the_segments_that_hold_it(
    parts: list[Block], lookback: int, watermark: int
) -> None:
    numbered = list(enumerate(parts))
    whole = trimmed(joined(numbered, History.empty()), lookback, watermark)
    positions = set(whole.positions)
    again = [(place, block) for place, block in numbered if place in positions]
    assert plain(trimmed(joined(again, History.empty()), lookback, watermark)) == plain(whole)


@given(st.lists(blocks, max_size=6), st.integers(0, 3), st.integers(-1, 6), st.integers(-1, 6))
def test_trimming_on_the_way_changes_nothing(
    parts: list[Block], lookback: int, first: int, second: int
) -> None:
    numbered = list(enumerate(parts))
    watermark = max(first, second)
    step_by_step = History.empty()
    for part in numbered:
        step_by_step = trimmed(joined([part], step_by_step), lookback, min(first, second))
    whole = joined(numbered, History.empty())
    assert plain(trimmed(step_by_step, lookback, watermark)) == plain(trimmed(whole, lookback, watermark))


@given(st.lists(blocks, max_size=6), st.integers(0, 3), st.integers(-1, 6), st.integers(0, 12))
def test_the_limit_of_judged_rows_keeps_the_last_ones_and_all_rows_after_the_watermark(
    parts: list[Block], lookback: int, watermark: int, most: int
) -> None:
    whole = joined(list(enumerate(parts)), History.empty())
    unlimited = trimmed(whole, lookback, watermark)
    limited = trimmed(whole, lookback, watermark, most)
    judged = limited.block.step <= watermark
    assert np.count_nonzero(judged) <= most
    assert limited.limited == (np.count_nonzero(unlimited.block.step <= watermark) > most)
    assert set(plain(limited)) <= set(plain(unlimited))
    after = trimmed(whole, 0, watermark)
    assert [row for row in plain(limited) if row in plain(after)] == plain(after)
    if not limited.limited:
        assert plain(limited) == plain(unlimited)


def test_every_series_keeps_its_last_row_if_the_limit_allows_it() -> None:
    infos = [gradient(f"layer{index}", order=index) for index in range(10)]
    # The last series was recorded only at the first step.
    rows = [Row(step, info, [1.0]) for step in range(20) for info in infos[: 10 if step == 0 else 9]]
    history = joined([(0, block_of(rows))], History.empty())
    positions = trimmed(history, 15, 19, most=60).block
    assert len(positions) <= 60
    assert {positions.info(row).name for row in range(len(positions))} == {info.name for info in infos}
    assert {int(step) for step in positions.step[positions.tensor == positions.tensor.min()]} == set(
        range(14, 20)
    )
