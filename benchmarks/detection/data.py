"""Data of the programs: what ships with scikit-learn, or is made. All tensors are float32 or int64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


@dataclass
class Batches:
    """Exactly ``steps`` batches of examples, reshuffled each epoch.

    Attributes:
        x: inputs, the first dimension is examples.
        y: labels.
        size: examples a batch.
        steps: batches.
        seed: of the order.
        val: inputs and labels for validation.
        shuffle: False for the order of the data.
        change: what becomes of a batch: (step, inputs, labels) → (inputs, labels).
    """

    x: Tensor
    y: Tensor
    size: int
    steps: int
    seed: int
    val: Pair | None = None
    shuffle: bool = True
    change: Callable[[int, Tensor, Tensor], Pair] | None = None

    def __iter__(self) -> Iterator[Pair]:
        generator = torch.Generator().manual_seed(self.seed + 31)
        count, size = len(self.x), min(self.size, len(self.x))
        order, at = torch.arange(0), 0
        for step in range(self.steps):
            if at + size > len(order):
                order = torch.randperm(count, generator=generator) if self.shuffle else torch.arange(count)
                at = 0
            chosen, at = order[at : at + size], at + size
            x, y = self.x[chosen], self.y[chosen]
            yield self.change(step, x, y) if self.change else (x, y)


@cache
def _shipped(name: str) -> tuple[Any, Any]:
    from sklearn import datasets

    held = getattr(datasets, f"load_{name}")()
    return held.data.astype("float32"), held.target


def shipped(name: str, seed: int, *, share: float = 0.75, scaled: bool = True) -> tuple[Pair, Pair]:
    """A data set of scikit-learn, split by seed into training and validation.

    Args:
        name: digits, wine, breast_cancer, iris or diabetes. Regression targets come as (n, 1).
        seed: of the split.
        share: of examples for training.
        scaled: digits by 1/16 less 0.3, others (and regression targets) to mean 0 and deviation 1.
    """
    x, y = _shipped(name)
    order = np.random.RandomState(700 + seed).permutation(len(x))
    x, y, cut = x[order], y[order], int(share * len(x))
    if scaled:
        x = x / 16 - 0.3 if name == "digits" else (x - x[:cut].mean(0)) / (x[:cut].std(0) + 1e-8)
    inputs = torch.tensor(x, dtype=torch.float32)
    if name == "diabetes":
        if scaled:
            y = (y - y[:cut].mean()) / y[:cut].std()
        labels = torch.tensor(y, dtype=torch.float32).view(-1, 1)
    else:
        labels = torch.tensor(y).long()
    return (inputs[:cut], labels[:cut]), (inputs[cut:], labels[cut:])


def images(seed: int, *, share: float = 0.75) -> tuple[Pair, Pair]:
    """Digits as (n, 1, 8, 8)."""
    (x, y), (unseen, labels) = shipped("digits", seed, share=share)
    return (x.view(-1, 1, 8, 8), y), (unseen.view(-1, 1, 8, 8), labels)


def moons(seed: int, count: int, noise: float = 0.2) -> Pair:
    """Two half moons; labels (n, 1) as floats."""
    from sklearn.datasets import make_moons

    x, y = make_moons(count, noise=noise, random_state=seed)
    return torch.tensor(x).float(), torch.tensor(y).float().view(-1, 1)


def rings(seed: int, count: int) -> Pair:
    """Two circles, one in the other; labels (n, 1) as floats."""
    from sklearn.datasets import make_circles

    x, y = make_circles(count, noise=0.06, factor=0.45, random_state=seed)
    return torch.tensor(x).float(), torch.tensor(y).float().view(-1, 1)


def blobs(seed: int, count: int, classes: int = 4, features: int = 8) -> Pair:
    """Gaussian clusters; labels are classes."""
    from sklearn.datasets import make_blobs

    x, y = make_blobs(count, centers=classes, n_features=features, cluster_std=3.0, random_state=seed)
    return torch.tensor(x).float() / 6, torch.tensor(y).long()


def linear_targets(seed: int, count: int, features: int, noise: float = 5.0) -> Pair:
    """A linear function with noise, by `make_regression`: targets (n, 1) in the hundreds."""
    from sklearn.datasets import make_regression

    x, y = make_regression(count, features, noise=noise, random_state=seed)
    return torch.tensor(x).float(), torch.tensor(y).float().view(-1, 1)


def tokens_with_keyword(seed: int, count: int, length: int, vocabulary: int) -> Pair:
    """Token sequences (n, length); the class is which of two halves of the vocabulary is the more frequent."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 2, (count,), generator=generator)
    share = torch.where(y == 1, 0.7, 0.3).view(-1, 1)
    high = torch.rand(count, length, generator=generator) < share
    low = torch.randint(0, vocabulary // 2, (count, length), generator=generator)
    return low + high.long() * (vocabulary // 2), y


def copied_tokens(seed: int, count: int, length: int, vocabulary: int) -> Pair:
    """Sequences whose second half repeats the first; labels are the next tokens, (n, length)."""
    generator = torch.Generator().manual_seed(seed)
    half = torch.randint(1, vocabulary, (count, length // 2 + 1), generator=generator)
    whole = torch.cat([half, half], 1)[:, : length + 1]
    return whole[:, :-1], whole[:, 1:]


def waves(seed: int, count: int, length: int) -> Pair:
    """Noisy sine waves (n, length, 1) of two frequencies, to be told apart."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 2, (count,), generator=generator)
    speed = torch.where(y == 1, 0.9, 0.6).view(-1, 1)
    phase = 6.28 * torch.rand(count, 1, generator=generator)
    time = torch.arange(length).float().view(1, -1)
    noise = 0.2 * torch.randn(count, length, generator=generator)
    return (torch.sin(speed * time + phase) + noise).unsqueeze(-1), y
