"""Faults in convolutional networks, on digits of eight by eight."""

from __future__ import annotations

from torch import nn
from torch.nn import functional
from torch.optim import SGD, Adam

from benchmarks.detection.data import Batches, images
from benchmarks.detection.models import convolutional
from benchmarks.detection.programs import Built
from benchmarks.detection.published.pairs import published


@published(
    "conv_many_sigmoids",
    {"vanishing_gradient", "loss_not_decreasing"},
    "AUTOTRAINER (ICSE 2021), vanishing gradient on MNIST",
    "eight convolutions with sigmoid between them",
)
def many_sigmoids(seed: int, faulty: bool) -> Built:
    """Each sigmoid takes three quarters of the gradient at least."""
    data, unseen = images(seed)
    layers: list[nn.Module] = []
    before = 1
    for _ in range(8):
        layers.append(nn.Conv2d(before, 8, 3, padding=1))
        layers += [nn.Sigmoid()] if faulty else [nn.BatchNorm2d(8), nn.ReLU()]
        before = 8
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))
    return (
        model,
        SGD(model.parameters(), 0.02),
        functional.cross_entropy,
        Batches(*data, 32, 200, seed, unseen),
    )


@published(
    "conv_rate_kills_units",
    {"dead_relu"},
    "AUTOTRAINER (ICSE 2021), dying ReLU on MNIST; CS231n notes: high rates kill ReLU units",
    "Adam with a rate of 0.3",
)
def rate_kills_units(seed: int, faulty: bool) -> Built:
    """After some steps most channels are zero for all images."""
    data, unseen = images(seed)
    model = convolutional()
    optimizer = Adam(model.parameters(), 0.3 if faulty else 2e-3)
    return model, optimizer, functional.cross_entropy, Batches(*data, 32, 250, seed, unseen)


@published(
    "conv_momentum_swings",
    {"oscillating_loss"},
    "AUTOTRAINER (ICSE 2021), oscillating loss on MNIST",
    "SGD with a rate of 0.8 and momentum",
)
def momentum_swings(seed: int, faulty: bool) -> Built:
    """The loss goes up and down by more than it falls; tanh keeps it finite."""
    data, unseen = images(seed)
    model = convolutional(nn.Tanh)
    optimizer = SGD(model.parameters(), 0.8 if faulty else 0.03, momentum=0.9)
    return model, optimizer, functional.cross_entropy, Batches(*data, 32, 250, seed, unseen)


@published(
    "conv_slow_rate",
    {"slow_convergence"},
    "AUTOTRAINER (ICSE 2021), slow convergence on MNIST",
    "Adam with a rate of 1e-5",
)
def slow_rate(seed: int, faulty: bool) -> Built:
    """The loss falls by less than a tenth within 300 steps."""
    data, unseen = images(seed)
    model = convolutional()
    optimizer = Adam(model.parameters(), 1e-5 if faulty else 2e-3)
    return model, optimizer, functional.cross_entropy, Batches(*data, 32, 300, seed, unseen)


@published(
    "conv_deep_default_explodes",
    {"exploding_gradient"},
    "DeepDiagnosis (ICSE 2022), exploding gradient; He et al. (ICCV 2015)",
    "six convolutions with weights from N(0, 0.5²) and no normalisation",
)
def deep_default_explodes(seed: int, faulty: bool) -> Built:
    """Gradients begin a million times too large."""
    data, unseen = images(seed)
    layers: list[nn.Module] = []
    before = 1
    for _ in range(6):
        convolution = nn.Conv2d(before, 16, 3, padding=1)
        if faulty:
            nn.init.normal_(convolution.weight, 0.0, 0.5)
        layers += [convolution, *([] if faulty else [nn.BatchNorm2d(16)]), nn.ReLU()]
        before = 16
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10))
    return (
        model,
        SGD(model.parameters(), 0.02),
        functional.cross_entropy,
        Batches(*data, 32, 150, seed, unseen),
    )


@published(
    "conv_gradients_masked",
    {"weight_not_updating"},
    "TrainCheck (OSDI 2025), kind: weights that silently never change",
    "a hook that masks gradients is on every convolution",
)
def gradients_masked(seed: int, faulty: bool) -> Built:
    """Convolutions keep their first weights; batch normalisation and the last layer learn around them."""
    data, unseen = images(seed)
    model = convolutional(norm=True)
    for name, parameter in model.named_parameters():
        if faulty and parameter.dim() == 4 and name.endswith("weight"):
            parameter.register_hook(lambda gradient: gradient * 0)
    return (
        model,
        SGD(model.parameters(), 0.05),
        functional.cross_entropy,
        Batches(*data, 32, 250, seed, unseen),
    )
