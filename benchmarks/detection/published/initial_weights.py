"""Weights that a training should not begin with."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam

from benchmarks.detection.data import Batches, copied_tokens, images, shipped, waves
from benchmarks.detection.models import LanguageModel, LastOfRecurrent, convolutional, dense, normal
from benchmarks.detection.programs import Built
from benchmarks.detection.published.pairs import published


def fill_all(model: nn.Module, fill: object) -> None:
    """Weights by ``fill``, vectors zero."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            fill(parameter.data)  # type: ignore[operator]  # any initialiser of torch.nn.init
        else:
            nn.init.zeros_(parameter)


@published(
    "weights_random_normal_softmax",
    {"poor_initialization"},
    "stats.stackexchange 316898: random_normal, with its default deviation of 1, in TensorFlow's MNIST tutorial",
    "the output layer's 200 inputs are weighted by N(0, 1)",
)
def random_normal_softmax(seed: int, faulty: bool) -> Built:
    """Logits begin with a deviation of about ten: wrong, and sure of it."""
    data, unseen = shipped("digits", seed)
    model = dense([64, 200, 10], nn.Sigmoid)
    if faulty:
        nn.init.normal_(model[2].weight)  # type: ignore[arg-type]  # a Linear's
    return (
        model,
        SGD(model.parameters(), 0.1),
        functional.cross_entropy,
        Batches(*data, 32, 250, seed, unseen),
    )


@published(
    "weights_random_normal_everywhere",
    {"poor_initialization"},
    "stackoverflow 43489697, TensorFlow weight initialization; He et al. (ICCV 2015)",
    "ReLU layers of 64 with weights from N(0, 1)",
)
def random_normal_everywhere(seed: int, faulty: bool) -> Built:
    """The first loss is in the hundreds."""
    data, unseen = shipped("digits", seed)
    model = dense([64, 64, 64, 10], fill=normal(1.0) if faulty else nn.init.kaiming_normal_)
    return (
        model,
        Adam(model.parameters(), 1e-3),
        functional.cross_entropy,
        Batches(*data, 32, 250, seed, unseen),
    )


@published(
    "weights_tiny_before_tanh",
    {"poor_initialization"},
    "Glorot and Bengio (AISTATS 2010); CS231n notes, small random numbers: activations shrink to zero",
    "five tanh layers with weights from N(0, 0.01²)",
)
def tiny_before_tanh(seed: int, faulty: bool) -> Built:
    """Each layer's outputs are a tenth of those before."""
    data, unseen = shipped("digits", seed)
    fill = normal(0.01) if faulty else nn.init.xavier_uniform_
    model = dense([64, 64, 64, 64, 64, 10], nn.Tanh, fill=fill)
    return (
        model,
        SGD(model.parameters(), 0.1),
        functional.cross_entropy,
        Batches(*data, 32, 250, seed, unseen),
    )


@published(
    "weights_tiny_convolutions",
    {"poor_initialization"},
    "Mishkin and Matas, All you need is a good init (ICLR 2016); VGG (2014), deep nets stall from N(0, 0.01²)",
    "five convolutions with weights from N(0, 0.01²)",
)
def tiny_convolutions(seed: int, faulty: bool) -> Built:
    """What reaches the last layer is the same for all images."""
    data, unseen = images(seed)
    layers: list[nn.Module] = []
    before = 1
    for _ in range(5):
        layers += [nn.Conv2d(before, 12, 3, padding=1), nn.ReLU()]
        before = 12
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(12 * 64, 10))
    fill_all(model, normal(0.01) if faulty else nn.init.kaiming_normal_)
    return (
        model,
        Adam(model.parameters(), 2e-3),
        functional.cross_entropy,
        Batches(*data, 32, 250, seed, unseen),
    )


@published(
    "weights_constant_convolutions",
    {"poor_initialization"},
    "Goodfellow et al., Deep Learning (2016), 8.4: units must begin different; TheDeepChecker (TOSEM 2022)",
    "all filters are 0.05, and so is the last layer",
)
def constant_convolutions(seed: int, faulty: bool) -> Built:
    """All filters of a layer stay one filter."""
    data, unseen = images(seed)
    model = convolutional(nn.Tanh)
    if faulty:
        fill_all(model, lambda weight: nn.init.constant_(weight, 0.05))
    return (
        model,
        SGD(model.parameters(), 0.05),
        functional.cross_entropy,
        Batches(*data, 32, 250, seed, unseen),
    )


@published(
    "weights_zero_recurrent",
    {"poor_initialization"},
    "Goodfellow et al., Deep Learning (2016), 8.4; NeuraLint (TOSEM 2021), rule on initial weights",
    "all weights of an LSTM and its head are zero",
)
def zero_recurrent(seed: int, faulty: bool) -> Built:
    """Nothing tells one unit from another."""
    data, unseen = waves(seed, 500, 20), waves(seed + 50, 200, 20)
    model = LastOfRecurrent(nn.LSTM(1, 24, batch_first=True), 24, 2)
    if faulty:
        fill_all(model, nn.init.zeros_)
    return (
        model,
        Adam(model.parameters(), 5e-3),
        functional.cross_entropy,
        Batches(*data, 32, 250, seed, unseen),
    )


class Tied(LanguageModel):
    """The embedding is the last layer's weight."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__(vocabulary, length, width)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@published(
    "weights_tied_to_an_embedding",
    {"poor_initialization"},
    "Press and Wolf (EACL 2017) tie them; PyTorch's nn.Embedding begins with N(0, 1), GPT-2 with a deviation of 0.02",
    "the last layer shares the weight of an embedding with its default initialisation",
)
def tied_to_an_embedding(seed: int, faulty: bool) -> Built:
    """Logits have a deviation of the square root of the width: eight."""
    data, unseen = copied_tokens(seed, 800, 12, 40), copied_tokens(seed + 50, 100, 12, 40)
    model = Tied(40, 12, 64)
    if not faulty:
        nn.init.normal_(model.embedding.weight, 0.0, 0.02)
    return (
        model,
        Adam(model.parameters(), 1e-3),
        functional.cross_entropy,
        Batches(*data, 32, 150, seed, unseen),
    )


@published(
    "weights_uniform_autoencoder",
    {"poor_initialization"},
    "Humbatova et al. (ICSE 2020), wrong weights initialisation; UMLAUT (CHI 2021)",
    "an autoencoder's weights are uniform between -1 and 1, whatever the width",
)
def uniform_autoencoder(seed: int, faulty: bool) -> Built:
    """Reconstructions begin thousands of times as large as the images."""
    (x, _), (unseen, _) = shipped("digits", seed)
    model = dense([64, 128, 128, 16, 128, 128, 64], nn.ReLU)
    if faulty:
        fill_all(model, lambda weight: nn.init.uniform_(weight, -1.0, 1.0))
    batches = Batches(x, x, 32, 250, seed, (unseen, unseen))
    return model, Adam(model.parameters(), 1e-3), functional.mse_loss, batches


@published(
    "weights_head_scaled_up",
    {"poor_initialization"},
    "Karpathy, A Recipe for Training Neural Networks (2019): verify the loss at initialisation",
    "the last convolutional classifier's layer is initialised a hundred times too large",
)
def head_scaled_up(seed: int, faulty: bool) -> Built:
    """The first loss is ten times that of a guess, and the first steps only take the head back."""
    data, unseen = images(seed)
    model = convolutional(norm=True)
    if faulty:
        with torch.no_grad():
            model[-1].weight.mul_(100)  # type: ignore[operator]  # a Linear's
    return (
        model,
        Adam(model.parameters(), 1e-3),
        functional.cross_entropy,
        Batches(*data, 32, 250, seed, unseen),
    )
