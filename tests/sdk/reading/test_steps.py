"""Complete, incomplete, missing and pending steps, numbers of evaluations, and a restricted range of steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.sdk.format.blocks import Row, block_of
from tests.sdk.reading.saved import claim, end, save
from tests.sdk.reading.stored import FIRST, LOSS, new_run, some_rows, write
from watchstep import open_run
from watchstep.errors import ConfigError, NotFoundError
from watchstep.format.layout import SnapshotKey
from watchstep.format.tensors import Mode
from watchstep.reading import compact
from watchstep.reading.run import RangeSteps
from watchstep.store.store import Store


def loss(step: int, worker: int = 0, mode: Mode = "train") -> Row:
    return Row(step, LOSS, [float(step)], worker=worker, mode=mode)


def two_workers(folder: Path) -> Store:
    """Worker 0 recorded steps 0 to 6, worker 1 steps 0 to 4 without 2; both evaluated at 3, worker 0 also at 6. Step 1 has no row."""
    store = new_run(folder)
    write(
        store,
        [
            block_of(
                [loss(step) for step in (0, 2, 3, 4, 5, 6)] + [loss(step, mode="eval") for step in (3, 6)]
            )
        ],
    )
    write(
        store,
        [block_of([loss(step, 1) for step in (0, 3, 4)] + [loss(3, 1, "eval")])],
        writer="w1",
    )
    return store


def test_states_of_steps(tmp_path: Path) -> None:
    store = two_workers(tmp_path)
    run = open_run(tmp_path / "default" / "r")
    states = [run.step_state(step) for step in range(8)]
    assert states == [
        "complete",
        "missing",
        "incomplete",
        "complete",
        "complete",
        "incomplete",
        "incomplete",
        "pending",
    ]
    assert [run.has_passed_step(step) for step in range(8)] == [True] * 5 + [False] * 3
    assert [run.step_state(step, "eval") for step in (2, 3, 4, 6)] == [
        "missing",
        "complete",
        "pending",
        "incomplete",
    ]
    assert run.steps() == [0, 2, 3, 4, 5, 6]
    assert run.steps(incomplete=False) == [0, 3, 4]
    assert (run.steps("eval"), run.steps("eval", incomplete=False)) == ([3, 6], [3])
    end(store, "a", 1, 4)
    run.refresh()
    assert run.steps(incomplete=False) == [0, 3, 4, 5, 6]
    assert [run.step_state(step) for step in (2, 5, 6, 7)] == [
        "incomplete",
        "complete",
        "complete",
        "pending",
    ]
    assert run.has_passed_step(6)
    assert not run.has_passed_step(7)
    end(store, "a", 0, 6)
    run.refresh()
    assert (run.step_state(7), run.has_passed_step(100)) == ("missing", True)


def test_states_of_a_resumed_run_are_those_of_the_attempt_of_each_step(tmp_path: Path) -> None:
    store = new_run(tmp_path)
    write(store, [block_of([loss(step, worker) for step in range(6) for worker in range(3)])])
    write(store, [block_of([loss(step) for step in range(4, 8)])], "b")
    end(store, "a", 0, 5)
    run = open_run(tmp_path / "default" / "r")
    assert [run.step_state(step) for step in range(9)] == ["complete"] * 8 + ["pending"]
    assert run.steps(incomplete=False) == list(range(8))


def test_a_saved_object_is_a_record_of_its_step(tmp_path: Path) -> None:
    store = new_run(tmp_path)
    write(store, [block_of([loss(step) for step in range(9)])])
    for step in (3, 6):
        save(store, SnapshotKey("a", 0, step, "eval", "activations"), {"x": np.zeros(2)})
    run = open_run(tmp_path / "default" / "r")
    assert [run.step_state(step, "eval") for step in (3, 4)] == ["complete", "missing"]
    assert (run.steps("eval"), run.mode_step(6, "eval")) == ([], 1)


def test_an_empty_run_has_pending_steps_only(tmp_path: Path) -> None:
    new_run(tmp_path)
    run = open_run(tmp_path / "default" / "r")
    assert (run.step_state(0), run.has_passed_step(0), run.steps(incomplete=False)) == ("pending", False, [])


def test_a_run_with_saved_objects_only_has_steps(tmp_path: Path) -> None:
    store = new_run(tmp_path)
    claim(store, "a")
    for worker, step in ((0, 2), (1, 2), (0, 4)):
        save(store, SnapshotKey("a", worker, step, "train", "weights"), {"w": np.zeros(2)})
    run = open_run(tmp_path / "default" / "r")
    states = [run.step_state(step) for step in range(6)]
    assert states == ["missing", "missing", "complete", "pending", "incomplete", "pending"]


def test_numbers_of_evaluations(tmp_path: Path) -> None:
    two_workers(tmp_path)
    run = open_run(tmp_path / "default" / "r")
    assert [run.mode_step(step, "eval") for step in (3, 6)] == [0, 1]
    assert [run.global_step(number, "eval") for number in (0, 1)] == [3, 6]
    assert run.mode_step(41, "train") == run.global_step(41, "train") == 41
    requests: list[Callable[[], int]] = [
        lambda: run.mode_step(4, "eval"),
        lambda: run.global_step(2, "eval"),
        lambda: run.global_step(-1, "eval"),
        lambda: run.mode_step(3, "predict"),
    ]
    for request in requests:
        with pytest.raises(NotFoundError):
            request()


@pytest.mark.parametrize("is_compacted", [False, True])
def test_a_range_of_steps_restricts_all_queries(tmp_path: Path, is_compacted: bool) -> None:
    store = new_run(tmp_path)
    write(
        store, [block_of(some_rows(range(0, 40, 2))), block_of([loss(step, mode="eval") for step in (8, 20)])]
    )
    for step in (10, 12, 20):
        save(store, SnapshotKey("a", 0, step, "train", "weights"), {"w": np.full(3, step)})
    url = tmp_path / "default" / "r"
    if is_compacted:
        compact(url)
    run = open_run(url, range_steps=(11, 21))
    within = [12, 14, 16, 18, 20]
    assert run.steps("train") == sorted(set(run.losses()["step"].to_pylist())) == within
    assert run.steps(incomplete=False) == within
    assert sorted(set(run.rows().step.tolist())) == sorted(set(run.rows("a").step.tolist())) == within
    assert run.series(FIRST.name, "mean")["step"].to_pylist() == run.tensor(FIRST.name).steps() == within
    (counted,) = run.sql("SELECT min(step) AS first, max(step) AS last FROM statistics").to_pylist()
    assert counted == {"first": 12, "last": 20}
    assert set(run.at_step(["mean"])["step"].to_pylist()) == {20}
    assert run.heatmap("gradients", "mean", 100).edges.tolist() == list(range(11, 22, 2))
    assert run.histogram(FIRST.name).edges[[0, -1]].tolist() == [12, 21]
    assert (run.tensor("w").saved_steps(), [key.step for key in run.snapshots()]) == ([12, 20], [12, 20])
    assert (run.steps("eval"), run.mode_step(20, "eval"), run.mode_step(8, "eval")) == ([20], 1, 0)
    assert (run.step_state(13), run.step_state(20)) == ("missing", "complete")
    with pytest.raises(NotFoundError):
        run.tensor("w").value(10)
    for request in (lambda: run.step_state(10), lambda: run.has_passed_step(21), lambda: run.tensors(step=4)):
        with pytest.raises(ConfigError, match="outside of the run's range_steps"):
            request()


def test_a_range_may_have_one_limit(tmp_path: Path) -> None:
    store = new_run(tmp_path)
    write(store, [block_of(some_rows(range(6)))])
    url = tmp_path / "default" / "r"
    assert open_run(url, range_steps=(4, None)).steps() == [4, 5]
    assert open_run(url, range_steps=(None, 2)).steps() == [0, 1]
    assert open_run(store, range_steps=(2, 3)).steps() == [2]
    assert open_run(url, range_steps=(100, 200)).steps() == []


@pytest.mark.parametrize("steps", [(2, 2), (-1, 3), (3, 1), (1,), "12", (0.5, 2), (True, 2)])
def test_an_invalid_range_is_refused(tmp_path: Path, steps: RangeSteps) -> None:
    store = new_run(tmp_path)
    with pytest.raises(ConfigError, match="range_steps"):
        open_run(store, range_steps=steps)
