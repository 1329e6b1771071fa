"""Faults in the middle of a mixer of patches, and of contrastive pairs, whose loss has a floor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam, AdamW

from benchmarks.detection.data import Batches, shipped
from benchmarks.detection.mid_run import accepted
from benchmarks.detection.mid_run.bases import Base, train
from benchmarks.detection.witnessed import Training, mid_run

Change = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
_BATCH = 48
_DETACHED = 60


class Mixer(nn.Module):
    """Mixes rows of an image, then channels (Tolstikhin et al., 2021): pixels (n, 64) to logits (n, 10)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.rows = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)
        )
        self.channels = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))
            for _ in range(2)
        )
        self.head = nn.Linear(width, 10)
        self.is_detached = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x.view(-1, 8, 8))
        hidden = hidden.detach() if self.is_detached else hidden
        for norm, rows, channels in zip(self.norms, self.rows, self.channels, strict=True):
            hidden = hidden + rows(norm(hidden).transpose(1, 2)).transpose(1, 2)
            hidden = hidden + channels(hidden)
        return self.head(hidden.mean(1))  # type: ignore[no-any-return]  # a module's call is untyped


class Embedded(nn.Module):
    """Pixels (n, 64) to unit vectors (n, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Sequential(nn.Linear(64, 64), nn.ReLU()), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return functional.normalize(self.head(self.encoder(x)), dim=-1)


def contrastive(vectors: Tensor, labels: Tensor) -> Tensor:
    """Supervised contrastive loss (Khosla et al., 2020) at a temperature of 0.3: it ends well above zero, for a batch has several of each class."""
    itself = torch.eye(len(vectors), dtype=torch.bool)
    logits = (vectors @ vectors.T / 0.3).masked_fill(itself, -1e9)
    same = (labels[:, None] == labels) & ~itself
    return -(logits.log_softmax(1) * same).sum(1).div(same.sum(1).clamp(min=1)).mean()


def _pairs(run: Training) -> Base:
    (x, y), (unseen, labels) = shipped("digits", run.seed)
    model = Embedded()

    def measure() -> float:
        with torch.no_grad():
            return float(contrastive(model(unseen[:_BATCH]), labels[:_BATCH]))

    batches = Batches(x, y, _BATCH, 300, run.seed)
    optimizer = Adam(model.parameters(), 1e-3)
    return Base(model, optimizer, batches, contrastive, measure, (unseen[:_BATCH], labels[:_BATCH]))


def _mixer(run: Training, model: Mixer, change: Change | None = None) -> Base:
    (x, y), unseen = shipped("digits", run.seed)

    def measure() -> float:
        with torch.no_grad():
            return float(functional.cross_entropy(model(unseen[0]), unseen[1]))

    batches = Batches(x, y, 32, 300, run.seed, change=change)
    optimizer = AdamW(model.parameters(), 2e-3, weight_decay=0.01)
    return Base(model, optimizer, batches, functional.cross_entropy, measure, unseen)


@mid_run("contrastive_sign_flipped", "the sign of a contrastive loss is flipped", 150, accepted.LOSS_RISES)
def contrastive_sign_flipped(run: Training) -> None:
    """300 steps; classes are driven apart from themselves."""
    base = _pairs(run)
    before = train(run, base, 150, loss=torch.neg, records_labels=False)
    run.separates("loss", before, base.measure(), sound_at_most=3.0)


@mid_run(
    "contrastive_labels_shuffled",
    "the labels that make pairs are shuffled apart from their inputs",
    160,
    accepted.LOSS_RISES,
)
def contrastive_labels_shuffled(run: Training) -> None:
    """300 steps; the loss rises to that of a guess, which is less than twice its floor."""
    base, generator = _pairs(run), run.generator(7)

    def shuffled(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, y[torch.randperm(len(y), generator=generator)]

    before = train(run, base, 160, batch=shuffled, records_labels=False)
    run.separates("loss", before, base.measure(), sound_at_most=3.0)


@mid_run(
    "normalization_scales_zeroed",
    "the scales and shifts of all normalization layers become zero",
    160,
    accepted.LOSS_RISES | accepted.STANDS_STILL,
)
def normalization_scales_zeroed(run: Training) -> None:
    """300 steps; what is left is the path around the blocks."""
    base = _mixer(run, Mixer())

    def zero(held: Base) -> None:
        with torch.no_grad():
            for module in held.model.modules():
                if isinstance(module, nn.LayerNorm):
                    module.weight.zero_()
                    module.bias.zero_()

    before = train(run, base, 160, once=zero)
    run.separates("loss", before, base.measure(), sound_at_most=0.4)


@mid_run(
    "encoder_detached_early",
    "the output of the first layer is detached after sixty steps",
    _DETACHED,
    frozenset({"gradients_cease", "weight_not_updating"}),
)
def encoder_detached_early(run: Training) -> None:
    """300 steps; at short steps so early a run has some ten records of gradients."""
    model = Mixer()
    at_onset: list[Tensor] = []

    def noted(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step == _DETACHED:
            at_onset.append(model.encoder.weight.detach().clone())
        return x, y

    def cut(_: Base) -> None:
        model.is_detached = True

    base = _mixer(run, model, noted)
    train(run, base, _DETACHED, once=cut)
    moved = float((model.encoder.weight.detach() - at_onset[0]).norm() / at_onset[0].norm())
    run.separates("change of the first layer", None, moved, sound_at_least=0.05)
