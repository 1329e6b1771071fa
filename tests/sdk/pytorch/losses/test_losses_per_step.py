"""Losses recorded several times in a step: of batches, micro-batches and closures, and with a program's own division."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.sdk.training import (
    EVERY_STEP,
    batches,
    closure_of,
    recorded,
    small_model,
    watched_training,
    watching,
    with_sgd,
)
from watchstep import Hook, Run
from watchstep.capture.steps.record import DeviceScalar
from watchstep.errors import ConfigError
from watchstep.format.statistics import scalars
from watchstep.kernels.measurement import Completed, Measurement

INF, NAN = math.inf, math.nan


def rows(run: Run, name: str = "loss", mode: str = "train") -> list[tuple[float, int]]:
    """Value and count of each step."""
    table = run.losses().to_pylist()
    return [(row["value"], row["count"]) for row in table if row["name"] == name and row["mode"] == mode]


def test_losses_of_the_batches_of_an_evaluation_become_their_mean(tmp_path: Path) -> None:
    hook, training = watched_training(tmp_path)

    def evaluate(step: int, _: Any) -> None:
        for _loop in range(2):  # two loops between two updates are one evaluation
            for loss in (1.0, 2.0, 6.0):
                hook.log(loss=torch.tensor(loss + step), accuracy=loss, mode="eval")

    training.run(2, evaluate)
    run = recorded(hook)
    assert rows(run, mode="eval") == [(3.0, 6), (4.0, 6)]
    (first, _) = run.tensor("loss").statistics(mode="eval").to_pylist()
    assert (first["min"], first["max"]) == (1.0, 6.0)
    assert run.tensor("accuracy").statistics(mode="eval")["mean"].to_pylist() == [
        6.0,
        6.0,
    ]  # a metric is the last


@pytest.mark.parametrize(
    ("losses", "value"),
    [
        ((1.0, NAN, 6.0), NAN),
        ((1.0, INF, 6.0), INF),
        ((-INF, 2.0), -INF),
        ((-INF,), -INF),
        ((INF,), INF),
        ((-INF, INF), NAN),
        ((NAN,), NAN),
    ],
)
def test_what_is_not_finite_stays_visible(tmp_path: Path, losses: Sequence[float], value: float) -> None:
    with Hook(tmp_path, config=EVERY_STEP) as hook:
        for loss in losses:
            hook.log(loss=loss, mode="eval")
    run = recorded(hook)
    ((mean, count),) = rows(run, mode="eval")
    assert mean == value or (math.isnan(mean) and math.isnan(value))
    assert count == len(losses)
    (row,) = run.tensor("loss").statistics().to_pylist()
    assert row["nan"] + row["pos_inf"] + row["neg_inf"] == sum(not math.isfinite(loss) for loss in losses)


def test_an_update_ends_an_evaluation(tmp_path: Path) -> None:
    hook, training = watched_training(tmp_path)
    hook.log(
        loss=5.0, mode="eval"
    )  # of the weights before the first update, at the same step as those after it

    def evaluate(step: int, _: Any) -> None:
        for loss in (1.0, 3.0):
            hook.log(loss=loss + step, mode="eval")

    training.run(2, evaluate)
    run = recorded(hook)
    assert rows(run, mode="eval") == [(2.0, 2), (3.0, 2)]
    assert hook.health["counts"]["replaced_evaluations"] == 1


class Elsewhere:
    """A number as if on a device, which is written to after it was recorded."""

    def __init__(self, cell: list[float]) -> None:
        self._cell = cell

    def measure(self) -> Measurement:
        return Completed(scalars(list(self._cell)))

    def copy(self) -> DeviceScalar:
        return Elsewhere(list(self._cell))

    def measure_all(self, values: Sequence[Elsewhere]) -> Measurement:
        return (
            Completed(scalars([value._cell[0] for value in values]))
            if len(values) == 1
            else _Together(values)
        )


class _Together:
    """Several numbers as one tensor."""

    nonfinite = False

    def __init__(self, values: Sequence[Elsewhere]) -> None:
        self._values = [value._cell[0] for value in values]

    def collect(self) -> Any:
        from watchstep.format.statistics import merge_rows

        return merge_rows(scalars(self._values), np.zeros(len(self._values), np.intp), 1)


def test_micro_batches_that_the_program_logs_are_averaged(tmp_path: Path) -> None:
    hook, training = watched_training(tmp_path)

    def log(step: int, _: Any) -> None:
        hook.log({"loss": 1.0 + step, "learning_rate": 0.1})
        hook.log({"loss": 3.0 + step, "learning_rate": 0.2})

    training.run(2, log)
    run = recorded(hook)
    assert rows(run) == [(2.0, 2), (3.0, 2)]
    assert run.tensor("learning_rate").statistics()["mean"].to_pylist() == [0.2, 0.2]
    assert run.losses()["derived"].to_pylist() == [False, False]


def accumulate(
    hook: Hook,
    divisor: float,
    sizes: Sequence[int],
    divided: Callable[[Tensor, float], Tensor] = lambda loss, divisor: loss / divisor,
    **watch: Any,
) -> list[float]:
    """Train with so many micro-batches to each update; returns the mean of the undivided losses of each."""
    model, optimizer = with_sgd(small_model())
    hook.watch(model, optimizer, **watch)
    given = iter(batches(sum(sizes)))
    means = []
    for size in sizes:
        losses = []
        for _ in range(size):
            x, y = next(given)
            loss = nn.functional.cross_entropy(model(x), y)
            divided(loss, divisor).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        means.append(sum(losses) / size)
    return means


def test_divided_losses_are_recorded_undivided_where_the_divisor_is_given(tmp_path: Path) -> None:
    hook = Hook(tmp_path, config=EVERY_STEP)
    means = accumulate(hook, 4, [4, 4, 2], loss_divisor=4)  # the last is short, as at the end of the data
    run = recorded(hook)
    assert [value for value, _ in rows(run)] == pytest.approx(means, rel=1e-6)
    assert [count for _, count in rows(run)] == [4, 4, 2]


def test_losses_that_may_be_divided_are_marked(tmp_path: Path) -> None:
    hook = Hook(tmp_path, config=EVERY_STEP)
    means = accumulate(hook, 4, [3, 3])
    run = recorded(hook)
    assert [value for value, _ in rows(run)] == pytest.approx([mean / 4 for mean in means], rel=1e-6)
    assert run.losses()["derived"].to_pylist() == [True, True]


@pytest.mark.parametrize("logs_training", [False, True])
@pytest.mark.parametrize("evaluates_first", [False, True])
def test_a_loss_that_is_logged_in_an_evaluation_is_derived_in_training(
    tmp_path: Path, *, logs_training: bool, evaluates_first: bool
) -> None:
    model, optimizer = with_sgd(nn.Linear(2, 1))
    hook = watching(tmp_path, model, optimizer)
    for _ in range(3):
        if evaluates_first:
            hook.log(loss=2.0, mode="eval")
        loss = model(torch.ones(4, 2)).square().mean()
        loss.backward()
        if logs_training:
            hook.log(loss=loss)
        if not evaluates_first:
            hook.log(loss=2.0, mode="eval")
        optimizer.step()
        optimizer.zero_grad()
    losses = recorded(hook).losses()
    derived = {*zip(losses["mode"].to_pylist(), losses["derived"].to_pylist(), strict=True)}
    assert derived == {("train", not logs_training), ("eval", False)}


@pytest.mark.parametrize(
    "divided",
    [
        lambda loss, number: loss / number,
        lambda loss, number: loss / torch.tensor(float(number)),
        lambda loss, number: loss * (1 / number),
        lambda loss, number: torch.amp.GradScaler("cpu", init_scale=8.0).scale(loss / number),
    ],
    ids=["number", "tensor", "factor", "scaled"],
)
def test_losses_divided_by_the_number_of_micro_batches_are_seen_to_be(
    tmp_path: Path, divided: Callable[[Tensor, float], Tensor]
) -> None:
    hook = Hook(tmp_path, config=EVERY_STEP)
    means = accumulate(hook, 3, [3, 3, 2], divided)
    run = recorded(hook)
    assert [value for value, _ in rows(run)] == pytest.approx(means, rel=1e-6)
    assert [count for _, count in rows(run)] == [3, 3, 2]
    assert run.losses()["derived"].to_pylist() == [True, True, True]


@pytest.mark.parametrize("sizes", [[1, 1, 1], [2, 2], [5]])
def test_other_divisions_are_the_programs_own(tmp_path: Path, sizes: list[int]) -> None:
    hook = Hook(tmp_path, config=EVERY_STEP)
    means = accumulate(hook, 4, sizes)
    assert [value for value, _ in rows(recorded(hook))] == pytest.approx(
        [mean / 4 for mean in means], rel=1e-6
    )


def test_hooks_on_saved_tensors_are_not_called_for_it(tmp_path: Path) -> None:
    model, unpacked = small_model(), 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal unpacked
        unpacked += 1
        return tensor

    counts = []
    for watched in (False, True):
        hook = Hook(tmp_path / str(watched), config=EVERY_STEP)
        if watched:
            hook.watch(model)
        unpacked = 0
        for x, y in batches(2):
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, count):
                loss = nn.functional.cross_entropy(model(x), y) / torch.tensor(2.0)
            loss.backward()
        hook.close()
        counts.append(unpacked)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("divisor", [0, -1, math.inf, "4", True])
def test_an_invalid_divisor(tmp_path: Path, divisor: Any) -> None:
    with Hook(tmp_path, config=EVERY_STEP) as hook, pytest.raises(ConfigError, match="loss_divisor"):
        hook.watch(small_model(), loss_divisor=divisor)


def test_of_a_closure_the_loss_before_the_update_is_recorded(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    hook = watching(tmp_path, model, optimizer)
    first = [optimizer.step(closure_of(model, optimizer, x, y)).item() for x, y in batches(3)]
    assert rows(recorded(hook)) == [(loss, 1) for loss in first]


def test_of_two_watched_models_each_loss_counts_once(tmp_path: Path) -> None:
    hook, training = watched_training(tmp_path)
    other = nn.Linear(2, 2)

    def later(step: int, _: Any) -> None:
        if step == 0:
            hook.watch(other)
        else:
            other(torch.ones(1, 2)).sum().backward()

    losses = training.run(3, later)
    assert rows(recorded(hook)) == [(loss, 1) for loss in losses]
