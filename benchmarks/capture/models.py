"""The trainings that are slowed down: five sizes of step, from a second to a few milliseconds."""

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


class _Block(nn.Module):
    """A block of the character GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projected, self.attended = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.bend, self.narrow = (
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )
        self.dropout, self._heads = nn.Dropout(0.1), heads

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self._heads, -1).transpose(1, 2)
            for part in self.projected(self.before(x)).split(width, 2)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.attended(attended.transpose(1, 2).reshape(batch, length, width)))
        narrow = self.narrow(self.bend(self.wide(self.between(x))))
        output: Tensor = x + self.dropout(narrow)
        return output


_LETTERS, _LENGTH = 65, 64


class CharacterGPT(nn.Module):
    """4 blocks of width 96, 0.46 M parameters, 40 leaf modules."""

    def __init__(self) -> None:
        super().__init__()
        width = 96
        self.letters, self.places = nn.Embedding(_LETTERS, width), nn.Embedding(_LENGTH, width)
        self.blocks = nn.Sequential(*(_Block(width, 4) for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, _LETTERS)

    def forward(self, letters: Tensor) -> Tensor:
        x = self.letters(letters) + self.places(torch.arange(letters.shape[1]))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
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
    """A model, its optimizer and one batch that every step repeats.

    Attributes:
        micro_batches: times that a step computes the batch before its update.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    inputs: Tensor
    labels: Tensor
    micro_batches: int = 1

    def backward(self) -> Tensor:
        """Forward and backward of one step; the last loss."""
        self.optimizer.zero_grad()
        for _ in range(self.micro_batches):
            loss = functional.cross_entropy(self.model(self.inputs), self.labels)
            if self.micro_batches > 1:
                loss = loss / self.micro_batches
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
        micro_batches: of a step.
    """

    title: str
    make: Callable[[], tuple[nn.Module, Tensor, Tensor]]
    steps: int
    warm_steps: int
    micro_batches: int = 1

    def start(self) -> Training:
        """The training at its first step, the same each time."""
        torch.manual_seed(0)
        model, inputs, labels = self.make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        return Training(model, optimizer, inputs, labels, self.micro_batches)


def _transformer_at(batch: int, length: int) -> Callable[[], tuple[nn.Module, Tensor, Tensor]]:
    def make() -> tuple[nn.Module, Tensor, Tensor]:
        tokens = torch.randint(_WORDS, (2, batch, length))
        return Transformer(), tokens[0], tokens[1]

    return make


def _text() -> tuple[nn.Module, Tensor, Tensor]:
    letters = torch.randint(_LETTERS, (2, 12, _LENGTH))
    return CharacterGPT(), letters[0], letters[1]


def _images() -> tuple[nn.Module, Tensor, Tensor]:
    return _cnn(), torch.randn(16, 3, 32, 32), torch.randint(10, (16,))


def _rows() -> tuple[nn.Module, Tensor, Tensor]:
    return _mlp(), torch.randn(64, 1410), torch.randint(10, (64,))


WORKLOADS = {
    "transformer": Workload("transformer 21 M, 8x128 tokens", _transformer_at(8, 128), 1, 101),
    "transformer_small": Workload("transformer 21 M, 2x32 tokens", _transformer_at(2, 32), 4, 110),
    "mlp": Workload("MLP 10 M, batch 64", _rows, 5, 120),
    "cnn": Workload("CNN 0.3 M, batch 16", _images, 20, 200),
    "gpt": Workload("character GPT 0.46 M, 4 micro-batches of 12x64", _text, 4, 110, 4),
}
QUICK_WORKLOADS = ("mlp",)
