"""Small models that several programs share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Fill = Callable[[Tensor], object]


def dense(
    sizes: Sequence[int],
    activation: Callable[[], nn.Module] | None = nn.ReLU,
    *,
    fill: Fill | None = None,
    last: nn.Module | None = None,
) -> nn.Sequential:
    """Linear layers with an activation between them; ``fill`` sets weights, and biases are zero then."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        linear = nn.Linear(before, after)
        if fill is not None:
            fill(linear.weight)
            nn.init.zeros_(linear.bias)
        layers.append(linear)
        if activation is not None:
            layers.append(activation())
    if activation is not None:
        layers.pop()
    if last is not None:
        layers.append(last)
    return nn.Sequential(*layers)


def normal(deviation: float) -> Fill:
    """Weights from N(0, deviation²)."""
    return lambda weight: nn.init.normal_(weight, 0.0, deviation)


def convolutional(activation: Callable[[], nn.Module] = nn.ReLU, *, norm: bool = False) -> nn.Sequential:
    """Two convolutions and a linear layer, for (n, 1, 8, 8) and ten classes."""
    layers: list[nn.Module] = [nn.Conv2d(1, 8, 3, padding=1)]
    layers += [nn.BatchNorm2d(8)] if norm else []
    layers += [activation(), nn.Conv2d(8, 16, 3, stride=2, padding=1)]
    layers += [nn.BatchNorm2d(16)] if norm else []
    return nn.Sequential(*layers, activation(), nn.Flatten(), nn.Linear(256, 10))


class LastOfRecurrent(nn.Module):
    """A recurrent network whose last output is classified."""

    def __init__(self, cell: nn.Module, hidden: int, classes: int) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.cell(x)
        return self.head(outputs[:, -1])  # type: ignore[no-any-return]  # a module's call is untyped


class BagOfTokens(nn.Module):
    """The mean of token embeddings, classified."""

    def __init__(self, vocabulary: int, width: int, classes: int, *, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, sparse=sparse)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x).mean(1))  # type: ignore[no-any-return]  # a module's call is untyped


class LanguageModel(nn.Module):
    """A causal transformer: tokens (n, length) → logits (n, vocabulary, length)."""

    def __init__(
        self, vocabulary: int, length: int, width: int = 32, layers: int = 2, *, norm_first: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=norm_first
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("mask", torch.triu(torch.full((length, length), float("-inf")), 1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x) + self.position
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.mask)
        return self.head(hidden).transpose(1, 2)  # type: ignore[no-any-return]  # a module's call is untyped
