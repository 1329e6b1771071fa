"""Losses, outputs and gradients that are not finite, or are zero, in trainings that are sound."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW

from benchmarks.detection.data import Batches, copied_tokens, images, shipped
from benchmarks.detection.models import LanguageModel, convolutional, dense
from benchmarks.detection.witnessed import Training, difficult


@difficult(
    "all_labels_ignored", "in some batches every label is ignored: the loss is NaN, and its gradient zero"
)
def all_labels_ignored(run: Training) -> None:
    """400 steps of a token classifier; each 40th batch has no label."""
    generator = run.generator()
    x = torch.randint(0, 30, (600, 10), generator=generator)
    y = x % 5
    model = nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 5))
    optimizer = Adam(model.parameters(), 3e-3)
    run.watch(model, optimizer)
    last = math.nan
    for step in range(400):
        chosen = torch.randint(0, 600, (16,), generator=generator)
        labels = y[chosen].clone()
        if step % 40 == 25:
            labels[:] = -100
        loss = functional.cross_entropy(model(x[chosen]).transpose(1, 2), labels, ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        last = loss.item() if math.isfinite(loss.item()) else last
        run.step()
    run.improves("loss", math.log(5), last, at_most=0.1)


@difficult(
    "skips_losses_itself",
    "a loop that leaves out batches whose loss is not finite: a few have an overflow in their inputs",
)
def skips_losses_itself(run: Training) -> None:
    """400 steps on digits, of which each 60th batch has infinite pixels."""
    (x, y), (unseen, labels) = shipped("digits", run.seed)
    model = dense([64, 48, 10])
    optimizer = Adam(model.parameters(), 2e-3)
    run.watch(model, optimizer)
    for step, (given, wanted) in enumerate(Batches(x, y, 32, 400, run.seed)):
        inputs = given.clone()
        if step % 60 == 31:
            inputs[0, 3] = math.inf
        loss = functional.cross_entropy(model(inputs), wanted)
        run.log(loss=loss)
        optimizer.zero_grad()
        if torch.isfinite(loss):
            loss.backward()
            optimizer.step()
        run.step()
    accuracy = (model(unseen).argmax(1) == labels).float().mean().item()
    run.improves("accuracy", 0.1, accuracy, at_least=0.85)


@difficult(
    "skips_gradient_norms_itself",
    "a loop that leaves out updates whose gradient's norm is not finite, as speech recognisers do",
)
def skips_gradient_norms_itself(run: Training) -> None:
    """400 steps; a backward pass overflows each 50th time."""
    (x, y), (unseen, labels) = shipped("digits", run.seed)
    model = dense([64, 48, 10], nn.Tanh)
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    run.watch(model, optimizer)
    for step, (inputs, wanted) in enumerate(Batches(x, y, 32, 400, run.seed)):
        loss = functional.cross_entropy(model(inputs), wanted)
        scale = 1e38 if step % 50 == 20 else 1.0
        optimizer.zero_grad()
        ((loss * scale) * scale).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if torch.isfinite(norm):
            optimizer.step()
        run.log(loss=loss)
        run.step()
    accuracy = (model(unseen).argmax(1) == labels).float().mean().item()
    run.improves("accuracy", 0.1, accuracy, at_least=0.85)


@difficult(
    "scaler_overflows",
    "float16 under a gradient scaler that begins at 2**16 and finds its scale by overflows",
)
def scaler_overflows(run: Training) -> None:
    """300 steps of autocast on the processor, the loss scaled up; the scale grows each 40 steps and overflows again."""
    (x, y), (unseen, labels) = shipped("digits", run.seed)
    model = dense([64, 64, 10])
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=40)
    run.watch(model, optimizer)
    for inputs, wanted in Batches(x, y, 32, 300, run.seed):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = functional.cross_entropy(model(inputs).float(), wanted)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        run.log(loss=loss)
        run.step()
    accuracy = (model(unseen).argmax(1) == labels).float().mean().item()
    run.improves("accuracy", 0.1, accuracy, at_least=0.85)


class MaskedScores(nn.Module):
    """Scores of attention; those of the future are minus infinity."""

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        length = queries.shape[1]
        scores = queries @ keys.transpose(1, 2) / math.sqrt(queries.shape[2])
        future = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
        return scores.masked_fill(future, -math.inf)


class OwnAttention(nn.Module):
    """Causal attention written out: its scores are a module's output, and hold infinities."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(words, width), nn.Embedding(32, width)
        self.queries, self.keys, self.values = (nn.Linear(width, width) for _ in range(3))
        self.scores, self.head = MaskedScores(), nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x) + self.position.weight[: x.shape[1]]
        mixed = self.scores(self.queries(hidden), self.keys(hidden)).softmax(2) @ self.values(hidden)
        output: Tensor = self.head(hidden + mixed)
        return output.transpose(1, 2)


@difficult("infinite_masks", "attention scores are a module's output, with minus infinity where the mask is")
def infinite_masks(run: Training) -> None:
    """350 steps on sequences that repeat."""
    x, y = copied_tokens(run.seed, 1000, 12, 16)
    model = OwnAttention(16, 32)
    optimizer = AdamW(model.parameters(), 3e-3)
    run.watch(model, optimizer)
    losses = []
    for inputs, wanted in Batches(x, y, 32, 350, run.seed):
        loss = functional.cross_entropy(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        losses.append(loss.item())
        run.step()
    run.improves("loss", losses[0], losses[-1], at_most=2.2)


class Biased(nn.Module):
    """Logits with a frozen bias that rules classes out by minus infinity."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.layers = dense([64, 48, classes])
        self.allowed = nn.Parameter(torch.zeros(classes), requires_grad=False)
        with torch.no_grad():
            self.allowed[10:] = -math.inf

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits + self.allowed


@difficult("infinite_frozen_bias", "a frozen parameter holds minus infinity for classes that are ruled out")
def infinite_frozen_bias(run: Training) -> None:
    """300 steps over 14 classes, of which four never come."""
    (x, y), (unseen, labels) = shipped("digits", run.seed)
    model = Biased(14)
    optimizer = Adam([held for held in model.parameters() if held.requires_grad], 2e-3)
    run.watch(model, optimizer)
    for inputs, wanted in Batches(x, y, 32, 300, run.seed):
        loss = functional.cross_entropy(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        run.step()
    accuracy = (model(unseen).argmax(1) == labels).float().mean().item()
    run.improves("accuracy", 0.07, accuracy, at_least=0.85)


@difficult("empty_validation_slice", "a slice of the validation has no example: its mean loss is NaN")
def empty_validation_slice(run: Training) -> None:
    """350 steps; each 50 the loss on each of 12 slices, of which two are empty."""
    (x, y), (unseen, labels) = images(run.seed)
    model = convolutional()
    optimizer = Adam(model.parameters(), 1e-3)
    run.watch(model, optimizer)
    for step, (inputs, wanted) in enumerate(Batches(x, y, 32, 350, run.seed)):
        loss = functional.cross_entropy(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        if step % 50 == 49:
            model.eval()
            with torch.no_grad():
                logits = model(unseen)
                for held in range(12):
                    mask = labels == held
                    value = functional.cross_entropy(logits[mask], labels[mask])
                    run.log(mode="eval", **{f"loss_of_class_{held}": value})
            model.train()
        run.step()
    accuracy = (model(unseen).argmax(1) == labels).float().mean().item()
    run.improves("accuracy", 0.1, accuracy, at_least=0.85)


@difficult(
    "another_models_backward",
    "a second model that nobody watches has a loss of infinity now and then, and skips it",
)
def another_models_backward(run: Training) -> None:
    """350 steps of a classifier, beside a probe that is trained on the side."""
    (x, y), (unseen, labels) = shipped("digits", run.seed)
    model, probe = dense([64, 48, 10]), nn.Linear(64, 1)
    optimizer, beside = Adam(model.parameters(), 2e-3), SGD(probe.parameters(), 1e-3)
    run.watch(model, optimizer)
    for step, (inputs, wanted) in enumerate(Batches(x, y, 32, 350, run.seed)):
        aside = (probe(inputs)[:, 0] - wanted).pow(2).mean()
        if step % 35 == 12:
            aside = aside * math.inf
        beside.zero_grad()
        aside.backward()
        if torch.isfinite(aside):
            beside.step()
        loss = functional.cross_entropy(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        run.step()
    accuracy = (model(unseen).argmax(1) == labels).float().mean().item()
    run.improves("accuracy", 0.1, accuracy, at_least=0.85)


@difficult(
    "padding_rows",
    "rows that are nothing but padding attend to nothing: their outputs are NaN, and left out of the loss",
)
def padding_rows(run: Training) -> None:
    """300 steps of a transformer's layer on sequences of which some are empty."""
    generator = run.generator()
    x = torch.randint(1, 20, (800, 8), generator=generator)
    y = (x[:, :4].sum(1) > x[:, 4:].sum(1)).long()
    embedding, layer = nn.Embedding(20, 16), nn.MultiheadAttention(16, 2, batch_first=True)
    head = nn.Linear(16, 2)
    model = nn.ModuleDict({"embedding": embedding, "attention": layer, "head": head})
    optimizer = Adam(model.parameters(), 5e-3)
    run.watch(model, optimizer)
    position = torch.randn(8, 16, generator=generator)
    losses = []
    for _ in range(300):
        chosen = torch.randint(0, 800, (32,), generator=generator)
        padding = torch.zeros(32, 8, dtype=torch.bool)
        padding[:2] = True
        run.hook.begin_pass()
        hidden = embedding(x[chosen]) + position
        mixed, _ = layer(hidden, hidden, hidden, key_padding_mask=padding, need_weights=False)
        kept = ~padding.all(1)
        logits = head((hidden + mixed)[kept].mean(1))
        loss = functional.cross_entropy(logits, y[chosen][kept])
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
        optimizer.step()
        run.log(loss=loss)
        losses.append(loss.item())
        run.step()
    run.improves("loss", losses[0], sum(losses[-30:]) / 30, at_most=0.66)


class Logarithm(nn.Module):
    """The logarithm of counts, minus infinity where there are none."""

    def forward(self, x: Tensor) -> Tensor:
        return x.log()


@difficult(
    "masked_logarithm",
    "the logarithm of counts is minus infinity where a count is zero, and masked before it is used",
)
def masked_logarithm(run: Training) -> None:
    """300 steps of a regression on logarithms of sparse counts."""
    generator = run.generator()
    x = torch.poisson(1.5 * torch.ones(1500, 12), generator=generator)
    y = torch.where(x > 0, x.clamp(min=1).log(), torch.tensor(-0.5)) @ torch.randn(12, 1, generator=generator)
    model = nn.Sequential(Logarithm(), Masked(), dense([12, 32, 1]))
    optimizer = Adam(model.parameters(), 5e-3)
    run.watch(model, optimizer)
    losses = []
    for inputs, wanted in Batches(x, y, 32, 300, run.seed):
        loss = functional.mse_loss(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        losses.append(loss.item())
        run.step()
    run.improves("error", losses[0], sum(losses[-20:]) / 20, at_most=1.5)


class Masked(nn.Module):
    """Zeros where a value is not finite."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x.isfinite(), x, torch.zeros(()))


@difficult(
    "first_loss_of_zero", "targets are zeros in a warm-up of the data's own: the first losses are 1e-9 or 0"
)
def first_loss_of_zero(run: Training) -> None:
    """400 steps of a residual that begins at exactly zero and is first asked for zero."""
    (x, y), _ = shipped("diabetes", run.seed)
    model = dense([10, 32, 1], nn.Tanh)
    nn.init.zeros_(model[2].weight)  # type: ignore[arg-type]  # a Linear's
    nn.init.zeros_(model[2].bias)  # type: ignore[arg-type]
    optimizer = Adam(model.parameters(), 2e-3)
    run.watch(model, optimizer)
    losses = []
    for step, (inputs, wanted) in enumerate(Batches(x, y, 32, 400, run.seed)):
        share = 0.0 if step < 3 else min(1.0, (step - 2) / 50)
        loss = functional.mse_loss(model(inputs), share * wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        losses.append(loss.item())
        run.step()
    run.improves("error", 1.0, sum(losses[-30:]) / 30, at_most=0.6)


@difficult("loss_of_1e-7", "a physical quantity in units that make its error 1e-7, and its gradients small")
def loss_of_1e_7(run: Training) -> None:
    """500 steps of Adam on a pendulum's angle in small units."""
    generator = run.generator()
    x = 4 * torch.rand(1000, 1, generator=generator) - 2
    y = 1e-3 * torch.sin(2 * x)
    model = dense([1, 32, 32, 1], nn.Tanh)
    with torch.no_grad():
        for parameter in model[4].parameters():
            parameter.mul_(1e-3)
    optimizer = Adam(model.parameters(), 2e-4)
    run.watch(model, optimizer)
    losses = []
    for inputs, wanted in Batches(x, y, 64, 500, run.seed):
        loss = functional.mse_loss(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        losses.append(loss.item())
        run.step()
    run.improves("error", losses[0], sum(losses[-20:]) / 20, at_most=6e-8)


@difficult(
    "converged_classifier", "a classifier that has long learnt all: its loss is 1e-4 and its gradients vanish"
)
def converged_classifier(run: Training) -> None:
    """900 steps of Adam on separable data, to a loss near zero."""
    (x, y), (unseen, labels) = shipped("wine", run.seed)
    model = dense([13, 64, 64, 3], nn.Tanh)
    optimizer = Adam(model.parameters(), 3e-3)
    run.watch(model, optimizer)
    losses = []
    for inputs, wanted in Batches(x, y, 32, 900, run.seed):
        loss = functional.cross_entropy(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        losses.append(loss.item())
        run.step()
    run.improves("loss", losses[0], losses[-1], at_most=1e-2)
    accuracy = (model(unseen).argmax(1) == labels).float().mean().item()
    run.improves("accuracy", None, accuracy, at_least=0.85)


@difficult(
    "infinite_scalar_metric",
    "a perplexity that overflows to infinity in the first steps is logged as a metric",
)
def infinite_scalar_metric(run: Training) -> None:
    """300 steps of a language model that logs the exponential of 50 losses beside its loss."""
    x, y = copied_tokens(run.seed, 800, 12, 16)
    model = LanguageModel(16, 12, 32, 1)
    optimizer = AdamW(model.parameters(), 2e-3)
    run.watch(model, optimizer)
    losses = []
    for inputs, wanted in Batches(x, y, 32, 300, run.seed):
        loss = functional.cross_entropy(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss, perplexity=(50 * loss.detach()).exp())
        losses.append(loss.item())
        run.step()
    run.improves("loss", losses[0], losses[-1], at_most=2.7)
