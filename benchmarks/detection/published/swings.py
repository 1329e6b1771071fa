"""Losses that swing without coming to rest."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Adam

from benchmarks.detection.data import Batches, images, shipped, tokens_with_keyword
from benchmarks.detection.models import BagOfTokens, convolutional, dense
from benchmarks.detection.programs import Built, Clock, Recorder
from benchmarks.detection.published.pairs import published, published_loop


@published_loop(
    "swings_gradients_kept",
    {"oscillating_loss"},
    "stackoverflow 48001598: why zero_grad() must be called; PyTorch's documentation of Tensor.grad",
    "zero_grad() is never called",
)
def gradients_kept(recorder: Recorder, seed: int, clock: Clock, faulty: bool) -> None:
    """Gradients add up, as with a momentum of one: weights swing through their minimum."""
    (x, y), _ = shipped("diabetes", seed)
    model = dense([10, 16, 1], nn.Tanh)
    optimizer = SGD(model.parameters(), 0.01)
    recorder.watch(model, optimizer)
    for inputs, targets in Batches(x, y, 32, 400, seed):
        if not faulty:
            optimizer.zero_grad()
        loss = functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        recorder.log(loss=loss)
        recorder.record(labels=targets)
        clock.step()


@published_loop(
    "swings_gradients_kept_adam",
    {"oscillating_loss"},
    "stackoverflow 48001598: why zero_grad() must be called; TrainCheck (OSDI 2025), kind: missing zero_grad",
    "zero_grad() is never called, with Adam",
)
def gradients_kept_adam(recorder: Recorder, seed: int, clock: Clock, faulty: bool) -> None:
    """The sum of all gradients turns long after the minimum was passed."""
    (x, y), _ = shipped("diabetes", seed)
    model = nn.Linear(10, 1)
    optimizer = Adam(model.parameters(), 0.1)
    recorder.watch(model, optimizer)
    for inputs, targets in Batches(x, y, 64, 350, seed):
        if not faulty:
            optimizer.zero_grad()
        loss = functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        recorder.log(loss=loss)
        recorder.record(labels=targets)
        clock.step()


@published(
    "swings_momentum_near_one",
    {"oscillating_loss"},
    "Goh, Why momentum really works (Distill 2017); Sutskever et al. (ICML 2013)",
    "a momentum of 0.999",
)
def momentum_near_one(seed: int, faulty: bool) -> Built:
    """What was gathered over a thousand steps carries weights past every minimum."""
    data, unseen = shipped("diabetes", seed)
    model = nn.Linear(10, 1)
    optimizer = SGD(model.parameters(), 0.02, momentum=0.999 if faulty else 0.5)
    return model, optimizer, functional.mse_loss, Batches(*data, 64, 350, seed, unseen)


@published(
    "swings_batches_of_one",
    {"oscillating_loss"},
    "Humbatova et al. (ICSE 2020), wrong batch size; Masters and Luschi (2018) on small batches",
    "batches of one under a rate for batches of 32",
)
def batches_of_one(seed: int, faulty: bool) -> Built:
    """Each example undoes what the one before did."""
    data, unseen = shipped("wine", seed)
    model = dense([13, 32, 3])
    optimizer = SGD(model.parameters(), 0.8 if faulty else 0.1)
    return model, optimizer, functional.cross_entropy, Batches(*data, 1 if faulty else 32, 350, seed, unseen)


@published(
    "swings_raw_wine",
    {"oscillating_loss"},
    "TheDeepChecker (TOSEM 2022), unscaled inputs; UMLAUT (CHI 2021)",
    "proline in the hundreds beside hue near one, into softmax regression",
)
def raw_wine(seed: int, faulty: bool) -> Built:
    """One column decides everything, and each step overshoots it."""
    data, unseen = shipped("wine", seed, scaled=not faulty)
    model = nn.Linear(13, 3)
    return (
        model,
        SGD(model.parameters(), 0.05),
        functional.cross_entropy,
        Batches(*data, 16, 300, seed, unseen),
    )


@published(
    "swings_momentum_and_rate",
    {"oscillating_loss"},
    "AUTOTRAINER (ICSE 2021), oscillating loss: too large a rate",
    "SGD with a rate of 0.5 and a momentum of 0.95 on a convolutional network",
)
def momentum_and_rate(seed: int, faulty: bool) -> Built:
    """Logits are thrown from one class to another."""
    data, unseen = images(seed)
    model = convolutional(nn.Tanh)
    optimizer = SGD(model.parameters(), 0.5 if faulty else 0.05, momentum=0.95 if faulty else 0.9)
    return model, optimizer, functional.cross_entropy, Batches(*data, 32, 300, seed, unseen)


@published(
    "swings_sorted_tokens",
    {"oscillating_loss"},
    "UMLAUT (CHI 2021), data not shuffled; Bengio, practical recommendations (2012), on the order of examples",
    "all texts of one class come first, then all of the other",
)
def sorted_tokens(seed: int, faulty: bool) -> Built:
    """Each class is forgotten while the other is learnt."""
    x, y = tokens_with_keyword(seed, 640, 20, 60)
    unseen = tokens_with_keyword(seed + 50, 200, 20, 60)
    if faulty:
        order = torch.argsort(y, stable=True)
        x, y = x[order], y[order]
    model = BagOfTokens(60, 24, 2)
    batches = Batches(x, y, 32, 300, seed, unseen, shuffle=not faulty)
    return model, Adam(model.parameters(), 0.02), functional.cross_entropy, batches


@published(
    "swings_across_the_ravine",
    {"oscillating_loss"},
    "Cohen et al., Gradient descent at the edge of stability (ICLR 2021); LeCun et al., Efficient BackProp (1998)",
    "full batches, and a rate above two over the curvature",
)
def across_the_ravine(seed: int, faulty: bool) -> Built:
    """Logistic regression on columns that were not centred: the loss alternates."""
    (x, y), _ = shipped("breast_cancer", seed)
    shift = 2.0 if faulty else 0.0
    model = nn.Linear(30, 2)
    optimizer = SGD(model.parameters(), 1.0 if faulty else 0.1)
    return model, optimizer, functional.cross_entropy, Batches(x + shift, y, len(x), 250, seed)
