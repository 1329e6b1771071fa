"""Points have the values that readers of the run get, however its rows are split."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sdk.training import EVERY_STEP, Training, recorded
from watchstep import Hook, Run
from watchstep.capture.mirror.mirrored_run import MirroredPoint
from watchstep.capture.mirror.points import PointSource
from watchstep.format.block import Block, concatenate

STEPS = 12
SERIES = ("losses", "metrics", "gradients/l2", "weights/abs_max", "gradients/nan")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    training = Training()
    hook = Hook(tmp_path_factory.mktemp("points"), run="r", config=EVERY_STEP)
    hook.watch(training.model, training.optimizer)

    def each(step: int, _: object) -> None:
        hook.log(accuracy=step / STEPS)
        if step % 4 == 3:
            for value in (1.0, 3.0, math.inf if step == 7 else 5.0):
                hook.log(loss=value, mode="eval")

    training.run(STEPS, each)
    return recorded(hook)


@pytest.fixture(scope="module")
def rows(run: Run) -> Block:
    return concatenate([run.tensor(info.name).rows for info in run.catalogue])


def points_of(source: PointSource, blocks: list[Block]) -> list[MirroredPoint]:
    points = [point for block in blocks for point in source.add([source.select(block)])]
    return [*points, *source.finish()]


def values(points: list[MirroredPoint]) -> dict[str, dict[int, float]]:
    named: dict[str, dict[int, float]] = {}
    for point in points:
        for name, value in point.values.items():
            assert point.step not in named.setdefault(name, {})
            named[name][point.step] = value
    return named


def test_they_have_the_recorded_steps_and_values(run: Run, rows: Block) -> None:
    mirrored = values(points_of(PointSource(SERIES), [rows]))
    losses = run.losses().to_pylist()
    for mode in ("train", "eval"):
        assert mirrored[f"watchstep/{mode}/loss"] == {
            row["step"]: row["value"] for row in losses if row["mode"] == mode
        }
    assert mirrored["watchstep/eval/loss"] == {3: 3.0, 7: math.inf, 11: 3.0}
    assert mirrored["watchstep/train/accuracy"] == {step: step / STEPS for step in range(STEPS)}
    squares = np.zeros(STEPS)
    for name in run.tensors("gradients"):
        squares += np.array(run.series(name, "l2")["l2"]) ** 2
    l2 = mirrored["watchstep/train/gradients/l2"]
    assert list(l2) == list(range(STEPS))
    assert list(l2.values()) == pytest.approx(list(np.sqrt(squares)), rel=1e-12)
    largest = np.max([run.series(name, "abs_max")["abs_max"] for name in run.tensors("weights")], axis=0)
    assert list(mirrored["watchstep/train/weights/abs_max"].values()) == list(largest)
    assert set(mirrored["watchstep/train/gradients/nan"].values()) == {0.0}


@given(cuts=st.sets(st.integers(1, 10_000), max_size=12))
def test_they_do_not_depend_on_how_rows_are_split(rows: Block, cuts: set[int]) -> None:
    ordered = rows.ordered()
    bounds = [0, *sorted(cut % len(ordered) for cut in cuts), len(ordered)]
    parts = [ordered.take(np.arange(start, end)) for start, end in pairwise(bounds)]
    whole = points_of(PointSource(SERIES), [ordered])
    assert values(points_of(PointSource(SERIES), parts)) == values(whole)


def test_shards_are_left_out(rows: Block) -> None:
    sharded = replace(rows, places=replace(rows.places, shard_count=rows.places.shard_count + 1))
    source = PointSource(SERIES)
    mirrored = values(points_of(source, [sharded]))
    assert source.has_shards
    assert "watchstep/train/loss" in mirrored
    assert "watchstep/train/gradients/l2" not in mirrored


def test_nothing_is_selected_without_series(rows: Block) -> None:
    assert len(PointSource(("confusion/rms",)).select(rows)) == 0
