"""Classification and regression whose curves look odd and are as they should be."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW, Optimizer, SparseAdam
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR, LRScheduler, OneCycleLR

from benchmarks.detection.data import Batches, images, linear_targets, moons, shipped, tokens_with_keyword
from benchmarks.detection.healthy.trainings import healthy
from benchmarks.detection.models import BagOfTokens, convolutional, dense
from benchmarks.detection.programs import Clock, Recorder, loop


def scheduled(
    recorder: Recorder, clock: Clock, held: tuple[nn.Module, Optimizer, LRScheduler], batches: Batches
) -> None:
    """A classification whose rate changes after each batch."""
    model, optimizer, schedule = held
    recorder.watch(model, optimizer)
    for x, y in batches:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        recorder.log(loss=loss, rate=schedule.get_last_lr()[0])
        recorder.record(labels=y)
        schedule.step()
        clock.step()


@healthy("convolutional_digits", "plain: a convolutional network with batch normalisation until it is done")
def convolutional_digits(recorder: Recorder, seed: int, clock: Clock) -> None:
    """1,200 steps of SGD with momentum and weight decay."""
    data, unseen = images(seed)
    model = convolutional(norm=True)
    optimizer = SGD(model.parameters(), 0.02, momentum=0.9, weight_decay=1e-3)
    loop(
        recorder, clock, (model, optimizer, functional.cross_entropy, Batches(*data, 32, 1200, seed, unseen))
    )


@healthy("one_cycle", "the rate rises for a third of the run and falls to nothing: updates end near zero")
def one_cycle(recorder: Recorder, seed: int, clock: Clock) -> None:
    """1,500 steps of OneCycleLR."""
    data, _ = images(seed)
    model = convolutional(norm=True)
    optimizer = SGD(model.parameters(), 0.01, momentum=0.9)
    schedule = OneCycleLR(optimizer, 0.1, 1500)
    scheduled(recorder, clock, (model, optimizer, schedule), Batches(*data, 32, 1500, seed))


@healthy("warm_restarts", "a rate that leaps up four times, and the loss with it")
def warm_restarts(recorder: Recorder, seed: int, clock: Clock) -> None:
    """2,000 steps, a restart every 400."""
    data, _ = shipped("digits", seed)
    model = dense([64, 64, 10])
    optimizer = SGD(model.parameters(), 0.3, momentum=0.9)
    schedule = CosineAnnealingWarmRestarts(optimizer, 400)
    scheduled(recorder, clock, (model, optimizer, schedule), Batches(*data, 32, 2000, seed))


@healthy("long_warm_up", "the rate begins at zero and rises over 400 steps: at first nothing moves")
def long_warm_up(recorder: Recorder, seed: int, clock: Clock) -> None:
    """1,500 steps of AdamW."""
    data, _ = shipped("digits", seed)
    model = dense([64, 96, 96, 10], nn.GELU)
    optimizer = AdamW(model.parameters(), 2e-3)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, step / 400))
    scheduled(recorder, clock, (model, optimizer, schedule), Batches(*data, 32, 1500, seed))


@healthy("much_dropout", "dropout of 0.6: the training loss is noisy and above the validation loss")
def much_dropout(recorder: Recorder, seed: int, clock: Clock) -> None:
    """1,500 steps; outputs of dropout are mostly zero."""
    data, unseen = shipped("digits", seed)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.6), nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.6),
        nn.Linear(128, 10),
    )  # fmt: skip
    optimizer = Adam(model.parameters(), 1e-3)
    loop(
        recorder, clock, (model, optimizer, functional.cross_entropy, Batches(*data, 32, 1500, seed, unseen))
    )


@healthy("much_weight_decay", "AdamW with a decay of 2: weights shrink for the whole run, and shall")
def much_weight_decay(recorder: Recorder, seed: int, clock: Clock) -> None:
    """1,500 steps; the loss settles well above zero."""
    data, unseen = shipped("breast_cancer", seed)
    model = dense([30, 8, 2])
    optimizer = AdamW(model.parameters(), 2e-3, weight_decay=2.0)
    loop(
        recorder, clock, (model, optimizer, functional.cross_entropy, Batches(*data, 32, 1500, seed, unseen))
    )


@healthy("noisy_labels", "a quarter of the labels is drawn anew in each batch: the loss has a high floor")
def noisy_labels(recorder: Recorder, seed: int, clock: Clock) -> None:
    """1,500 steps; after the first third the loss only wavers."""
    (x, y), unseen = shipped("digits", seed)

    def noisy(_step: int, inputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wrong = torch.rand(len(labels)) < 0.25
        return inputs, torch.where(wrong, torch.randint(0, 10, labels.shape), labels)

    model = dense([64, 64, 10])
    optimizer = SGD(model.parameters(), 0.05, momentum=0.5)
    batches = Batches(x, y, 64, 1500, seed, unseen, change=noisy)
    loop(recorder, clock, (model, optimizer, functional.cross_entropy, batches))


@healthy("one_in_five", "one class is four times as frequent as the other, and both are learnt")
def one_in_five(recorder: Recorder, seed: int, clock: Clock) -> None:
    """1,200 steps on three features that overlap a little."""
    x = torch.randn(1500, 6, generator=torch.Generator().manual_seed(seed))
    y = (x[:, :3].sum(1) > 1.45).long()
    model = dense([6, 32, 2])
    optimizer = Adam(model.parameters(), 2e-3)
    batches = Batches(x[:1200], y[:1200], 32, 1200, seed, (x[1200:], y[1200:]))
    loop(recorder, clock, (model, optimizer, functional.cross_entropy, batches))


@healthy("sparse_embeddings", "sparse gradients: of 2,000 embeddings a batch touches some hundred")
def sparse_embeddings(recorder: Recorder, seed: int, clock: Clock) -> None:
    """1,200 steps of SparseAdam on embeddings; the head has an optimizer of its own."""
    x, y = tokens_with_keyword(seed, 20_000, 16, 2000)
    model = BagOfTokens(2000, 16, 2, sparse=True)
    optimizer = SparseAdam(list(model.embedding.parameters()), 0.01)
    head = Adam(model.head.parameters(), 3e-3)
    recorder.watch(model, optimizer)
    for inputs, labels in Batches(x, y, 32, 1200, seed):
        optimizer.zero_grad()
        head.zero_grad()
        loss = functional.cross_entropy(model(inputs), labels)
        loss.backward()
        head.step()
        optimizer.step()
        recorder.log(loss=loss)
        recorder.record(labels=labels)
        clock.step()


@healthy("twelve_examples", "twelve examples, one batch: the loss goes to 1e-4 and gradients follow")
def twelve_examples(recorder: Recorder, seed: int, clock: Clock) -> None:
    """1,500 steps of full-batch Adam."""
    (x, y), _ = shipped("iris", seed)
    model = dense([4, 16, 3], nn.Tanh)
    optimizer = Adam(model.parameters(), 1e-2)
    loop(
        recorder, clock, (model, optimizer, functional.cross_entropy, Batches(x[:12], y[:12], 12, 1500, seed))
    )


@healthy("large_targets", "targets in the hundreds: the loss begins at 30,000 and gradients at hundreds")
def large_targets(recorder: Recorder, seed: int, clock: Clock) -> None:
    """1,500 steps of Adam on squared errors."""
    x, y = linear_targets(seed, 3000, 10, noise=20.0)
    model = dense([10, 24, 1])
    optimizer = Adam(model.parameters(), 2e-2)
    batches = Batches(x[:2400], y[:2400], 64, 1500, seed, (x[2400:], y[2400:]))
    loop(recorder, clock, (model, optimizer, functional.mse_loss, batches))


@healthy("sigmoid_small", "a shallow sigmoid network on a smooth task, trained to the end")
def sigmoid_small(recorder: Recorder, seed: int, clock: Clock) -> None:
    """2,000 steps; a long flat piece comes before the loss falls."""
    (x, y), unseen = moons(seed, 600), moons(seed + 50, 300)
    model = dense([2, 16, 16, 1], nn.Sigmoid)
    optimizer = Adam(model.parameters(), 1e-2)
    loss = functional.binary_cross_entropy_with_logits
    loop(recorder, clock, (model, optimizer, loss, Batches(x, y, 32, 2000, seed, unseen)))
