"""Architectures that are meant to be as they are: gates that begin closed, experts that starve, optimizers that take turns."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam

from benchmarks.detection.data import Batches, images, shipped, waves
from benchmarks.detection.models import convolutional, dense
from benchmarks.detection.witnessed import Training, difficult


class Highway(nn.Module):
    """A highway layer (Srivastava et al., 2015), whose gate's bias begins at -4: it carries nearly all."""

    def __init__(self, width: int, bias: float) -> None:
        super().__init__()
        self.change, self.gate = nn.Linear(width, width), nn.Linear(width, width)
        self.activation, self.opened = nn.ReLU(), nn.Sigmoid()
        nn.init.constant_(self.gate.bias, bias)

    def forward(self, x: Tensor) -> Tensor:
        share: Tensor = self.opened(self.gate(x))
        changed: Tensor = self.activation(self.change(x))
        return share * changed + (1 - share) * x


@difficult(
    "highway_gates", "the gates of highway layers begin at a bias of -4, closed, as their authors advise"
)
def highway_gates(run: Training) -> None:
    """400 steps of eight highway layers."""
    (x, y), (unseen, labels) = shipped("digits", run.seed)
    model = nn.Sequential(nn.Linear(64, 32), *(Highway(32, -4.0) for _ in range(8)), nn.Linear(32, 10))
    optimizer = Adam(model.parameters(), 2e-3)
    run.watch(model, optimizer)
    _classify(run, model, optimizer, Batches(x, y, 32, 400, run.seed))
    run.improves("accuracy", 0.1, _accuracy(model, unseen, labels), at_least=0.85)


class Gated(nn.Module):
    """An LSTM written out, with its gates as modules; the input gate begins at -5 to remember long."""

    def __init__(self, width: int, bias: float) -> None:
        super().__init__()
        self.width = width
        self.into, self.forget, self.out, self.cell = (nn.Linear(1 + width, width) for _ in range(4))
        self.gate, self.squash, self.head = nn.Sigmoid(), nn.Tanh(), nn.Linear(width, 2)
        nn.init.constant_(self.into.bias, bias)
        nn.init.constant_(self.forget.bias, -bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = cell = x.new_zeros(len(x), self.width)
        for at in range(x.shape[1]):
            both = torch.cat([x[:, at], hidden], 1)
            cell = self.gate(self.forget(both)) * cell + self.gate(self.into(both)) * self.squash(
                self.cell(both)
            )
            hidden = self.gate(self.out(both)) * self.squash(cell)
        output: Tensor = self.head(hidden)
        return output


@difficult(
    "lstm_gates_of_five",
    "an LSTM's input gates begin at -5 and its forget gates at 5, so that it remembers long",
)
def lstm_gates_of_five(run: Training) -> None:
    """350 steps on waves of 16 values."""
    x, y = waves(run.seed, 1500, 16)
    model = Gated(24, -5.0)
    optimizer = Adam(model.parameters(), 1e-2)
    run.watch(model, optimizer)
    losses = _classify(run, model, optimizer, Batches(x[:1200], y[:1200], 32, 350, run.seed))
    run.improves("loss", losses[0], sum(losses[-30:]) / 30, at_most=0.5)


class Mixture(nn.Module):
    """The best of several experts, chosen by a gate (Shazeer et al., 2017)."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(64, experts)
        self.experts = nn.ModuleList(dense([64, width, 10]) for _ in range(experts))
        with torch.no_grad():
            self.gate.bias[-1] = -6.0

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(1)
        best = weights.argmax(1)
        output = x.new_zeros(len(x), 10)
        for number, expert in enumerate(self.experts):
            chosen = best == number
            if chosen.any():
                output[chosen] = expert(x[chosen]) * weights[chosen, number : number + 1]
        return output


@difficult(
    "starved_expert",
    "an expert of a mixture is chosen for no example: it has no gradient, and nothing to learn",
)
def starved_expert(run: Training) -> None:
    """500 steps of a mixture of four, one of which the gate begins by ruling out."""
    (x, y), (unseen, labels) = shipped("digits", run.seed)
    model = Mixture(4, 32)
    optimizer = Adam(model.parameters(), 2e-3)
    run.watch(model, optimizer)
    _classify(run, model, optimizer, Batches(x, y, 32, 500, run.seed))
    run.improves("accuracy", 0.1, _accuracy(model, unseen, labels), at_least=0.8)


@difficult(
    "alternating_optimizers",
    "two optimizers take turns of 25 steps: each half of the model rests for as long",
)
def alternating_optimizers(run: Training) -> None:
    """500 steps of block coordinate descent."""
    (x, y), (unseen, labels) = shipped("digits", run.seed)
    model = dense([64, 48, 32, 10])
    lower = Adam([*model[0].parameters(), *model[2].parameters()], 2e-3)
    upper = Adam(model[4].parameters(), 2e-3)
    run.watch(model)
    for step, (inputs, wanted) in enumerate(Batches(x, y, 32, 500, run.seed)):
        optimizer = (lower, upper)[step // 25 % 2]
        loss = functional.cross_entropy(model(inputs), wanted)
        model.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        run.step()
    run.improves("accuracy", 0.1, _accuracy(model, unseen, labels), at_least=0.85)


@difficult(
    "distilled_from_own_copy",
    "born again: the teacher is the model's own copy, so that the first losses are nearly zero",
)
def distilled_from_own_copy(run: Training) -> None:
    """400 steps: a trained model learns noisy inputs from what its copy says of clean ones."""
    (x, y), (unseen, _) = shipped("digits", run.seed)
    model = dense([64, 64, 10])
    _taught(model, x, y, run)
    teacher = copy.deepcopy(model).requires_grad_(requires_grad=False)
    noisy = unseen + 0.35 * torch.randn(unseen.shape, generator=run.generator(3))

    def agreement() -> float:
        with torch.no_grad():
            return functional.kl_div(
                model(noisy).log_softmax(1),
                teacher(unseen).log_softmax(1),
                reduction="batchmean",
                log_target=True,
            ).item()

    first = agreement()
    optimizer = Adam(model.parameters(), 1e-3)
    run.watch(model, optimizer)
    for step, (inputs, _) in enumerate(Batches(x, y, 32, 400, run.seed)):
        noise = min(0.35, 0.01 * step)
        with torch.no_grad():
            wanted = teacher(inputs).log_softmax(1)
        given = model(inputs + noise * torch.randn_like(inputs)).log_softmax(1)
        loss = functional.kl_div(given, wanted, reduction="batchmean", log_target=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        run.step()
    run.improves("divergence from the teacher on noisy inputs", first, agreement(), at_most=0.9 * first)


@difficult(
    "batch_norm_in_eval",
    "a trained backbone's BatchNorm is held in eval() on purpose, while all else is tuned",
)
def batch_norm_in_eval(run: Training) -> None:
    """350 steps with statistics of the earlier training."""
    (x, y), (unseen, labels) = images(run.seed)
    model = convolutional(norm=True)
    _taught(model, x, y % 5, run)
    model[7] = nn.Linear(256, 10)
    first = _accuracy(model.eval(), unseen, labels)
    model.train()
    for module in model:
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    optimizer = SGD(model.parameters(), 0.01, momentum=0.9)
    run.watch(model, optimizer)
    _classify(run, model, optimizer, Batches(x, y, 32, 350, run.seed))
    run.improves("accuracy", first, _accuracy(model.eval(), unseen, labels), at_least=0.85)


@difficult("tied_weights", "the head's weight is the embedding's own")
def tied_weights(run: Training) -> None:
    """400 steps on sequences that count upwards."""
    generator = run.generator()
    start = torch.randint(0, 24, (600, 1), generator=generator)
    tokens = (start + torch.arange(9) * (1 + start % 3)) % 24
    embedding, cell, head = nn.Embedding(24, 32), nn.GRU(32, 32, batch_first=True), nn.Linear(32, 24)
    head.weight = embedding.weight
    model = Tied(embedding, cell, head)
    optimizer = Adam(model.parameters(), 5e-3)
    run.watch(model, optimizer)
    losses = _classify(run, model, optimizer, Batches(tokens[:, :-1], tokens[:, 1:], 16, 400, run.seed))
    run.improves("loss", losses[0], losses[-1], at_most=1.0)


class Tied(nn.Module):
    """A recurrent language model whose head shares the embedding's weight."""

    def __init__(self, embedding: nn.Embedding, cell: nn.GRU, head: nn.Linear) -> None:
        super().__init__()
        self.embedding, self.cell, self.head = embedding, cell, head

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.cell(self.embedding(x))
        logits: Tensor = self.head(outputs)
        return logits.transpose(1, 2)


@difficult(
    "zero_initialised_branches",
    "the last layer of each residual branch begins at zero, so that the network begins as the identity",
)
def zero_initialised_branches(run: Training) -> None:
    """400 steps of six residual blocks (as in Fixup and ReZero)."""
    (x, y), (unseen, labels) = shipped("digits", run.seed)
    model = nn.Sequential(nn.Linear(64, 32), *(Branch(32) for _ in range(6)), nn.Linear(32, 10))
    nn.init.zeros_(model[-1].weight)  # type: ignore[arg-type]  # a Linear's
    optimizer = Adam(model.parameters(), 2e-3)
    run.watch(model, optimizer)
    _classify(run, model, optimizer, Batches(x, y, 32, 400, run.seed))
    run.improves("accuracy", 0.1, _accuracy(model, unseen, labels), at_least=0.85)


class Branch(nn.Module):
    """A residual branch that begins as nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.activation, self.last = nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.last(self.activation(self.first(x)))
        return x + changed


@difficult(
    "stochastic_depth", "blocks are left out at random, half of the time: in many steps they have no gradient"
)
def stochastic_depth(run: Training) -> None:
    """500 steps of six residual blocks, each of which is skipped by a coin (Huang et al., 2016)."""
    (x, y), (unseen, labels) = shipped("digits", run.seed)
    model = Dropping(6, 32)
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9)
    run.watch(model, optimizer)
    _classify(run, model, optimizer, Batches(x, y, 32, 500, run.seed))
    run.improves("accuracy", 0.1, _accuracy(model.eval(), unseen, labels), at_least=0.85)


class Dropping(nn.Module):
    """Residual blocks that are skipped at random while training."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(64, width), nn.Linear(width, 10)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x)
        for block in self.blocks:
            if not self.training or torch.rand(()) < 0.5:
                hidden = hidden + (1.0 if self.training else 0.5) * block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def _classify(
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


def _taught(model: nn.Module, x: Tensor, y: Tensor, run: Training) -> None:
    """Train without a hook."""
    optimizer = Adam(model.parameters(), 2e-3)
    for inputs, wanted in Batches(x, y, 32, 200, run.seed):
        loss = functional.cross_entropy(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())
