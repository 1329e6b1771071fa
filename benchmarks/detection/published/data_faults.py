"""Faults in the data: classes that are rare, examples that are few, figures that are none."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Adam

from benchmarks.detection.data import Batches, Pair, blobs, images, shipped, tokens_with_keyword
from benchmarks.detection.models import BagOfTokens, convolutional, dense
from benchmarks.detection.programs import Built
from benchmarks.detection.published.pairs import published


def thinned(data: Pair, rare: int, keep: int) -> Pair:
    """Only the first ``keep`` examples of a class are left."""
    x, y = data
    chosen = (y != rare) | (torch.cumsum((y == rare).long(), 0) <= keep)
    return x[chosen], y[chosen]


@published(
    "data_rare_malignant",
    {"class_imbalance"},
    "TheDeepChecker (TOSEM 2022), unbalanced labels; Humbatova et al. (ICSE 2020), unbalanced training data",
    "eight of 275 tumours are malignant",
)
def rare_malignant(seed: int, faulty: bool) -> Built:
    """Breast cancer with nearly all examples of one class left out."""
    data, unseen = shipped("breast_cancer", seed)
    if faulty:
        data = thinned(data, 0, 8)
    model = dense([30, 16, 2])
    return (
        model,
        Adam(model.parameters(), 1e-3),
        functional.cross_entropy,
        Batches(*data, 64, 300, seed, unseen),
    )


@published(
    "data_mostly_zeros",
    {"class_imbalance"},
    "Humbatova et al. (ICSE 2020), unbalanced training data",
    "of nine digits only four examples each, of zeros a hundred",
)
def mostly_zeros(seed: int, faulty: bool) -> Built:
    """A convolutional network sees one digit in three quarters of its examples."""
    data, unseen = images(seed)
    if faulty:
        for digit in range(1, 10):
            data = thinned(data, digit, 4)
    model = convolutional()
    return (
        model,
        SGD(model.parameters(), 0.02, momentum=0.9),
        functional.cross_entropy,
        Batches(*data, 32, 250, seed, unseen),
    )


@published(
    "data_rare_spam",
    {"class_imbalance"},
    "Buda et al., class imbalance in convolutional networks (2018); He and Garcia (2009)",
    "one message of fifty is of the class that is looked for",
)
def rare_spam(seed: int, faulty: bool) -> Built:
    """Token sequences of two kinds, one of them rare."""
    data = tokens_with_keyword(seed, 2000, 16, 200)
    unseen = tokens_with_keyword(seed + 50, 400, 16, 200)
    if faulty:
        data = thinned(data, 1, 20)
    model = BagOfTokens(200, 16, 2)
    return (
        model,
        Adam(model.parameters(), 3e-3),
        functional.cross_entropy,
        Batches(*data, 64, 300, seed, unseen),
    )


@published(
    "data_constant_pixel_divided",
    {"nan_or_inf"},
    "Stack Overflow 40050397, reasons for NaN losses: inputs that are NaN after normalisation",
    "columns are divided by their deviation, which is zero for pixels that are never set",
)
def constant_pixel_divided(seed: int, faulty: bool) -> Built:
    """0/0 in the input from the first step."""
    (x, y), (unseen, labels) = shipped("digits", seed, scaled=False)
    mean, deviation = x.mean(0), x.std(0) + (0.0 if faulty else 1e-2)
    x, unseen = (x - mean) / deviation, (unseen - mean) / deviation
    model = dense([64, 32, 10])
    optimizer = Adam(model.parameters(), 1e-3)
    return (
        model,
        optimizer,
        functional.cross_entropy,
        Batches(x, y, 32, 150, seed, (unseen.clamp(-5, 5), labels)),
    )


@published(
    "data_overflowing_label",
    {"nan_or_inf"},
    "Humbatova et al. (ICSE 2020), data quality: a corrupt target",
    "one target of a late batch is 1e30",
    onset=90,
)
def overflowing_label(seed: int, faulty: bool) -> Built:
    """Its square is no float32 any more."""
    (x, y), unseen = shipped("diabetes", seed)

    def corrupt(step: int, inputs: torch.Tensor, targets: torch.Tensor) -> Pair:
        if step == 90:
            targets = targets.clone()
            targets[0] = 1e30
        return inputs, targets

    model = dense([10, 32, 1])
    batches = Batches(x, y, 32, 200, seed, unseen, change=corrupt if faulty else None)
    return model, Adam(model.parameters(), 3e-3), functional.mse_loss, batches


@published(
    "data_few_patients",
    {"overfit"},
    "Humbatova et al. (ICSE 2020), not enough training data; UMLAUT (CHI 2021), overfitting",
    "a wide network on 25 of 442 patients",
)
def few_patients(seed: int, faulty: bool) -> Built:
    """The training error goes to zero while that of other patients rises."""
    (x, y), unseen = shipped("diabetes", seed)
    if faulty:
        x, y = x[:25], y[:25]
    model = dense([10, 256, 256, 1] if faulty else [10, 1])
    optimizer = Adam(model.parameters(), 2e-3 if faulty else 2e-2)
    return model, optimizer, functional.mse_loss, Batches(x, y, 25, 400, seed, unseen)


@published(
    "data_wrong_labels_memorised",
    {"overfit"},
    "Zhang et al., Understanding deep learning requires rethinking generalization (ICLR 2017)",
    "a third of the labels is wrong, and the network has the room to learn them by heart",
)
def wrong_labels_memorised(seed: int, faulty: bool) -> Built:
    """The training loss falls below what labels allow, and the validation loss rises."""
    (x, y), unseen = images(seed)
    if faulty:
        x, y = x[:300], y[:300].clone()
        wrong = torch.rand(len(y)) < 0.33
        y[wrong] = torch.randint(0, 10, (int(wrong.sum()),))
    channels = 32
    model = nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(), nn.Conv2d(channels, channels, 3, 2, 1), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * channels, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    return (
        model,
        Adam(model.parameters(), 1e-3),
        functional.cross_entropy,
        Batches(x, y, 50, 350, seed, unseen),
    )


@published(
    "data_chance_is_learnt",
    {"overfit"},
    "TheDeepChecker (TOSEM 2022), missing regularisation",
    "sixty overlapping examples in 40 dimensions, without regularisation",
)
def chance_is_learnt(seed: int, faulty: bool) -> Built:
    """Of forty features four mean something; a network without limits uses all."""
    features = 40

    def padded(data: Pair, at: int) -> Pair:
        noise = torch.randn(len(data[0]), features - 4, generator=torch.Generator().manual_seed(at))
        return torch.cat([data[0], noise], 1), data[1]

    x, y = padded(blobs(seed, 1600, 2, 4), seed)
    x = x + 0.0
    x[:, :4] += torch.randn(len(x), 4, generator=torch.Generator().manual_seed(seed + 1))
    unseen, count = (x[1200:], y[1200:]), 60 if faulty else 1200
    model = dense([features, 128, 2]) if faulty else dense([features, 2])
    optimizer = Adam(model.parameters(), 3e-3, weight_decay=0.0 if faulty else 1e-3)
    return model, optimizer, functional.cross_entropy, Batches(x[:count], y[:count], 30, 400, seed, unseen)
