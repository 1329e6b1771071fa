"""Losses with a number of examples: a loss of n examples counts as n equal losses, in host memory and on a device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.sdk.pytorch.losses.test_losses_per_step import Elsewhere
from tests.sdk.training import EVERY_STEP, recorded
from watchstep import Hook
from watchstep.capture.steps.record import join
from watchstep.capture.steps.session import Session
from watchstep.format.block import Block
from watchstep.format.statistics import COUNT_COLUMNS

losses = st.floats(-1e6, 1e6, width=32) | st.sampled_from([math.nan, math.inf, -math.inf, 0.0])
batches = st.lists(st.tuples(losses, st.integers(1, 50)), min_size=1, max_size=12)


def block_of(values: Sequence[tuple[float, int]], *, on_device: Sequence[bool]) -> Block:
    """The row of losses with weights."""
    session = Session.begin(EVERY_STEP, 0, "ignore")
    for (loss, weight), elsewhere in zip(values, itertools.cycle(on_device), strict=False):
        if elsewhere:
            session.recorder.device_scalar("loss", Elsewhere([loss]), "eval", weight=weight)
        else:
            session.recorder.scalar("loss", loss, "eval", weight=weight)
    session.recorder.hand_over()
    item = session.queue.take()
    assert item is not None
    return join(list(item.records))


@given(batches, st.lists(st.booleans(), min_size=1, max_size=5))
def test_a_weight_is_a_repetition(values: list[tuple[float, int]], on_device: list[bool]) -> None:
    weighted = block_of(values, on_device=on_device)
    repeated = block_of([(loss, 1) for loss, weight in values for _ in range(weight)], on_device=[False])
    assert len(weighted) == 1
    for column in COUNT_COLUMNS:
        assert getattr(weighted.statistics, column).tolist() == getattr(repeated.statistics, column).tolist()
    for column in ("min", "max", "abs_min"):
        np.testing.assert_array_equal(
            getattr(weighted.statistics, column), getattr(repeated.statistics, column)
        )
    size = 1 + max((abs(loss) for loss, _ in values if math.isfinite(loss)), default=0.0)
    for column, power in (("mean", 1), ("m2", 2), ("abs_sum", 1), ("square_sum", 2)):
        found, due = getattr(weighted.statistics, column), getattr(repeated.statistics, column)
        np.testing.assert_allclose(found, due, rtol=1e-9, atol=1e-9 * size**power)
    for part in ("bins", "counts"):
        np.testing.assert_array_equal(
            getattr(weighted.statistics.histogram, part), getattr(repeated.statistics.histogram, part)
        )


@given(batches, batches, st.booleans())
def test_weighted_losses_merge_in_any_order(
    first: list[tuple[float, int]], second: list[tuple[float, int]], on_device: bool
) -> None:
    together = block_of([*first, *second], on_device=[on_device])
    swapped = block_of([*second, *first], on_device=[not on_device])
    for column in COUNT_COLUMNS:
        assert getattr(together.statistics, column).tolist() == getattr(swapped.statistics, column).tolist()
    size = max((abs(loss) for loss, _ in [*first, *second] if math.isfinite(loss)), default=0.0)
    np.testing.assert_allclose(
        together.statistics.mean, swapped.statistics.mean, rtol=1e-9, atol=1e-9 * (1 + size)
    )


def test_the_mean_of_an_evaluation_is_that_of_its_examples(tmp_path: Path) -> None:
    hook = Hook(tmp_path, config=EVERY_STEP)
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    for batch in x.split(32):  # the last has 4 examples
        hook.log(
            loss=batch.mean(), val_loss=float(batch.mean()), accuracy=0.5, mode="eval", examples=len(batch)
        )
    hook.step()
    run = recorded(hook)
    for name in ("loss", "val_loss"):
        (row,) = run.tensor(name).statistics().to_pylist()
        assert row["mean"] == pytest.approx(x.mean().item(), abs=1e-7)
        assert row["count"] == 100
    (row,) = run.tensor("accuracy").statistics().to_pylist()
    assert row["count"] == 1  # a metric has no weight


def test_batches_that_are_nan_count_with_their_examples(tmp_path: Path) -> None:
    hook = Hook(tmp_path, config=EVERY_STEP)
    for loss, examples in ((1.0, 3), (math.nan, 5), (4.0, 1), (math.inf, 2)):
        hook.log(loss=loss, mode="eval", examples=examples)
    hook.step()
    (row,) = recorded(hook).tensor("loss").statistics().to_pylist()
    assert (row["count"], row["nan"], row["pos_inf"]) == (11, 5, 2)
    assert row["mean"] == pytest.approx(7 / 4)


def test_thousands_of_weighted_batches_on_a_device_are_measured_together() -> None:
    session = Session.begin(EVERY_STEP, 0, "ignore")
    for number in range(2_000):
        weight = 4 if number == 1_999 else 32
        session.recorder.device_scalar("loss", Elsewhere([float(number % 7)]), "eval", weight=weight)
    session.recorder.hand_over()
    item = session.queue.take()
    assert item is not None
    assert len(item.records) <= 11
    block = join(list(item.records))
    weights = np.array([*[32] * 1_999, 4])
    assert block.statistics.count.tolist() == [weights.sum()]
    assert block.statistics.mean[0] == pytest.approx(np.average(np.arange(2_000) % 7, weights=weights))


@pytest.mark.parametrize("examples", [0, -1, 2**31, True, 1.5, "3", None, float("nan")])
def test_a_wrong_number_of_examples_is_reported_and_nothing_is_recorded(
    tmp_path: Path, examples: Any
) -> None:
    hook = Hook(tmp_path, config=EVERY_STEP)
    hook.log(loss=1.0, examples=examples)
    hook.log(loss=2.0, examples=np.int64(3))
    hook.step()
    hook.close()
    assert hook.health["faults"] == {
        "log": f"ValueError: examples={examples!r}: use the number of examples of the batch, from 1"
    }
    from watchstep import open_run

    (row,) = open_run(hook.run_url).tensor("loss").statistics().to_pylist()
    assert (row["mean"], row["count"]) == (2.0, 3)
