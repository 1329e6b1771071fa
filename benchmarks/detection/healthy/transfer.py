"""Parts of a model that stand still on purpose: fine-tuning, low-rank adapters, distillation."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam, AdamW

from benchmarks.detection.data import Batches, images, shipped
from benchmarks.detection.healthy.trainings import healthy
from benchmarks.detection.models import convolutional, dense
from benchmarks.detection.programs import Clock, Recorder, loop


def pretrained(model: nn.Module, batches: Batches) -> None:
    """Train without a recorder, so that there is something to go on from."""
    optimizer = Adam(model.parameters(), 2e-3)
    for x, y in batches:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()


@healthy("frozen_backbone", "convolutions were trained before and are frozen; only a new head learns")
def frozen_backbone(recorder: Recorder, seed: int, clock: Clock) -> None:
    """1,200 steps; the optimizer holds the head alone."""
    (x, y), (unseen, labels) = images(seed)
    model = convolutional()
    pretrained(model, Batches(x, y % 5, 32, 150, seed))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model[5] = nn.Linear(256, 10)
    optimizer = Adam(model[5].parameters(), 1e-3)
    batches = Batches(x, y, 32, 1200, seed, (unseen, labels))
    loop(recorder, clock, (model, optimizer, functional.cross_entropy, batches))


@healthy(
    "fine_tuned_gently", "all layers were trained before; a small rate, and a loss that is low from the start"
)
def fine_tuned_gently(recorder: Recorder, seed: int, clock: Clock) -> None:
    """1,200 steps at a rate of 2e-5 on slightly shifted images."""
    (x, y), (unseen, labels) = images(seed)
    model = convolutional()
    pretrained(model, Batches(x, y, 32, 300, seed))
    optimizer = AdamW(model.parameters(), 2e-5)
    batches = Batches(x + 0.1, y, 32, 1200, seed, (unseen + 0.1, labels))
    loop(recorder, clock, (model, optimizer, functional.cross_entropy, batches))


class Adapted(nn.Module):
    """A frozen linear layer and a low-rank branch whose second factor begins at zero (Hu et al., 2021)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = (
            nn.Linear(base.in_features, rank, bias=False),
            nn.Linear(rank, base.out_features, bias=False),
        )
        nn.init.zeros_(self.up.weight)
        for parameter in base.parameters():
            parameter.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]  # a module's call is untyped


@healthy("low_rank_adapters", "LoRA: base weights are frozen, and one factor begins at zero")
def low_rank_adapters(recorder: Recorder, seed: int, clock: Clock) -> None:
    """1,500 steps on digits turned upside down, after training on upright ones."""
    (x, y), (unseen, labels) = shipped("digits", seed)
    model = dense([64, 64, 64, 10])
    pretrained(model, Batches(x, y, 32, 400, seed))
    for index in (0, 2, 4):
        base = model[index]
        assert isinstance(base, nn.Linear)
        model[index] = Adapted(base, 4)
    optimizer = AdamW([held for held in model.parameters() if held.requires_grad], 2e-3)
    batches = Batches(x.flip(1), y, 32, 1500, seed, (unseen.flip(1), labels))
    loop(recorder, clock, (model, optimizer, functional.cross_entropy, batches))


@healthy("distillation", "a small network learns a larger one's answers: the loss ends near zero")
def distillation(recorder: Recorder, seed: int, clock: Clock) -> None:
    """1,500 steps on the divergence from the teacher's softened answers."""
    (x, y), _ = shipped("digits", seed)
    teacher, model = dense([64, 128, 10]), dense([64, 24, 10])
    pretrained(teacher, Batches(x, y, 32, 400, seed))
    with torch.no_grad():
        answers = functional.log_softmax(teacher(x) / 3, 1)

    def divergence(logits: Tensor, wanted: Tensor) -> Tensor:
        return functional.kl_div(
            functional.log_softmax(logits / 3, 1), wanted, reduction="batchmean", log_target=True
        )

    optimizer = Adam(model.parameters(), 2e-3)
    loop(recorder, clock, (model, optimizer, divergence, Batches(x, answers, 32, 1500, seed)))
