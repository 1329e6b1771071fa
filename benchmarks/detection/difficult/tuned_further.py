"""Models that have learnt before: resumed, thawed by and by, with adapters, or with a teacher of their own."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW

from benchmarks.detection.data import Batches, copied_tokens, images, shipped
from benchmarks.detection.models import LanguageModel, convolutional, dense
from benchmarks.detection.witnessed import Training, difficult


def _steps(
    run: Training, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches
) -> list[float]:
    losses = []
    for inputs, wanted in batches:
        loss = functional.cross_entropy(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        losses.append(loss.item())
        run.step()
    return losses


def _taught(model: nn.Module, batches: Batches) -> None:
    """Train without a hook."""
    optimizer = Adam(model.parameters(), 2e-3)
    for inputs, wanted in batches:
        loss = functional.cross_entropy(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


@difficult(
    "resumed_at_a_plateau",
    "a run is interrupted and resumed from its checkpoint twice, where its loss has long been flat",
)
def resumed_at_a_plateau(run: Training) -> None:
    """Three attempts of 250, 200 and 200 steps on labels of which a third is noise."""
    (x, y), (unseen, labels) = shipped("digits", run.seed)
    generator = run.generator()
    noisy = torch.where(
        torch.rand(len(y), generator=generator) < 0.33, torch.randint(0, 10, y.shape, generator=generator), y
    )
    model = dense([64, 24, 10])
    optimizer = Adam(model.parameters(), 3e-3)
    start = 0
    for part, steps in enumerate((250, 200, 200)):
        if part:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model = dense([64, 24, 10])
            optimizer = Adam(model.parameters(), 3e-3)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            run.resume(start)
        run.watch(model, optimizer)
        _steps(run, model, optimizer, Batches(x, noisy, 48, steps, run.seed + part))
        start += steps
    run.improves("accuracy on clean labels", 0.1, _accuracy(model, unseen, labels), at_least=0.8)


@difficult(
    "resumed_without_optimizer_state",
    "a run is resumed from weights alone: Adam begins anew, and the loss leaps a little",
)
def resumed_without_optimizer_state(run: Training) -> None:
    """Two attempts of 300 and 250 steps."""
    (x, y), (unseen, labels) = images(run.seed)
    model = convolutional()
    optimizer = Adam(model.parameters(), 2e-3)
    run.watch(model, optimizer)
    _steps(run, model, optimizer, Batches(x, y, 32, 300, run.seed))
    before = _accuracy(model, unseen, labels)
    resumed = convolutional()
    resumed.load_state_dict(model.state_dict())
    run.resume(300)
    optimizer = Adam(resumed.parameters(), 2e-3)
    run.watch(resumed, optimizer)
    _steps(run, resumed, optimizer, Batches(x, y, 32, 250, run.seed + 1))
    run.improves("accuracy", 0.1, _accuracy(resumed, unseen, labels), at_least=min(0.93, before))


@difficult("thawed_by_and_by", "layers are frozen at first and thawed from the top, one each 100 steps")
def thawed_by_and_by(run: Training) -> None:
    """400 steps on five new classes, all parameters in the optimizer from the start."""
    (x, y), (unseen, labels) = shipped("digits", run.seed)
    model = dense([64, 64, 48, 32, 10])
    _taught(model, Batches(x, y % 5, 32, 200, run.seed))
    model[6] = nn.Linear(32, 10)
    layers = [model[0], model[2], model[4]]
    for layer in layers:
        layer.requires_grad_(requires_grad=False)
    optimizer = Adam(model.parameters(), 1e-3)
    first = _accuracy(model, unseen, labels)
    run.watch(model, optimizer)
    for step, (inputs, wanted) in enumerate(Batches(x, y, 32, 400, run.seed)):
        if step and step % 100 == 0:
            layers.pop().requires_grad_(requires_grad=True)
        loss = functional.cross_entropy(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        run.step()
    run.improves("accuracy", first, _accuracy(model, unseen, labels), at_least=0.88)


class LowRank(nn.Module):
    """A frozen linear layer with a low-rank change that begins at zero (Hu et al., 2021)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.base(x)
        change: Tensor = self.up(self.down(x))
        return output + change


@difficult(
    "low_rank_language_model",
    "LoRA on a language model's head and projections; all else is frozen, and the loss moves little",
)
def low_rank_language_model(run: Training) -> None:
    """300 steps after 250 on another kind of sequences."""
    x, y = copied_tokens(run.seed, 800, 12, 16)
    model = LanguageModel(16, 12, 32, 1)
    _taught(model, Batches(x, y, 32, 200, run.seed))
    model.requires_grad_(requires_grad=False)
    model.head = LowRank(model.head, 4)  # type: ignore[assignment]  # a layer in another's place
    for block in model.blocks:
        block.linear1 = LowRank(block.linear1, 4)  # type: ignore[arg-type]
        block.linear2 = LowRank(block.linear2, 4)  # type: ignore[arg-type]
    moved = (x + 3) % 16, (y + 3) % 16
    with torch.no_grad():
        first = functional.cross_entropy(model(moved[0]), moved[1]).item()
    optimizer = AdamW([held for held in model.parameters() if held.requires_grad], 3e-3)
    run.watch(model, optimizer)
    _steps(run, model, optimizer, Batches(*moved, 32, 300, run.seed))
    with torch.no_grad():
        last = functional.cross_entropy(model(moved[0]), moved[1]).item()
    run.improves("loss", first, last, at_most=0.93 * first)


@difficult(
    "linear_probe", "a probe on frozen features of a random network: much is left that it cannot learn"
)
def linear_probe(run: Training) -> None:
    """400 steps of the head alone, by its own optimizer."""
    (x, y), (unseen, labels) = images(run.seed)
    model = convolutional()
    for parameter in model[:5].parameters():
        parameter.requires_grad = False
    optimizer = SGD(model[5].parameters(), 0.02, momentum=0.9)
    run.watch(model, optimizer)
    _steps(run, model, optimizer, Batches(x, y, 32, 400, run.seed))
    run.improves("accuracy", 0.1, _accuracy(model, unseen, labels), at_least=0.8)


@difficult(
    "mean_teacher",
    "a weight for agreement with the model's own average is ramped up from zero: the sum of losses rises",
)
def mean_teacher(run: Training) -> None:
    """400 steps with labels for 100 examples alone (Tarvainen and Valpola, 2017)."""
    (x, y), (unseen, labels) = shipped("digits", run.seed)
    model = dense([64, 64, 10])
    teacher = copy.deepcopy(model).requires_grad_(requires_grad=False)
    optimizer = Adam(model.parameters(), 2e-3)
    run.watch(model, optimizer)
    for step, (inputs, _) in enumerate(Batches(x, y, 48, 400, run.seed)):
        at = torch.randint(0, 100, (16,))
        supervised = functional.cross_entropy(model(x[at] + 0.1 * torch.randn(16, 64)), y[at])
        with torch.no_grad():
            wanted = teacher(inputs + 0.1 * torch.randn_like(inputs)).softmax(1)
        agreement = (model(inputs + 0.1 * torch.randn_like(inputs)).softmax(1) - wanted).pow(2).sum(1).mean()
        loss = supervised + 10 * min(1.0, step / 200) * agreement
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for held, own in zip(teacher.parameters(), model.parameters(), strict=True):
                held.lerp_(own, 0.02)
        run.log(loss=loss, supervised_loss=supervised)
        run.step()
    run.improves("accuracy", 0.1, _accuracy(teacher, unseen, labels), at_least=0.72)
