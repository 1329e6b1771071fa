from __future__ import annotations

import numpy as np

from tests.sdk.format.blocks import Row, block_of, tensor
from watchstep.format.block import Block
from watchstep_rules.signals.series import LaggedRows

A, B, C = (tensor(name, "weights") for name in "abc")


def test_what_stood_before_is_of_the_same_series_and_of_the_context_too() -> None:
    context = block_of([Row(0, C, [9.0]), Row(0, B, [1.0]), Row(1, B, [2.0]), Row(1, B, [7.0], "eval")])
    block = block_of([Row(2, A, [3.0]), Row(2, B, [4.0]), Row(3, B, [5.0]), Row(3, B, [8.0], worker=1)])
    lagged = LaggedRows.of(context, block)
    means = lagged.column(lambda rows: rows.statistics.mean)
    nan = np.nan
    for rows, expected in enumerate(
        [[3.0, 4.0, 5.0, 8.0], [nan, 2.0, 4.0, nan], [nan, 1.0, 2.0, nan], [nan, nan, 1.0, nan]]
    ):
        assert np.array_equal(lagged.lag(means, rows), np.array(expected), equal_nan=True)


def test_nothing_before_nothing() -> None:
    lagged = LaggedRows.of(Block.empty(), Block.empty())
    assert len(lagged.lag(lagged.column(lambda rows: rows.statistics.mean), 1)) == 0
