"""Faults in recurrent networks, on made sequences."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam

from benchmarks.detection.data import Batches, Pair, tokens_with_keyword, waves
from benchmarks.detection.models import LastOfRecurrent
from benchmarks.detection.programs import Built
from benchmarks.detection.published.pairs import published


def rescale(cell: nn.RNNBase, deviation: float) -> None:
    """Recurrent weights from N(0, deviation²)."""
    nn.init.normal_(cell.get_parameter("weight_hh_l0"), 0.0, deviation)


class FirstContext(nn.Module):
    """The first input, encoded, is what a plain recurrent network starts from; its last state is classified."""

    def __init__(self, hidden: int, recurrent_scale: float | None) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(4, hidden), nn.Linear(hidden, 2)
        self.cell = nn.RNN(1, hidden, batch_first=True)
        if recurrent_scale is not None:
            rescale(self.cell, recurrent_scale)

    def forward(self, x: Tensor) -> Tensor:
        start = torch.tanh(self.encoder(x[:, :4])).unsqueeze(0)
        outputs, _ = self.cell(x[:, 4:].unsqueeze(-1), start)
        return self.head(outputs[:, -1])  # type: ignore[no-any-return]  # a module's call is untyped


def context_then_noise(seed: int, count: int, length: int) -> Pair:
    """Four numbers whose sum's sign is the class, and then noise."""
    x = torch.randn(count, 4 + length, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, :4].sum(1) > 0).long()


@published(
    "recurrent_forgets_start",
    {"vanishing_gradient", "loss_not_decreasing"},
    "Bengio et al., learning long-term dependencies is difficult (1994); Pascanu et al. (ICML 2013)",
    "a plain recurrent network, and eighty steps of noise between cause and answer",
)
def forgets_start(seed: int, faulty: bool) -> Built:
    """What is known at the first step gets no gradient from the last."""
    data = context_then_noise(seed, 600, 80 if faulty else 3)
    unseen = context_then_noise(seed + 50, 300, 80 if faulty else 3)
    model = FirstContext(24, 0.1 if faulty else None)
    return (
        model,
        Adam(model.parameters(), 3e-3),
        functional.cross_entropy,
        Batches(*data, 32, 200, seed, unseen),
    )


@published(
    "recurrent_relu_explodes",
    {"exploding_gradient"},
    "Pascanu et al., on the difficulty of training recurrent neural networks (ICML 2013)",
    "recurrent ReLU weights with a spectral radius of about 1.6, without clipping",
)
def relu_explodes(seed: int, faulty: bool) -> Built:
    """States and gradients grow over forty steps."""
    data, unseen = waves(seed, 500, 40), waves(seed + 50, 200, 40)
    cell = nn.RNN(1, 24, batch_first=True, nonlinearity="relu") if faulty else nn.GRU(1, 24, batch_first=True)
    if faulty:
        rescale(cell, 0.45)
    model = LastOfRecurrent(cell, 24, 2)
    optimizer = SGD(model.parameters(), 0.01) if faulty else Adam(model.parameters(), 5e-3)
    return model, optimizer, functional.cross_entropy, Batches(*data, 32, 150, seed, unseen)


class Viewed(nn.Module):
    """A recurrent network over (length, n, 1), given (n, length, 1)."""

    def __init__(self, *, viewed: bool) -> None:
        super().__init__()
        self.cell, self.head, self.viewed = nn.GRU(1, 24), nn.Linear(24, 2), viewed

    def forward(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        turned = x.reshape(length, count, width) if self.viewed else x.permute(1, 0, 2)
        outputs, _ = self.cell(turned)
        return self.head(outputs[-1])  # type: ignore[no-any-return]  # a module's call is untyped


@published(
    "recurrent_viewed_not_permuted",
    {"loss_not_decreasing"},
    "Karpathy, common neural net mistakes (2018): view() and permute() taken for the same",
    "axes are exchanged by view(), which mixes examples",
)
def viewed_not_permuted(seed: int, faulty: bool) -> Built:
    """Each sequence the network sees is made of pieces of many."""
    data = waves(seed, 2000, 25)
    unseen = waves(seed + 50, 200, 25)
    model = Viewed(viewed=faulty)
    return (
        model,
        Adam(model.parameters(), 1e-2),
        functional.cross_entropy,
        Batches(*data, 32, 300, seed, unseen),
    )


class TokenReader(nn.Module):
    """Embedding, LSTM, and a linear layer on its last output."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.reader = LastOfRecurrent(nn.LSTM(width, width, batch_first=True), width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.reader(self.embedding(x))  # type: ignore[no-any-return]  # a module's call is untyped


@published(
    "recurrent_slow_rate",
    {"slow_convergence"},
    "AUTOTRAINER (ICSE 2021), slow convergence on IMDB",
    "Adam with a rate of 1e-5",
)
def slow_rate(seed: int, faulty: bool) -> Built:
    """The loss hardly leaves that of a guess, though every step goes down."""
    data, unseen = tokens_with_keyword(seed, 4000, 16, 40), tokens_with_keyword(seed + 50, 300, 16, 40)
    model = TokenReader(40, 24)
    optimizer = Adam(model.parameters(), 2e-5 if faulty else 5e-3)
    return model, optimizer, functional.cross_entropy, Batches(*data, 32, 300, seed, unseen)


@published(
    "recurrent_memorises_reviews",
    {"overfit"},
    "UMLAUT (CHI 2021), overfitting; Humbatova et al. (ICSE 2020), not enough training data",
    "an LSTM on eighty sequences over a vocabulary of 2,000",
)
def memorises_reviews(seed: int, faulty: bool) -> Built:
    """Tokens of the training set are learnt by heart; those of the validation set were never seen."""
    words, count = (2000, 80) if faulty else (40, 8000)
    data, unseen = tokens_with_keyword(seed, count, 10, words), tokens_with_keyword(seed + 50, 300, 10, words)
    model = TokenReader(words, 32)
    return (
        model,
        Adam(model.parameters(), 5e-3),
        functional.cross_entropy,
        Batches(*data, 40, 250, seed, unseen),
    )
