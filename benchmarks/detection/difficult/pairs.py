"""Learning from pairs: losses that begin at the logarithm of a batch, or are zero for most of it."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam

from benchmarks.detection.data import Batches, shipped
from benchmarks.detection.models import dense
from benchmarks.detection.witnessed import Training, difficult


def _neighbours_agree(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The share of examples whose nearest neighbour by the model's output has the same class."""
    with torch.no_grad():
        code = functional.normalize(model(x), dim=1)
        near = (code @ code.T - 2 * torch.eye(len(x))).argmax(1)
        return float((y[near] == y).float().mean())


@difficult(
    "contrast_at_a_low_temperature",
    "InfoNCE at a temperature of 0.07: the loss leaps between batches and keeps a floor",
)
def contrast_at_a_low_temperature(run: Training) -> None:
    """400 steps on two views of each digit; half of the pixels are left out of either."""
    (x, _), (unseen, labels) = shipped("digits", run.seed)
    model = dense([64, 64, 16])
    first = _neighbours_agree(model, unseen, labels)
    optimizer = Adam(model.parameters(), 1e-3)
    run.watch(model, optimizer)
    losses = []
    for inputs, _ in Batches(x, x, 48, 400, run.seed):
        both = torch.cat([inputs * (torch.rand_like(inputs) < 0.5) for _ in range(2)])
        code = functional.normalize(model(both), dim=1)
        loss = functional.cross_entropy(code[:48] @ code[48:].T / 0.07, torch.arange(48))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        losses.append(loss.item())
        run.step()
    run.improves("loss", losses[0], sum(losses[-40:]) / 40, at_most=2.2)
    run.improves(
        "agreement of neighbours", None, _neighbours_agree(model, unseen, labels), at_least=min(0.8, first)
    )


@difficult(
    "triplets_with_a_margin",
    "most triplets satisfy their margin: the loss is exactly zero for most of a batch, and of some batches",
)
def triplets_with_a_margin(run: Training) -> None:
    """400 steps of batches of eight."""
    (x, y), (unseen, labels) = shipped("digits", run.seed)
    model = dense([64, 48, 8])
    optimizer = SGD(model.parameters(), 0.05)
    run.watch(model, optimizer)
    generator = run.generator()
    by_class = [torch.where(y == held)[0] for held in range(10)]

    def drawn(classes: Tensor) -> Tensor:
        at = [
            int(by_class[held][torch.randint(0, len(by_class[held]), (1,), generator=generator)])
            for held in classes
        ]
        return x[at]

    losses = []
    for _ in range(400):
        one = torch.randint(0, 10, (8,), generator=generator)
        other = (one + torch.randint(1, 10, (8,), generator=generator)) % 10
        code = model(torch.cat([drawn(one), drawn(one), drawn(other)]))
        loss = functional.triplet_margin_loss(code[:8], code[8:16], code[16:], margin=0.5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        losses.append(loss.item())
        run.step()
    run.improves("loss", sum(losses[:10]) / 10, sum(losses[-60:]) / 60, at_most=0.15)
    run.improves("agreement of neighbours", None, _neighbours_agree(model, unseen, labels), at_least=0.85)


class TwoTowers(nn.Module):
    """Pictures and words in one space, with a temperature that is learnt (Radford et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.pictures, self.words = (
            dense([64, 64, 16]),
            nn.Sequential(nn.Embedding(10, 32), nn.Linear(32, 16)),
        )
        self.scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, picture: Tensor, word: Tensor) -> Tensor:
        one = functional.normalize(self.pictures(picture), dim=1)
        other = functional.normalize(self.words(word), dim=1)
        return self.scale.exp() * one @ other.T


@difficult("two_towers", "several pictures of a batch have the same word: the loss cannot come near zero")
def two_towers(run: Training) -> None:
    """350 steps of 24 pairs."""
    (x, y), (unseen, labels) = shipped("digits", run.seed)
    model = TwoTowers()
    optimizer = Adam(model.parameters(), 2e-3)

    def accuracy() -> float:
        with torch.no_grad():
            return float((model(unseen, torch.arange(10)).argmax(1) == labels).float().mean())

    first = accuracy()
    run.watch(model, optimizer)
    for inputs, wanted in Batches(x, y, 24, 350, run.seed):
        logits = model(inputs, wanted)
        target = torch.arange(len(inputs))
        loss = 0.5 * (functional.cross_entropy(logits, target) + functional.cross_entropy(logits.T, target))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        run.step()
    run.improves("accuracy without training on classes", first, accuracy(), at_least=0.85)


@difficult(
    "own_average_as_target",
    "a network foresees the output of its own moving average (BYOL): the loss falls, rises and falls",
)
def own_average_as_target(run: Training) -> None:
    """400 steps; the target's weights get no gradient."""
    (x, _), (unseen, labels) = shipped("digits", run.seed)
    online = nn.Sequential(dense([64, 64, 32]), nn.BatchNorm1d(32))
    predictor = dense([32, 32, 32])
    model = nn.Sequential(online, predictor)
    target = copy.deepcopy(online).requires_grad_(requires_grad=False)
    optimizer = Adam(model.parameters(), 1e-3)
    run.watch(model, optimizer)
    losses = []
    for inputs, _ in Batches(x, x, 48, 400, run.seed):
        one, other = (inputs * (torch.rand_like(inputs) < 0.7) for _ in range(2))
        with torch.no_grad():
            wanted = functional.normalize(target(other), dim=1)
        given = functional.normalize(model(one), dim=1)
        loss = (2 - 2 * (given * wanted).sum(1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for held, own in zip(target.parameters(), online.parameters(), strict=True):
                held.lerp_(own, 0.02)
        run.log(loss=loss)
        losses.append(loss.item())
        run.step()
    run.improves("loss", losses[0], sum(losses[-30:]) / 30, at_most=1.0)
    run.improves(
        "agreement of neighbours", None, _neighbours_agree(online.eval(), unseen, labels), at_least=0.8
    )


@difficult(
    "siamese_pairs",
    "pairs of the same and of other digits: the contrastive loss of a margin ends at a few thousandths",
)
def siamese_pairs(run: Training) -> None:
    """400 steps of 24 pairs."""
    (x, y), (unseen, labels) = shipped("digits", run.seed)
    model = dense([64, 64, 8])
    optimizer = Adam(model.parameters(), 2e-3)
    run.watch(model, optimizer)
    losses = []
    for inputs, wanted in Batches(x, y, 48, 400, run.seed):
        code = model(inputs)
        apart = functional.pairwise_distance(code[:24], code[24:])
        same = (wanted[:24] == wanted[24:]).float()
        loss = (same * apart.pow(2) + (1 - same) * functional.relu(1 - apart).pow(2)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        losses.append(loss.item())
        run.step()
    run.improves("loss", losses[0], sum(losses[-40:]) / 40, at_most=0.06)
    run.improves("agreement of neighbours", None, _neighbours_agree(model, unseen, labels), at_least=0.85)
