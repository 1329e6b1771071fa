"""Mirrored points have the values that readers of the run get, also beside the rows of a program in W&B, on a model of its history."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sdk.training import recorded, watched_training
from watchstep import Run
from watchstep.capture.mirror.mirrored_run import AlertChange, MirroredPoint
from watchstep.capture.mirror.points import PointSource
from watchstep.capture.mirror.wandb_run import WandbRun
from watchstep.format.block import Block, concatenate

STEPS = 12
SERIES = ("losses", "metrics", "gradients/l2", "weights/abs_max", "gradients/nan")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    hook, training = watched_training(tmp_path_factory.mktemp("points"), run="r")

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


class History:
    """The history of a run: a row is open until the step advances; rows of earlier steps are dropped."""

    def __init__(self) -> None:
        self.step = 0
        self.row: dict[str, Any] = {}
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.config = self
        self.summary: dict[str, str] = {}
        self.alerts: list[dict[str, Any]] = []
        self.dropped = 0

    def define_metric(self, *_: Any, **__: Any) -> None: ...

    def update(self, *_: Any, **__: Any) -> None: ...

    def alert(self, **alert: Any) -> None:
        self.alerts.append(alert)

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        if step is not None:
            if step < self.step:
                self.dropped += 1
                return
            if step > self.step:
                self.commit()
                self.step = step
        self.row |= data
        if commit or (commit is None and step is None):
            self.commit()
            self.step += 1

    def commit(self) -> None:
        if self.row:
            self.rows.append((self.step, self.row))
        self.row = {}

    def of_program(self) -> list[tuple[int, dict[str, Any]]]:
        rows = [
            (step, {name: value for name, value in row.items() if not name.startswith("watchstep/")})
            for step, row in self.rows
        ]
        return [(step, row) for step, row in rows if row]


NAMES = ("watchstep/train/loss", "watchstep/train/gradients/l2", "watchstep/eval/loss")
PROGRAM = st.one_of(
    st.just(("log", None)), st.tuples(st.just("log"), st.integers(0, 40)), st.just(("partial", None))
)
MIRROR = st.tuples(st.just("mirror"), st.lists(st.sets(st.sampled_from(NAMES), min_size=1), max_size=3))


@given(actions=st.lists(st.one_of(PROGRAM, MIRROR), max_size=40), is_stopped=st.booleans())
def test_rows_of_the_program_are_its_own_and_values_have_their_steps(
    actions: list[tuple[str, Any]], is_stopped: bool
) -> None:
    alone, shared = History(), History()
    run = WandbRun(shared)
    step, waiting = 0, 0
    for number, (kind, detail) in enumerate(actions):
        if kind == "mirror":
            points = []
            for names in detail:
                points.append(MirroredPoint(step, 0, dict.fromkeys(names, float(step))))
                step += 1
            waiting = run.write(points)
        else:
            for history in (alone, shared):
                if kind == "log":
                    history.log({"loss": number}, step=detail)
                else:
                    history.log({"partial": number}, commit=False)
    left = run.close(is_stopped=is_stopped)
    assert left == 0 if is_stopped else left <= waiting
    for history in (alone, shared):
        history.commit()
    assert shared.of_program() == alone.of_program()
    assert shared.dropped == alone.dropped
    for _, row in shared.rows:
        mirrored = {name: value for name, value in row.items() if name in NAMES}
        assert all(value == row["watchstep/step"] for value in mirrored.values())
    written = sum("watchstep/step" in row for _, row in shared.rows)
    assert written <= step - left - run.thinned


def test_of_several_steps_for_a_row_the_newest_is_written() -> None:
    history = History()
    run = WandbRun(history)
    history.log({"loss": 0}, commit=False)
    assert run.write([MirroredPoint(step, 0, {NAMES[0]: float(step)}) for step in range(5)]) == 0
    assert run.write([MirroredPoint(5, 0, {NAMES[0]: 5.0})]) == 0
    assert history.row == {"loss": 0, NAMES[0]: 5.0, "watchstep/step": 5}
    assert run.thinned == 4


def test_values_that_newer_steps_do_not_have_wait_for_a_row() -> None:
    history = History()
    run = WandbRun(history)
    points = [
        MirroredPoint(1, 0, {NAMES[0]: 1.0, NAMES[2]: 1.0}),
        MirroredPoint(2, 0, {NAMES[0]: 2.0}),
        MirroredPoint(3, 0, {NAMES[1]: 3.0}),
    ]
    assert run.write(points) == 2
    history.log({"loss": 0})
    assert run.write([]) == 1
    history.log({"loss": 1})
    assert run.write([]) == 0
    history.log({"loss": 2})
    assert [row["watchstep/step"] for _, row in history.rows] == [1, 2, 3]


def test_an_alert_joins_the_values_of_its_step() -> None:
    history = History()
    run = WandbRun(history)
    change = AlertChange("nan", "firing", "critical", 3, "NaN")
    run.alert(change)
    run.write([MirroredPoint(3, 0, {NAMES[0]: 3.0}), MirroredPoint(3, 0, {change.series: 1.0})])
    assert history.row == {NAMES[0]: 3.0, "watchstep/alerts/nan": 1.0, "watchstep/step": 3}
    assert history.alerts == [
        {"title": "Watchstep: nan", "text": "firing at step 3: NaN", "level": "ERROR", "wait_duration": 0}
    ]
    assert history.summary == {"watchstep/alert/nan": "firing at step 3: NaN"}


def test_with_rows_of_its_own_each_step_is_one() -> None:
    history = History()
    run = WandbRun(history, has_own_rows=True)
    assert run.write([MirroredPoint(step, 0, {NAMES[0]: float(step)}) for step in range(5)]) == 0
    assert [row["watchstep/step"] for _, row in history.rows] == list(range(5))
