"""The trainings that are slowed down: four sizes of step, from a second to a few milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

_WORDS = 2000
_WIDTH = 512


class Transformer(nn.Module):
    """6 encoder layers of width 512, 21 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_WORDS, _WIDTH)
        layer = nn.TransformerEncoderLayer(_WIDTH, 8, 2048, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(_WIDTH, _WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.embedding(tokens)))
        return logits.transpose(1, 2)


def _mlp() -> nn.Module:
    """10 M parameters in six layers."""
    width = 1410
    hidden = [module for _ in range(4) for module in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), *hidden, nn.Linear(width, 10))


def _cnn() -> nn.Module:
    """0.3 M parameters in six convolutions and a linear layer."""
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 32), (32, 64), (64, 64), (64, 128), (128, 128)):
        stride = 2 if before != after and before > 3 else 1
        layers += [nn.Conv2d(before, after, 3, stride, 1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


@dataclass(frozen=True)
class Training:
    """A model, its optimizer and one batch that every step repeats."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    inputs: Tensor
    labels: Tensor

    def backward(self) -> Tensor:
        """Forward and backward of one step; the loss."""
        self.optimizer.zero_grad()
        loss = functional.cross_entropy(self.model(self.inputs), self.labels)
        loss.backward()
        return loss

    def update(self) -> None:
        """The optimizer's part of the step."""
        self.optimizer.step()


@dataclass(frozen=True)
class Workload:
    """A training to measure.

    Attributes:
        title: in the table.
        make: model, inputs and labels.
        steps: of one round.
        warm_steps: before the first round, so that a recorder that adapts has adapted.
    """

    title: str
    make: Callable[[], tuple[nn.Module, Tensor, Tensor]]
    steps: int
    warm_steps: int

    def start(self) -> Training:
        """The training at its first step, the same each time."""
        torch.manual_seed(0)
        model, inputs, labels = self.make()
        return Training(model, torch.optim.AdamW(model.parameters(), lr=1e-4), inputs, labels)


def _transformer_at(batch: int, length: int) -> Callable[[], tuple[nn.Module, Tensor, Tensor]]:
    def make() -> tuple[nn.Module, Tensor, Tensor]:
        tokens = torch.randint(_WORDS, (2, batch, length))
        return Transformer(), tokens[0], tokens[1]

    return make


def _images() -> tuple[nn.Module, Tensor, Tensor]:
    return _cnn(), torch.randn(16, 3, 32, 32), torch.randint(10, (16,))


def _rows() -> tuple[nn.Module, Tensor, Tensor]:
    return _mlp(), torch.randn(64, 1410), torch.randint(10, (64,))


WORKLOADS = {
    "transformer": Workload("transformer 21 M, 8x128 tokens", _transformer_at(8, 128), 1, 101),
    "transformer_small": Workload("transformer 21 M, 2x32 tokens", _transformer_at(2, 32), 4, 110),
    "mlp": Workload("MLP 10 M, batch 64", _rows, 5, 120),
    "cnn": Workload("CNN 0.3 M, batch 16", _images, 20, 200),
}
QUICK_WORKLOADS = ("mlp",)
