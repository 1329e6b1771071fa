"""What is recorded of losses: their functions, their numbers of examples, and the measurements when one leaves its range."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as PyTorch's own documentation has it

from tests.sdk.pytorch.losses.test_losses_per_step import Elsewhere
from tests.sdk.training import EVERY_STEP, batches, recorded, small_model, watching, with_sgd
from watchstep import Cadence, CaptureConfig, Hook, open_run
from watchstep.capture.steps.record import join
from watchstep.capture.steps.session import Session
from watchstep.format.block import Block
from watchstep.format.statistics import COUNT_COLUMNS
from watchstep.pytorch.losses import loss_function

OUTPUT = torch.linspace(-1, 1, 24).reshape(8, 3)
CLASSES = torch.arange(8) % 3
ONE_HOT = F.one_hot(CLASSES, 3).float()


@pytest.mark.parametrize(
    ("loss", "function"),
    [
        (lambda output: F.cross_entropy(output, CLASSES), "NllLoss"),
        (lambda output: F.cross_entropy(output, CLASSES, reduction="none").mean(), "NllLoss"),
        (lambda output: F.cross_entropy(output.T[None], CLASSES[None, :3]), "NllLoss2D"),
        (lambda output: F.cross_entropy(output, CLASSES).double(), "NllLoss"),
        (lambda output: F.mse_loss(output, ONE_HOT), "MseLoss"),
        (lambda output: F.binary_cross_entropy_with_logits(output, ONE_HOT), "BinaryCrossEntropyWithLogits"),
        (lambda output: -F.cross_entropy(output, CLASSES), "-NllLoss"),
        (lambda output: F.mse_loss(output, ONE_HOT).neg().neg(), "MseLoss"),
        (lambda output: F.cross_entropy(output.softmax(1), CLASSES), "NllLoss:probabilities"),
        (lambda output: -F.nll_loss(output.softmax(1), CLASSES), "-NllLoss:probabilities"),
        (lambda output: F.cross_entropy(output.log_softmax(1), CLASSES), "NllLoss"),
        (
            lambda output: F.binary_cross_entropy_with_logits(output.sigmoid(), ONE_HOT),
            "BinaryCrossEntropyWithLogits:probabilities",
        ),
        (lambda output: F.cross_entropy(output, CLASSES, reduction="sum"), ""),
        (lambda output: F.cross_entropy(output, CLASSES) / 4, ""),
        (lambda output: F.cross_entropy(output, CLASSES) + output.square().mean(), ""),
        (lambda output: F.cross_entropy(output, CLASSES).detach(), ""),
    ],
)
def test_a_plain_loss_is_named_by_its_function(loss: Callable[[Tensor], Tensor], function: str) -> None:
    output = OUTPUT[:3, :].T.contiguous() if function == "NllLoss2D" else OUTPUT
    assert loss_function(loss(output.clone().requires_grad_())) == function


@pytest.mark.parametrize("logged", ["tensor", "number", None])
def test_the_function_is_recorded_with_the_loss(tmp_path: Path, logged: str | None) -> None:
    model, optimizer = with_sgd(nn.Linear(3, 3))
    with Hook(tmp_path) as hook:
        hook.watch(model, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(OUTPUT), CLASSES)
            loss.backward()
            optimizer.step()
            if logged:
                hook.log(loss=loss if logged == "tensor" else loss.item())
                hook.log(mode="eval", loss=loss.detach())
    catalogue = open_run(hook.run_url).rows().catalogue
    assert [info.module_type for info in catalogue if info.role == "loss"] == ["NllLoss"]


SELDOM = {
    name: Cadence(every=1000)
    for name in ("losses", "weights", "biases", "gradients", "activations", "updates")
}
ONSET, BURST = 60, list(range(60, 65))


def trained(
    store: Path, *, factor: float = 50.0, logged: bool = False, gate: bool = True
) -> tuple[dict[str, list[int]], dict[str, int], list[float]]:
    """The steps of some tensors' records, counts of health, and the losses."""
    model, optimizer = with_sgd(small_model(), 1e-3)
    config = CaptureConfig({**SELDOM, "losses": Cadence()}, system=None, gate=gate)
    hook = watching(store, model, optimizer, config=config)
    losses = []
    for step, (x, y) in enumerate(batches(90)):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y) * (factor if step == ONSET else 1.0)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if logged:
            hook.log(loss=losses[-1])
    run = recorded(hook)
    names = ("0.weight", "0.weight:gradient", "0.bias:update", "1:output")
    return {name: run.tensor(name).steps() for name in names}, hook.health["counts"], losses


@pytest.mark.parametrize("logged", [False, True])
def test_an_onset_is_measured_from_its_own_step_on(logged: bool, tmp_path: Path) -> None:
    steps, counts, _ = trained(tmp_path, logged=logged)
    for name in ("0.weight", "0.weight:gradient", "0.bias:update"):
        assert steps[name] == [0, *BURST], name
    assert steps["1:output"] == [0, *BURST], "the outputs of the bad batch are still there at backward"
    assert counts["measured_onsets"] == 1


def test_sound_steps_and_a_gate_that_is_off_measure_nothing_more(tmp_path: Path) -> None:
    steps, counts, _ = trained(tmp_path / "sound", factor=1.0)
    assert all(recorded_steps == [0] for recorded_steps in steps.values())
    assert "measured_onsets" not in counts
    steps, _, _ = trained(tmp_path / "off", gate=False)
    assert all(recorded_steps == [0] for recorded_steps in steps.values())


def test_the_training_is_the_same_to_the_bit(tmp_path: Path) -> None:
    _, _, watched = trained(tmp_path / "watched")
    _, _, ungated = trained(tmp_path / "ungated", gate=False)
    assert watched == ungated


def test_fewer_gradients_than_ever_are_an_onset(tmp_path: Path) -> None:
    model, optimizer = with_sgd(small_model(), 1e-3)
    hook = watching(
        tmp_path, model, optimizer, config=CaptureConfig({**SELDOM, "losses": Cadence()}, system=None)
    )
    for step, (x, y) in enumerate(batches(90)):
        optimizer.zero_grad()
        with torch.set_grad_enabled(step < ONSET):
            found = model[:3](x)
        nn.functional.cross_entropy(model[3](found), y).backward()
        optimizer.step()
    run = recorded(hook)
    assert run.tensor("3.weight:gradient").steps() == [0, *BURST]
    assert run.tensor("0.weight:gradient").steps() == [0]
    assert run.tensor("0.weight:update").steps() == [0, *BURST]


any_loss = st.floats(-1e6, 1e6, width=32) | st.sampled_from([math.nan, math.inf, -math.inf, 0.0])
weighted_losses = st.lists(st.tuples(any_loss, st.integers(1, 50)), min_size=1, max_size=12)


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


@given(weighted_losses, st.lists(st.booleans(), min_size=1, max_size=5))
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


@given(weighted_losses, weighted_losses, st.booleans())
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


def test_thousands_of_weighted_batches_on_a_device_are_measured_together() -> None:
    session = Session.begin(EVERY_STEP, 0, "ignore")
    cell = [0.0]
    for number in range(2_000):
        cell[0] = float(number % 7)
        weight = 4 if number == 1_999 else 32
        session.recorder.device_scalar("loss", Elsewhere(cell), "eval", weight=weight)
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
