"""Faults of data that begin in the middle: batches that say nothing, or something else."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD

from benchmarks.detection.data import Batches, Pair
from benchmarks.detection.mid_run import accepted
from benchmarks.detection.mid_run.bases import (
    counting_language,
    digits_by_convolutions,
    digits_by_layers,
    digits_reconstructed,
    sine_regression,
    train,
    two_kinds_of_waves,
)
from benchmarks.detection.witnessed import Training, mid_run


@mid_run(
    "constant_inputs",
    "from then on all inputs are zeros: the loss goes back to that of a guess",
    200,
    accepted.LOSS_RISES | {"vanishing_gradient", "gradients_cease"},
)
def constant_inputs(run: Training) -> None:
    """400 steps of a convolutional network; what it has learnt mostly stays, and it learns nothing more."""
    base = digits_by_convolutions(run, 400)
    train(run, base, 200, batch=lambda x, y: (torch.zeros_like(x), y))
    losses = base.losses
    run.separates("loss of training", sum(losses[180:200]) / 20, sum(losses[-20:]) / 20, sound_at_most=1.0)


@mid_run(
    "first_input_repeated",
    "a loader's index stands still: all inputs of a batch are its first one",
    180,
    accepted.LOSS_RISES,
)
def first_input_repeated(run: Training) -> None:
    """400 steps of a GRU."""
    base = two_kinds_of_waves(run, 400)
    before = train(run, base, 180, batch=lambda x, y: (x[:1].expand_as(x).contiguous(), y))
    run.separates("accuracy", before, base.measure(), sound_at_least=0.9)


@mid_run("shuffled_labels", "labels are shuffled apart from their inputs", 200, accepted.LOSS_RISES)
def shuffled_labels(run: Training) -> None:
    """400 steps of linear layers."""
    base = digits_by_layers(run, 400, rate=2e-3)
    generator = run.generator(5)
    before = train(run, base, 200, batch=lambda x, y: (x, y[torch.randperm(len(y), generator=generator)]))
    run.separates("accuracy", before, base.measure(), sound_at_least=0.85)


@mid_run(
    "shuffled_targets_of_a_regression",
    "targets are shuffled apart from their inputs",
    200,
    accepted.LOSS_RISES,
)
def shuffled_targets_of_a_regression(run: Training) -> None:
    """400 steps."""
    base = sine_regression(run, 400)
    generator = run.generator(5)
    before = train(run, base, 200, batch=lambda x, y: (x, y[torch.randperm(len(y), generator=generator)]))
    run.separates("error", before, base.measure(), sound_at_most=0.2)


@mid_run(
    "batches_of_padding",
    "a tokenizer's failure: all inputs are padding, the targets are not",
    220,
    accepted.LOSS_RISES | {"token_ratio"},
)
def batches_of_padding(run: Training) -> None:
    """350 steps of a language model."""
    base = counting_language(run, 350)
    before = train(run, base, 220, batch=lambda x, y: (torch.zeros_like(x), y), records_labels=False)
    run.separates("loss", before, base.measure(), sound_at_most=0.05)


def _sorted_by_class(run: Training, base_x: Tensor, base_y: Tensor, steps: int, onset: int) -> Batches:
    order = base_y.argsort()
    x, y = base_x[order], base_y[order]

    def change(step: int, given: Tensor, wanted: Tensor) -> Pair:
        if not run.faulty or step < onset:
            return given, wanted
        start = (step - onset) * 8 % (len(x) - 32)
        return x[start : start + 32], y[start : start + 32]

    return Batches(base_x, base_y, 32, steps, run.seed, change=change)


@mid_run(
    "sorted_by_class",
    "the loader is made anew without shuffling: classes come one after the other; labels are not recorded",
    150,
    accepted.SORTED,
)
def sorted_by_class(run: Training) -> None:
    """400 steps of a convolutional network."""
    base = digits_by_convolutions(run, 400)
    assert isinstance(base.batches, Batches)
    base.batches = _sorted_by_class(run, base.batches.x, base.batches.y, 400, 150)
    before = train(run, base, 150, records_labels=False)
    run.separates("accuracy", before, base.measure(), sound_at_least=0.85)


@mid_run(
    "sorted_by_class_with_labels",
    "the loader is made anew without shuffling: classes come one after the other",
    150,
    accepted.SORTED,
)
def sorted_by_class_with_labels(run: Training) -> None:
    """400 steps of linear layers."""
    base = digits_by_layers(run, 400, rate=2e-3)
    assert isinstance(base.batches, Batches)
    base.batches = _sorted_by_class(run, base.batches.x, base.batches.y, 400, 150)
    before = train(run, base, 150)
    run.separates("accuracy", before, base.measure(), sound_at_least=0.85)


@mid_run(
    "inputs_unscaled",
    "inputs come as they are, 255 times as large: another loader has no normalisation",
    180,
    accepted.EXPLODES,
)
def inputs_unscaled(run: Training) -> None:
    """360 steps of SGD."""
    base = digits_by_convolutions(run, 360)
    before = train(run, base, 180, batch=lambda x, y: (255 * (x + 0.3), y))
    run.separates("accuracy", before, base.measure(), sound_at_least=0.85)


@mid_run("targets_in_other_units", "targets come in thousandths of the unit before", 180, accepted.EXPLODES)
def targets_in_other_units(run: Training) -> None:
    """360 steps."""
    base = sine_regression(run, 360)
    before = train(run, base, 180, batch=lambda x, y: (x, 1000 * y))
    run.separates("error", before, base.measure(), sound_at_most=0.2)


@mid_run("labels_off_by_one", "the classes of a second file are numbered from one", 200, accepted.LOSS_RISES)
def labels_off_by_one(run: Training) -> None:
    """300 steps."""
    base = digits_by_layers(run, 300, rate=2e-3)
    before = train(run, base, 200, batch=lambda x, y: (x, (y + 1) % 10))
    run.separates("accuracy", before, base.measure(), sound_at_least=0.85)


@mid_run(
    "one_class_alone",
    "a filter leaves one class",
    150,
    {"class_imbalance", "overfit", "validation_loss_jump", *accepted.STANDS_STILL},
)
def one_class_alone(run: Training) -> None:
    """350 steps."""
    base = digits_by_convolutions(run, 350)
    assert isinstance(base.batches, Batches)
    (of_class,) = torch.where(base.batches.y == 3)
    x, y = base.batches.x[of_class], base.batches.y[of_class]
    before = train(run, base, 150, batch=lambda given, _: (x[: len(given)], y[: len(given)]))
    run.separates("accuracy", before, base.measure(), sound_at_least=0.85)


@mid_run(
    "one_batch_again_and_again",
    "a cached batch is given again and again: it is memorised",
    100,
    accepted.MEMORISED | accepted.STANDS_STILL,
)
def one_batch_again_and_again(run: Training) -> None:
    """500 steps of an autoencoder."""
    base = digits_reconstructed(run, 500)
    assert isinstance(base.batches, Batches)
    x, y = base.batches.x[:8], base.batches.y[:8]
    before = train(run, base, 100, batch=lambda *_: (x, y))
    run.separates("error", before, base.measure(), sound_at_most=0.045)


@mid_run("nan_in_a_column", "a sensor of the data fails and gives NaN", 200, accepted.NOT_FINITE)
def nan_in_a_column(run: Training) -> None:
    """300 steps."""
    base = sine_regression(run, 300)

    def broken(x: Tensor, y: Tensor) -> Pair:
        changed = x.clone()
        changed[:, 2] = math.nan
        return changed, y

    before = train(run, base, 200, batch=broken)
    run.separates("error", before, base.measure(), sound_at_most=0.2)


@mid_run("division_by_zero", "a batch whose deviation is zero is divided by it", 150, accepted.NOT_FINITE)
def division_by_zero(run: Training) -> None:
    """300 steps of a convolutional network."""
    base = digits_by_convolutions(run, 300)

    def standardised(x: Tensor, y: Tensor) -> Pair:
        constant = torch.zeros_like(x)
        return constant / constant.std(), y

    before = train(run, base, 150, batch=standardised)
    run.separates("accuracy", before, base.measure(), sound_at_least=0.8)


@mid_run(
    "loss_stays_at_its_start",
    "inputs are a thousandth of what the weights are made for: the loss stays where it begins",
    0,
    {
        "loss_not_decreasing",
        "slow_convergence",
        "vanishing_gradient",
        "poor_initialization",
        "weight_not_updating",
    },
)
def loss_stays_at_its_start(run: Training) -> None:
    """400 steps of SGD; the fault is there from the first step."""
    base = digits_by_convolutions(run, 400)
    before = train(run, base, 0, batch=lambda x, y: (1e-3 * x, y))
    run.separates("accuracy", before, base.measure(), sound_at_least=0.85)


@mid_run(
    "high_loss_stays",
    "a regression to targets in the thousands, at a rate for targets near one: a high loss that stays high",
    0,
    {"loss_not_decreasing", "slow_convergence", "poor_initialization", "exploding_gradient"},
)
def high_loss_stays(run: Training) -> None:
    """400 steps of Adam; the fault is there from the first step."""
    base = sine_regression(run, 400, rate=1e-3)
    before = train(run, base, 0, batch=lambda x, y: (x, 5000 + 1000 * y))
    run.separates("error", before, base.measure(), sound_at_most=0.3)


@mid_run(
    "explodes_from_raw_inputs",
    "raw inputs of large columns: the loss explodes in the first steps",
    0,
    accepted.EXPLODES | {"poor_initialization"},
)
def explodes_from_raw_inputs(run: Training) -> None:
    """300 steps of SGD with momentum; the fault is there from the first step."""
    base = sine_regression(run, 300)
    base.model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    base.optimizer = SGD(base.model.parameters(), 0.01, momentum=0.9)
    unseen = base.unseen
    assert unseen is not None

    def error() -> float:
        with torch.no_grad():
            return float(functional.mse_loss(base.model(unseen[0]), unseen[1]))

    base.measure = error
    before = train(run, base, 0, batch=lambda x, y: (100 * x, y))
    run.separates("error", before, base.measure(), sound_at_most=0.4)


@mid_run(
    "padding_counted_in_the_loss",
    "the index to ignore is lost: padding, most of each row, is learnt as a word",
    200,
    accepted.LOSS_RISES | {"token_ratio", "class_imbalance"},
)
def padding_counted_in_the_loss(run: Training) -> None:
    """350 steps of a language model; three quarters of inputs and targets become padding."""
    base = counting_language(run, 350)

    def padded(x: Tensor, y: Tensor) -> Pair:
        given, wanted = x.clone(), y.clone()
        given[:, 3:], wanted[:, 3:] = 0, 0
        return given, wanted

    before = train(run, base, 200, batch=padded, records_labels=False)
    run.separates("loss", before, base.measure(), sound_at_most=0.05)
