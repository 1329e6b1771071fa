"""Steps so large that gradients run away."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

from benchmarks.detection.data import Batches, Pair, images, shipped, tokens_with_keyword
from benchmarks.detection.models import convolutional, dense, normal
from benchmarks.detection.programs import Built, Clock, Recorder
from benchmarks.detection.published.pairs import published, published_loop


@published(
    "explosion_summed_loss",
    {"exploding_gradient"},
    "PyTorch's documentation of MSELoss, reduction; rates do not carry over from a mean to a sum",
    "squared errors are summed over a batch of 64, under a rate for their mean",
)
def summed_loss(seed: int, faulty: bool) -> Built:
    """Each step is 64 times as long as it should be."""
    data, unseen = shipped("diabetes", seed)
    model = dense([10, 64, 1])
    kind = "sum" if faulty else "mean"
    return (
        model,
        SGD(model.parameters(), 0.05),
        lambda output, wanted: functional.mse_loss(output, wanted, reduction=kind),
        Batches(*data, 64, 150, seed, unseen),
    )


@published(
    "explosion_parabola_of_thousands",
    {"exploding_gradient"},
    "stats.stackexchange 418955: a deep net with linear activation diverges",
    "two linear layers learn x² up to ten thousand by SGD",
)
def parabola_of_thousands(seed: int, faulty: bool) -> Built:
    """Targets are in the thousands, and so are the first gradients."""
    x = torch.arange(100.0).view(-1, 1)
    y = x**2 + 3
    x = (x - x.mean()) / x.std()
    if not faulty:
        y = (y - y.mean()) / y.std()
    model = dense([1, 8, 1], None)
    return model, SGD(model.parameters(), 0.01), functional.mse_loss, Batches(x, y, 32, 150, seed)


@published(
    "explosion_one_raw_column",
    {"exploding_gradient"},
    "stats.stackexchange 284189: simple linear regression in Keras gives NaN",
    "one raw column of hundreds, batches of one, SGD at 0.01",
)
def one_raw_column(seed: int, faulty: bool) -> Built:
    """Each step overshoots by more than the last."""
    generator = torch.Generator().manual_seed(seed)
    x = 50 + 250 * torch.rand(200, 1, generator=generator)
    y = 0.04 * x + 2 + torch.randn(200, 1, generator=generator)
    if not faulty:
        x, y = (x - x.mean()) / x.std(), (y - y.mean()) / y.std()
    model = nn.Linear(1, 1)
    size = 1 if faulty else 8
    return model, SGD(model.parameters(), 0.01), functional.mse_loss, Batches(x, y, size, 120, seed)


def sums(seed: int, count: int, length: int) -> Pair:
    """Noise (n, length, 1); the class is the sign of its sum."""
    x = torch.randn(count, length, 1, generator=torch.Generator().manual_seed(seed))
    return x, (x.sum((1, 2)) > 0).long()


class LinearRecurrence(nn.Module):
    """A state that is multiplied by a matrix at each step, with nothing that bounds it."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.inward, self.onward, self.head = (
            nn.Linear(1, 16),
            nn.Linear(16, 16, bias=False),
            nn.Linear(16, 2),
        )
        nn.init.orthogonal_(self.onward.weight, gain)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 16)
        for step in range(x.shape[1]):
            state = self.inward(x[:, step]) + self.onward(state)
        return self.head(state)  # type: ignore[no-any-return]  # a module's call is untyped


@published(
    "explosion_linear_recurrence",
    {"exploding_gradient"},
    "Pascanu et al., on the difficulty of training recurrent neural networks (ICML 2013), section 2.1",
    "a recurrence with singular values of 1.25 over thirty steps, SGD without clipping",
)
def linear_recurrence(seed: int, faulty: bool) -> Built:
    """States grow by a factor of eight hundred, and gradients with them."""
    data, unseen = sums(seed, 500, 30), sums(seed + 50, 200, 30)
    model = LinearRecurrence(1.25 if faulty else 0.8)
    optimizer = SGD(model.parameters(), 0.01) if faulty else Adam(model.parameters(), 3e-3)
    return model, optimizer, functional.cross_entropy, Batches(*data, 32, 150, seed, unseen)


@published(
    "explosion_deep_wide_weights",
    {"exploding_gradient", "poor_initialization"},
    "TheDeepChecker (TOSEM 2022), exploding loss by weights of unit variance",
    "six layers with weights from N(0, 1)",
)
def deep_wide_weights(seed: int, faulty: bool) -> Built:
    """A signal grows by five or more at each layer, and its gradient on the way back."""
    data, unseen = shipped("breast_cancer", seed)
    fill = normal(1.0) if faulty else nn.init.kaiming_normal_
    model = dense([30, 48, 48, 48, 48, 48, 2], fill=fill)
    return (
        model,
        SGD(model.parameters(), 0.01),
        functional.cross_entropy,
        Batches(*data, 32, 150, seed, unseen),
    )


@published(
    "explosion_conv_of_bytes",
    {"exploding_gradient"},
    "UMLAUT (CHI 2021), inputs beyond typical limits; Humbatova et al. (ICSE 2020), missing preprocessing",
    "pixels from 0 to 255 into a convolutional regression by SGD with momentum",
)
def conv_of_bytes(seed: int, faulty: bool) -> Built:
    """The share of ink in an image is to be told; the loss grows a thousandfold at each step."""
    (x, _), (unseen, _) = images(seed)
    y, wanted = x.mean((1, 2, 3)).view(-1, 1), unseen.mean((1, 2, 3)).view(-1, 1)
    if faulty:
        x, unseen = (x + 0.3) * 255, (unseen + 0.3) * 255
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ELU(), nn.AvgPool2d(2), nn.Conv2d(8, 8, 3), nn.ELU(),
        nn.Flatten(), nn.Linear(32, 1),
    )  # fmt: skip
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9)
    return model, optimizer, functional.mse_loss, Batches(x, y, 32, 150, seed, (unseen, wanted))


@published(
    "explosion_one_bad_batch",
    {"exploding_gradient"},
    "Humbatova et al. (ICSE 2020), data quality; PaLM (2022), section 5.1: spikes of the loss after some batches",
    "one batch comes without its scaling, and the training does not survive it",
    onset=100,
)
def one_bad_batch(seed: int, faulty: bool) -> Built:
    """Inputs and targets of step 100 are a thousand times as large."""
    (x, y), unseen = shipped("diabetes", seed)

    def unscaled(step: int, inputs: torch.Tensor, targets: torch.Tensor) -> Pair:
        return (1000 * inputs, 1000 * targets) if step == 100 else (inputs, targets)

    model = dense([10, 32, 32, 1], nn.ELU)
    batches = Batches(x, y, 32, 200, seed, unseen, change=unscaled if faulty else None)
    return model, SGD(model.parameters(), 0.02), functional.mse_loss, batches


@published_loop(
    "explosion_rate_that_grows",
    {"exploding_gradient"},
    "PyTorch's documentation of StepLR: gamma is a factor of decay; Humbatova et al. (ICSE 2020), wrong learning rate",
    "gamma is 10 where 0.1 was meant",
    onset=60,
)
def rate_that_grows(recorder: Recorder, seed: int, clock: Clock, faulty: bool) -> None:
    """After sixty steps the rate is ten times too large, and after 120 a hundred times."""
    (x, y), _ = shipped("diabetes", seed)
    model = dense([10, 32, 1])
    optimizer = SGD(model.parameters(), 0.05)
    schedule = StepLR(optimizer, 60, 10.0 if faulty else 0.1)
    recorder.watch(model, optimizer)
    for inputs, targets in Batches(x, y, 32, 240, seed):
        optimizer.zero_grad()
        loss = functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        schedule.step()
        recorder.log(loss=loss)
        recorder.record(labels=targets)
        clock.step()


class Residual(nn.Module):
    """Embedded tokens through residual layers, with normalisation or without; (n, length) → two classes."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(60, 24)
        self.branches = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(24) if norm else nn.Identity(), nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 24)
            )
            for _ in range(6)
        )
        self.head = nn.Linear(24, 2)

    def forward(self, x: Tensor) -> Tensor:
        held = self.embedding(x).sum(1)
        for branch in self.branches:
            held = held + branch(held)
        return self.head(held)  # type: ignore[no-any-return]  # a module's call is untyped


@published(
    "explosion_residual_without_norms",
    {"exploding_gradient"},
    "Zhang et al., Fixup initialization (ICLR 2019): residual networks without normalisation need small steps",
    "sums of embeddings into residual layers without normalisation, SGD at 0.5",
)
def residual_without_norms(seed: int, faulty: bool) -> Built:
    """Nothing bounds the residual stream."""
    data, unseen = tokens_with_keyword(seed, 600, 20, 60), tokens_with_keyword(seed + 50, 200, 20, 60)
    model = Residual(norm=not faulty)
    optimizer = SGD(model.parameters(), 0.5) if faulty else Adam(model.parameters(), 1e-3)
    return model, optimizer, functional.cross_entropy, Batches(*data, 32, 150, seed, unseen)


@published(
    "explosion_conv_rate_of_ten",
    {"exploding_gradient"},
    "AUTOTRAINER (ICSE 2021), exploding gradient; Bengio, practical recommendations (2012), on the rate",
    "SGD with a rate of 10 and momentum on a convolutional network without normalisation",
)
def conv_rate_of_ten(seed: int, faulty: bool) -> Built:
    """Within ten steps weights are beyond what float32 holds."""
    data, unseen = images(seed)
    model = convolutional(nn.ELU)
    optimizer = SGD(model.parameters(), 10.0 if faulty else 0.05, momentum=0.9 if faulty else 0.0)
    return model, optimizer, functional.cross_entropy, Batches(*data, 32, 150, seed, unseen)


@published(
    "explosion_that_settles",
    {"exploding_gradient"},
    "UMLAUT (CHI 2021), inputs beyond typical limits; CS231n notes, ReLU units die at high rates",
    "pixels from 0 to 255 into a dense network with momentum, at a rate for scaled ones",
)
def that_settles(seed: int, faulty: bool) -> Built:
    """The first steps throw the weights far away; units die, and the loss stays at what a constant gives."""
    (x, y), (unseen, labels) = shipped("digits", seed)
    if faulty:
        x, unseen = (x + 0.3) * 255, (unseen + 0.3) * 255
    model = dense([64, 48, 48, 10])
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9)
    return model, optimizer, functional.cross_entropy, Batches(x, y, 32, 200, seed, (unseen, labels))
