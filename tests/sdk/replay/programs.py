"""Training programs with a planted fault and a requested bundle, and their replay: run with the kind in KIND and a store as argument."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import watchstep

KIND = os.environ.get("KIND", "cnn")
REQUESTED, BAD = 4, 14
"""Numbers of the batches of the bundle that the program requests, and of the planted fault."""


class Transformer(nn.Module):
    """Takes keyword arguments, and returns its loss in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32, 50)

    def forward(self, tokens: torch.Tensor, *, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        scores = self.head(self.block(self.embed(tokens)))
        return {"loss": functional.cross_entropy(scores.flatten(0, 1).float(), labels.flatten())}


def build(kind: str) -> nn.Module:
    """Return the model."""
    torch.manual_seed(1)
    if kind == "transformer":
        return Transformer()
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.4), nn.Flatten(), nn.Linear(144, 3)
    )
    return nn.parallel.DistributedDataParallel(model) if kind == "ddp" else model


def loss_of(kind: str, model: Any, batch: Any) -> torch.Tensor:
    """Return the loss of a batch."""
    if kind == "transformer":
        with torch.autocast("cpu", torch.bfloat16):
            value: torch.Tensor = model(batch[0], labels=batch[1])["loss"]
            return value
    value = functional.cross_entropy(model(batch[0]), batch[1])
    return value / 4 if kind == "accumulation" else value


def clip(kind: str, model: nn.Module) -> None:
    """Clip the gradients, as the transformer's program does."""
    if kind == "transformer":
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def step_of(kind: str) -> watchstep.ReplayStep:
    """Return the step of a program."""
    return watchstep.ReplayStep(
        build(kind),
        lambda model, batch: loss_of(kind, model, batch),
        before_update=lambda model: clip(kind, model),
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
    )


def replay() -> watchstep.ReplayStep:
    """Return the step, for ``watchstep replay``."""
    return step_of(KIND)


def train(kind: str, hook: watchstep.Hook, *, workers: int = 0, rank: int = 0) -> None:
    """Train an epoch of 16 batches; one of the last is bad, by its data or by a weight."""
    model = build(kind)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(7 + rank)
    images, classes = torch.randn(64, 1, 8, 8), torch.randint(0, 3, (64,))
    images[4 * BAD, 0, 0, 0] = torch.inf
    tokens, labels = torch.randint(0, 50, (64, 12)), torch.randint(0, 50, (64, 12))
    data = TensorDataset(tokens, labels) if kind == "transformer" else TensorDataset(images, classes)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    hook.watch(model, optimizer)
    every = 4 if kind == "accumulation" else 1
    for number, batch in enumerate(DataLoader(data, batch_size=4, num_workers=workers)):
        if number == REQUESTED:
            hook.bundle()
        if kind == "transformer" and number == BAD:
            with torch.no_grad():
                model.get_parameter("head.weight")[3] = 1e38
        loss_of(kind, model, batch).backward()
        if (number + 1) % every == 0:
            clip(kind, model)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def main() -> None:
    """Train, and exit at once: threads of PyTorch abort some exits of programs with several ranks."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    with watchstep.Hook(sys.argv[1], run=KIND) as hook:
        train(KIND, hook, workers=1, rank=rank)
    os._exit(0)


if __name__ == "__main__":
    main()
