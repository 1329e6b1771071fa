"""Graphs, sequences to sequences, and losses of other kinds than the plain ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW

from benchmarks.detection.data import Batches, images, shipped
from benchmarks.detection.models import convolutional, dense
from benchmarks.detection.witnessed import Training, difficult


def _accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


class Messages(nn.Module):
    """Two rounds of messages along edges; nodes without edges get none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, width), nn.Linear(2 * width, width)
        self.activation, self.head = nn.ReLU(), nn.Linear(width, 3)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        hidden = self.activation(self.first(x))
        for _ in range(2):
            gathered = torch.zeros_like(hidden).index_add(0, target, hidden[source])
            counted = torch.zeros(len(x)).index_add(0, target, torch.ones(len(target))).clamp(min=1)
            hidden = self.activation(self.second(torch.cat([hidden, gathered / counted[:, None]], 1)))
        output: Tensor = self.head(hidden)
        return output


@difficult(
    "graph_of_few_labels",
    "a graph network learns from 5 % of a graph's nodes: one whole batch for ever, and gradients of few nodes",
)
def graph_of_few_labels(run: Training) -> None:
    """200 steps on a graph of 300 nodes in three communities, some of them without edges."""
    generator = run.generator()
    label = torch.randint(0, 3, (300,), generator=generator)
    source = torch.randint(0, 280, (3000,), generator=generator)
    target = torch.randint(0, 280, (3000,), generator=generator)
    kept = (label[source] == label[target]) | (torch.rand(3000, generator=generator) < 0.15)
    source, target = source[kept], target[kept]
    x = torch.randn(300, 8, generator=generator) + functional.one_hot(label, 8)
    shown = torch.randperm(280, generator=generator)[:24]
    model = Messages(24)
    optimizer = Adam(model.parameters(), 1e-2, weight_decay=5e-4)
    run.watch(model, optimizer)
    for _ in range(200):
        loss = functional.cross_entropy(model(x, source, target)[shown], label[shown])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        run.step()
    with torch.no_grad():
        accuracy = (model(x, source, target).argmax(1) == label)[:280].float().mean().item()
    run.improves("accuracy on all nodes with edges", 0.33, accuracy, at_least=0.6)


@difficult(
    "ctc_of_impossible_targets",
    "some targets are longer than their inputs: their CTC loss is infinite, and set to zero",
)
def ctc_of_impossible_targets(run: Training) -> None:
    """350 steps of a recogniser of noisy symbols; a tenth of the examples cannot be aligned."""
    generator = run.generator()
    model = Recogniser()
    optimizer = Adam(model.parameters(), 5e-3)
    run.watch(model, optimizer)
    losses = []
    for _ in range(350):
        symbols = torch.randint(1, 6, (16, 4), generator=generator)
        x = functional.one_hot(symbols.repeat_interleave(3, 1), 6).float()
        x = x + 0.3 * torch.randn(x.shape, generator=generator)
        length = torch.full((16,), 12)
        length[torch.rand(16, generator=generator) < 0.1] = 2
        chances = model(x).log_softmax(2).transpose(0, 1)
        loss = functional.ctc_loss(chances, symbols, length, torch.full((16,), 4), zero_infinity=True)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        run.log(loss=loss)
        losses.append(loss.item())
        run.step()
    run.improves("loss", losses[0], sum(losses[-20:]) / 20, at_most=0.4)


class Recogniser(nn.Module):
    """A GRU over (n, length, 6) → logits of blank and five symbols."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(6, 24, batch_first=True, bidirectional=True), nn.Linear(48, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.cell(x)
        logits: Tensor = self.head(hidden)
        return logits


class Translator(nn.Module):
    """An encoder and a decoder of GRUs; the decoder is given a token at a time."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words + 1, width)
        self.encoder, self.decoder = nn.GRU(width, width, batch_first=True), nn.GRUCell(width, width)
        self.head = nn.Linear(width, words)

    def forward(self, source: Tensor, target: Tensor, share: float) -> Tensor:
        _, hidden = self.encoder(self.embedding(source))
        state, token = hidden[0], torch.full((len(source),), self.head.out_features)
        outputs = []
        for at in range(target.shape[1]):
            state = self.decoder(self.embedding(token), state)
            outputs.append(self.head(state))
            given = torch.rand(()) < share
            token = target[:, at] if given else outputs[-1].argmax(1)
        return torch.stack(outputs, 2)


@difficult(
    "teacher_let_go",
    "teacher forcing is given up by and by: the loss rises, for the decoder has to live with its own errors",
)
def teacher_let_go(run: Training) -> None:
    """350 steps to turn sequences of five tokens around; the share of forced ones falls from 1 to 0.3."""
    generator = run.generator()
    model = Translator(10, 32)
    optimizer = Adam(model.parameters(), 5e-3)
    run.watch(model, optimizer)
    losses = []
    for step in range(350):
        source = torch.randint(0, 10, (32, 5), generator=generator)
        target = source.flip(1)
        loss = functional.cross_entropy(model(source, target, max(0.3, 1 - step / 400)), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        losses.append(loss.item())
        run.step()
    run.improves("loss", losses[0], sum(losses[-20:]) / 20, at_most=1.5)


@difficult("smoothed_labels", "labels are smoothed by 0.3: the loss cannot fall below 1.2, and stays there")
def smoothed_labels(run: Training) -> None:
    """450 steps of a convolutional network."""
    (x, y), (unseen, labels) = images(run.seed)
    model = convolutional(norm=True)
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9)
    run.watch(model, optimizer)
    for inputs, wanted in Batches(x, y, 32, 450, run.seed):
        loss = functional.cross_entropy(model(inputs), wanted, label_smoothing=0.3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        run.step()
    run.improves("accuracy", 0.1, _accuracy(model.eval(), unseen, labels), at_least=0.93)


@difficult(
    "rare_class_with_focal_loss",
    "one example of 30 is positive, and the focal loss of most of them is nearly nothing",
)
def rare_class_with_focal_loss(run: Training) -> None:
    """450 steps; labels are recorded, and their imbalance is what the loss is there for."""
    generator = run.generator()
    x = torch.randn(8000, 10, generator=generator)
    y = ((x[:, 0] * x[:, 1] + x[:, 2]) > 2.4).float()
    model = dense([10, 48, 48, 1])
    optimizer = AdamW(model.parameters(), 3e-3)
    run.watch(model, optimizer)
    for inputs, wanted in Batches(x[:6000], y[:6000], 64, 450, run.seed):
        logits = model(inputs)[:, 0]
        plain = functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
        loss = ((1 - (-plain).exp()).pow(2) * plain).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        run.record(labels=wanted.long())
        run.step()
    with torch.no_grad():
        ranked = y[6000:][model(x[6000:])[:, 0].argsort(descending=True)]
    positives = int(y[6000:].sum())
    run.improves(
        "precision at the number of positives",
        positives / 2000,
        ranked[:positives].mean().item(),
        at_least=0.6,
    )


class Rounded(nn.Module):
    """A linear layer whose weights and outputs are rounded to four bits, and whose gradients pass straight through."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.linear = nn.Linear(given, made)

    def forward(self, x: Tensor) -> Tensor:
        output = functional.linear(x, _rounded(self.linear.weight), self.linear.bias)
        return _rounded(output)


def _rounded(values: Tensor) -> Tensor:
    size = values.detach().abs().max() / 7 + 1e-9
    return values + ((values / size).round() * size - values).detach()


@difficult(
    "quantised_to_four_bits",
    "quantisation-aware training: rounded outputs take few values, and gradients pass straight through",
)
def quantised_to_four_bits(run: Training) -> None:
    """400 steps."""
    (x, y), (unseen, labels) = shipped("digits", run.seed)
    model = nn.Sequential(
        Rounded(64, 64), nn.Hardtanh(0, 6), Rounded(64, 64), nn.Hardtanh(0, 6), Rounded(64, 10)
    )
    optimizer = SGD(model.parameters(), 0.03, momentum=0.9)
    run.watch(model, optimizer)
    for inputs, wanted in Batches(x, y, 32, 400, run.seed):
        loss = functional.cross_entropy(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        run.step()
    run.improves("accuracy", 0.1, _accuracy(model, unseen, labels), at_least=0.8)


@difficult(
    "hinge_at_zero",
    "a hinge loss is exactly zero for batches that are right by a margin, and so is its gradient",
)
def hinge_at_zero(run: Training) -> None:
    """500 steps with batches of eight on separable data."""
    (x, y), (unseen, labels) = shipped("breast_cancer", run.seed)
    model = dense([30, 16, 2], nn.Tanh)
    optimizer = SGD(model.parameters(), 0.05)
    run.watch(model, optimizer)
    losses = []
    for inputs, wanted in Batches(x, y, 8, 500, run.seed):
        loss = functional.multi_margin_loss(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        losses.append(loss.item())
        run.step()
    run.improves("accuracy", 0.4, _accuracy(model, unseen, labels), at_least=0.9)


@difficult(
    "gated_by_saturation",
    "gates are meant to be at 0 or 1: a temperature falls until every gate is saturated (a learnt mask)",
)
def gated_by_saturation(run: Training) -> None:
    """450 steps of a classifier that learns which of 64 pixels it needs."""
    (x, y), (unseen, labels) = shipped("digits", run.seed)
    model = Chosen()
    optimizer = Adam(model.parameters(), 1e-2)
    run.watch(model, optimizer)
    for step, (inputs, wanted) in enumerate(Batches(x, y, 32, 450, run.seed)):
        model.temperature = max(0.05, 1 - step / 300)
        loss = functional.cross_entropy(model(inputs), wanted) + 0.3 * model.open_share()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        run.step()
    run.improves("accuracy", 0.1, _accuracy(model, unseen, labels), at_least=0.85)


class Chosen(nn.Module):
    """A classifier behind a gate for each input."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Parameter(0.5 + 0.5 * torch.randn(64))
        self.gate, self.layers, self.temperature = nn.Sigmoid(), dense([64, 48, 10]), 1.0

    def open_share(self) -> Tensor:
        return torch.sigmoid(self.scores / self.temperature).mean()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x * self.gate(self.scores / self.temperature))
        return output
