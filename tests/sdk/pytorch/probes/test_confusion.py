"""Confusion counts of labels and predictions by class."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.sdk.training import EVERY_STEP, recorded
from watchstep import Hook, Run

LABELS = torch.tensor([0, 0, 0, 1, 2, 2, -100])
GUESSES = torch.tensor([0, 2, 2, 1, 2, 0, 1])
FIGURES = ("examples", "correct", "confused", "confused_with")


def figures(run: Run, name: str) -> list[tuple[float | None, ...]]:
    rows = run.tensor(name).statistics().to_pydict()
    return list(zip(*(rows[f"probe.{figure}"] for figure in FIGURES), strict=True))


def given(store: Path, labels: Tensor, outputs: Tensor, times: int = 1) -> Run:
    hook = Hook(store, config=EVERY_STEP)
    for _ in range(times):
        hook.record(outputs=outputs, labels=labels)
        hook.step()
    return recorded(hook)


@pytest.mark.parametrize("scores", [True, False])
def test_counts_of_each_class(scores: bool, tmp_path: Path) -> None:
    outputs = torch.nn.functional.one_hot(GUESSES, 3).float() if scores else GUESSES
    run = given(tmp_path, LABELS, outputs, times=2)
    assert figures(run, "confusion/0") == [(3, 1, 2, 2), (6, 2, 4, 2)]
    assert figures(run, "confusion/1") == [(1, 1, 0, None), (2, 2, 0, None)]
    assert figures(run, "confusion/2") == [(2, 1, 1, 0), (4, 2, 2, 0)]
    rows = run.tensor("confusion/0").statistics().to_pydict()
    assert rows["mean"] == [pytest.approx(1 / 3)] * 2
    assert run.tensor("confusion/0").info.role == "confusion"


def test_a_class_without_examples_has_no_share(tmp_path: Path) -> None:
    run = given(tmp_path, torch.tensor([0, 0]), torch.eye(3)[:2])
    rows = run.tensor("confusion/2").statistics().to_pydict()
    assert (rows["count"], rows["probe.examples"]) == ([0], [0.0])


def test_the_last_batch_of_a_step_has_taken_in_the_others(tmp_path: Path) -> None:
    hook = Hook(tmp_path, config=EVERY_STEP)
    for _ in range(3):
        hook.record(labels=LABELS)
        hook.record(predictions=GUESSES)
    hook.step()
    assert figures(recorded(hook), "confusion/0") == [(9, 3, 6, 2)]


def test_counts_begin_anew(tmp_path: Path) -> None:
    run = given(tmp_path, torch.zeros(400, dtype=torch.int64), torch.eye(2)[[0] * 400], times=4)
    assert [row[0] for row in figures(run, "confusion/0")] == [400, 800, 1200, 400]


def test_classes_that_come_later_make_the_matrix_larger(tmp_path: Path) -> None:
    hook = Hook(tmp_path, config=EVERY_STEP)
    for labels in (torch.tensor([0, 1]), torch.tensor([0, 3])):
        hook.record(labels=labels, outputs=torch.tensor([0, 1]))
        hook.step()
    run = recorded(hook)
    assert figures(run, "confusion/0") == [(1, 1, 0, None), (2, 2, 0, None)]
    assert figures(run, "confusion/3") == [(1, 0, 1, 1)]


@pytest.mark.parametrize(
    ("labels", "outputs"),
    [
        (torch.zeros(4), torch.zeros(4, 2)),  # measured targets
        (torch.zeros(4, 7, dtype=torch.int64), torch.zeros(4, 2)),  # tokens
        (torch.zeros(4, dtype=torch.int64), torch.zeros(5, 2)),  # of other examples
        (torch.zeros(4, dtype=torch.int64), torch.zeros(4, 101)),  # too many classes
        (torch.zeros(4, dtype=torch.int64), torch.zeros(4, 1)),  # one number is no class
        (torch.full((4,), 100), torch.zeros(4, dtype=torch.int64)),
        (torch.zeros(0, dtype=torch.int64), torch.zeros(0, 2)),
    ],
)
def test_what_is_no_class_is_not_counted(labels: Tensor, outputs: Tensor, tmp_path: Path) -> None:
    assert not [name for name in given(tmp_path, labels, outputs).tensors() if name.startswith("confusion")]


def test_halves_of_different_steps_and_modes_do_not_meet(tmp_path: Path) -> None:
    hook = Hook(tmp_path, config=EVERY_STEP)
    hook.record(labels=LABELS)
    hook.step()
    hook.record(outputs=GUESSES)
    hook.record(labels=LABELS, mode="eval")
    assert not [name for name in recorded(hook).tensors() if name.startswith("confusion")]
