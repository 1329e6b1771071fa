"""Sound small trainings, into which a fault is put at some step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW, Optimizer

from benchmarks.detection.data import Batches, Pair, images, shipped, waves
from benchmarks.detection.models import LanguageModel, LastOfRecurrent, convolutional, dense
from benchmarks.detection.witnessed import Training


@dataclass
class Base:
    """A training.

    Attributes:
        model: what learns.
        optimizer: its optimizer; a fault may exchange it.
        batches: inputs and targets, one for each step.
        loss_of: of outputs and targets.
        measure: of the model on unseen data: accuracy, or an error.
        unseen: inputs and targets for validation, each 25 steps.
        losses: of training, by step, as it was trained.
    """

    model: nn.Module
    optimizer: Optimizer
    batches: Iterable[Pair]
    loss_of: Callable[[Tensor, Tensor], Tensor]
    measure: Callable[[], float]
    unseen: Pair | None = None
    losses: list[float] = field(default_factory=list)


def _accuracy(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], float]:
    def measure() -> float:
        training = model.training
        model.eval()
        with torch.no_grad():
            value = float((model(x).argmax(1) == y).float().mean())
        model.train(training)
        return value

    return measure


def _error(
    model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor
) -> Callable[[], float]:
    def measure() -> float:
        with torch.no_grad():
            return float(loss_of(model(x), y))

    return measure


def digits_by_convolutions(run: Training, steps: int, *, norm: bool = False, rate: float = 0.02) -> Base:
    """A convolutional classifier by SGD with momentum."""
    (x, y), unseen = images(run.seed)
    model = convolutional(norm=norm)
    optimizer = SGD(model.parameters(), rate, momentum=0.9, weight_decay=1e-4)
    batches = Batches(x, y, 32, steps, run.seed)
    return Base(model, optimizer, batches, functional.cross_entropy, _accuracy(model, *unseen), unseen)


def digits_by_layers(
    run: Training, steps: int, *, activation: Callable[[], nn.Module] = nn.ReLU, rate: float = 1e-3
) -> Base:
    """A classifier of linear layers by AdamW."""
    (x, y), unseen = shipped("digits", run.seed)
    model = dense([64, 64, 32, 10], activation)
    optimizer = AdamW(model.parameters(), rate, weight_decay=0.05)
    batches = Batches(x, y, 32, steps, run.seed)
    return Base(model, optimizer, batches, functional.cross_entropy, _accuracy(model, *unseen), unseen)


def counted_tokens(seed: int, count: int) -> Pair:
    """Sequences that count upwards by one, two or three among 20 tokens; the step follows from the first token."""
    start = torch.randint(0, 20, (count, 1), generator=torch.Generator().manual_seed(seed))
    tokens = (start + torch.arange(13) * (1 + start % 3)) % 20
    return tokens[:, :-1], tokens[:, 1:]


def counting_language(run: Training, steps: int, *, norm_first: bool = True) -> Base:
    """A causal transformer on sequences that count; the measure is its loss on unseen ones."""
    x, y = counted_tokens(run.seed, 1500)
    unseen = counted_tokens(run.seed + 500, 200)
    model = LanguageModel(20, 12, 32, 1, norm_first=norm_first)
    optimizer = AdamW(model.parameters(), 2e-3, weight_decay=0.01)
    measure = _error(model, functional.cross_entropy, *unseen)
    batches = Batches(x, y, 24, steps, run.seed)
    return Base(model, optimizer, batches, functional.cross_entropy, measure, unseen)


def two_kinds_of_waves(run: Training, steps: int) -> Base:
    """A GRU that tells waves apart, by Adam."""
    (x, y), unseen = waves(run.seed, 1500, 16), waves(run.seed + 500, 300, 16)
    model = LastOfRecurrent(nn.GRU(1, 24, batch_first=True), 24, 2)
    optimizer = Adam(model.parameters(), 5e-3)
    batches = Batches(x, y, 32, steps, run.seed)
    return Base(model, optimizer, batches, functional.cross_entropy, _accuracy(model, *unseen), unseen)


def sine_regression(run: Training, steps: int, *, rate: float = 3e-3) -> Base:
    """A regression on a function of eight inputs, by Adam; the measure is the error on unseen ones."""
    generator = run.generator()
    x = torch.randn(1500, 8, generator=generator)
    weight = torch.randn(8, 2, generator=generator) / 8**0.5
    y = (torch.sin(x @ weight).sum(1, keepdim=True)) + 0.05 * torch.randn(1500, 1, generator=generator)
    model = dense([8, 64, 64, 1], nn.Tanh)
    optimizer = Adam(model.parameters(), rate)
    unseen = x[1200:], y[1200:]
    batches = Batches(x[:1200], y[:1200], 32, steps, run.seed)
    return Base(
        model, optimizer, batches, functional.mse_loss, _error(model, functional.mse_loss, *unseen), unseen
    )


def digits_reconstructed(run: Training, steps: int) -> Base:
    """An autoencoder, by Adam; the measure is the error on unseen digits."""
    (x, _), (unseen, _) = shipped("digits", run.seed)
    model = dense([64, 48, 12, 48, 64])
    optimizer = Adam(model.parameters(), 2e-3)
    measure = _error(model, functional.mse_loss, unseen, unseen)
    batches = Batches(x, x, 32, steps, run.seed)
    return Base(model, optimizer, batches, functional.mse_loss, measure, (unseen, unseen))


def train(  # noqa: PLR0913 - all that a fault may change, by name
    run: Training,
    base: Base,
    onset: int,
    *,
    once: Callable[[Base], None] | None = None,
    batch: Callable[[Tensor, Tensor], Pair] | None = None,
    loss: Callable[[Tensor], Tensor] | None = None,
    forward: Callable[[nn.Module, Tensor], Tensor] | None = None,
    cleared: bool = True,
    updated: Callable[[Base], None] | None = None,
    records_labels: bool = True,
) -> float:
    """The plain loop; from step ``onset`` on with the fault, where there is to be one.

    Args:
        run: the training.
        base: what is trained.
        onset: the first step with the fault.
        once: is done once, before the step.
        batch: changes a batch.
        loss: changes a loss before ``backward()``.
        forward: takes the place of the model's call.
        cleared: False: gradients are not cleared from then on.
        updated: takes the place of the optimizer's step.
        records_labels: whether the program records its labels.

    Returns:
        The measure at the onset.
    """
    run.watch(base.model, base.optimizer)
    at_onset = base.measure() if onset == 0 else float("nan")
    for step, (given, wanted) in enumerate(base.batches):
        bad = run.faulty and step >= onset
        if step == onset and onset:
            at_onset = base.measure()
        if run.faulty and step == onset and once is not None:
            once(base)
        inputs, targets = batch(given, wanted) if bad and batch is not None else (given, wanted)
        output = forward(base.model, inputs) if bad and forward is not None else base.model(inputs)
        value = base.loss_of(output, targets)
        if cleared or not bad:
            base.optimizer.zero_grad()
        (loss(value) if bad and loss is not None else value).backward()
        if bad and updated is not None:
            updated(base)
        else:
            base.optimizer.step()
        run.log(loss=value)
        base.losses.append(value.item())
        if records_labels and not targets.is_floating_point():
            run.record(labels=targets)
        if step % 25 == 24:
            _validate(run, base)
        run.step()
    return at_onset


def _validate(run: Training, base: Base) -> None:
    if base.unseen is None:
        return
    base.model.eval()
    with torch.no_grad():
        run.log(mode="eval", loss=base.loss_of(base.model(base.unseen[0]), base.unseen[1]))
    base.model.train()


def scale_groups(optimizer: Optimizer, name: str, factor: float) -> None:
    """Multiply an option of every parameter group."""
    group: dict[str, Any]
    for group in optimizer.param_groups:
        group[name] *= factor
