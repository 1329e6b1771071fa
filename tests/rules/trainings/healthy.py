"""Healthy trainings with unusual curves. No rule may fire."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own abbreviation
from torch import Tensor, nn

from tests.rules.trainings.parts import (
    STEPS,
    Built,
    Task,
    adam,
    drawn,
    initialised,
    layers,
    paced,
    sgd,
    training,
)


@training()
def dropout_heavy(seed: int) -> Built:
    model = layers(20, 128, 128, 5, extra=lambda: nn.Dropout(0.6))
    return model, adam(model), F.cross_entropy, Task(seed).batches()


class Attention(nn.Module):
    """A block of a transformer over tokens, and a head over each position."""

    def __init__(self, act: str, *, first: bool) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(40, 32), nn.Parameter(torch.zeros(12, 32))
        self.blocks = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(
                32, 4, 64, dropout=0.1, activation=act, batch_first=True, norm_first=first
            ),
            2,
            enable_nested_tensor=False,
        )
        self.head = nn.Linear(32, 40)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.tokens(x) + self.places)).transpose(1, 2)
        return out


def sentences(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens with a few frequent and many rare ones; the next token follows from the last."""
    own = torch.Generator().manual_seed(seed)
    share = 1 / torch.arange(1, 41).float() ** 1.5
    start = torch.multinomial(share, 400 * 13, replacement=True, generator=own).view(400, 13)
    start[:, 1::2] = (start[:, 0:-1:2] * 7 + 3) % 40
    return drawn(start[:, :-1], start[:, 1:], seed)


@training()
def gelu_transformer_with_norm_first(seed: int) -> Built:
    model = Attention("gelu", first=True)
    return model, adam(model, 3e-3), F.cross_entropy, sentences(seed)


@training()
def relu_transformer_with_norm_last(seed: int) -> Built:
    model = Attention("relu", first=False)
    return model, adam(model, 1e-3), F.cross_entropy, sentences(seed)


class Residual(nn.Module):
    """Convolutions whose last scale in each branch begins at zero (Goyal et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.branches = nn.ModuleList(self._branch() for _ in range(3))
        self.act, self.head = nn.ReLU(), nn.Linear(8, 5)

    def _branch(self) -> nn.Sequential:
        last = nn.BatchNorm2d(8)
        nn.init.zeros_(last.weight)
        return nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1, bias=False),
            last,
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.view(-1, 1, 5, 4))
        for branch in self.branches:
            x = self.act(x + branch(x))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]  # modules return Any


@training()
def residual_with_zero_gamma(seed: int) -> Built:
    model = Residual()
    return model, sgd(model, 0.05, 0.9), F.cross_entropy, Task(seed).batches()


class Fixup(nn.Module):
    """Residual branches and a head that begin at zero, without normalisation (Zhang et al., 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(20, 32), nn.Linear(32, 5)
        self.branches = nn.ModuleList(layers(32, 32, 32) for _ in range(3))
        for branch in self.branches:
            nn.init.zeros_(branch[-1].weight)  # type: ignore[index]  # a Sequential
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for branch in self.branches:
            x = x + branch(x)
        return self.head(torch.relu(x))  # type: ignore[no-any-return]  # modules return Any


@training()
def zero_head_and_branches(seed: int) -> Built:
    model = Fixup()
    return model, adam(model, 3e-3), F.cross_entropy, Task(seed).batches()


class Adapted(nn.Module):
    """A linear layer that does not learn, and beside it one of low rank whose second factor begins at zero."""

    def __init__(self, whole: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.whole = whole.requires_grad_(requires_grad=False)
        self.down = nn.Linear(whole.in_features, rank, bias=False)
        self.up = nn.Linear(rank, whole.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(x) + self.up(self.down(x))  # type: ignore[no-any-return]  # modules return Any


@training()
def low_rank_adapters(seed: int) -> Built:
    model = layers(20, 64, 64, 5)
    for place in (0, 2):
        model[place] = Adapted(model[place])  # type: ignore[arg-type]  # a Linear
    model[4].requires_grad_(requires_grad=False)
    return model, adam(model, 3e-3), F.cross_entropy, Task(seed).batches()


@training()
def frozen_backbone_in_the_optimizer(seed: int) -> Built:
    model = layers(20, 64, 64, 5)
    model[:3].requires_grad_(requires_grad=False)
    return model, torch.optim.Adam(model.parameters(), 3e-3), F.cross_entropy, Task(seed).batches()


@training()
def head_alone_in_the_optimizer(seed: int) -> Built:
    model = layers(20, 64, 64, 5)
    return model, torch.optim.Adam(model[-1].parameters(), 3e-3), F.cross_entropy, Task(seed).batches()


@training()
def embedding_that_batches_hardly_touch(seed: int) -> Built:
    own = torch.Generator().manual_seed(seed)
    words = torch.randint(0, 3000, (500, 8), generator=own)
    model = nn.Sequential(nn.Embedding(3000, 16), nn.Flatten(), nn.Linear(128, 2))
    return model, sgd(model, 0.5), F.cross_entropy, drawn(words, (words[:, 0] % 2), seed, 8)


class Recurrent(nn.Module):
    """A recurrent layer and a head over its last state."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.inner, self.head = kind(4, 24, batch_first=True), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x.view(-1, 5, 4))[0][:, -1])  # type: ignore[no-any-return]  # modules return Any


@training()
def tanh_rnn(seed: int) -> Built:
    model = Recurrent(nn.RNN)
    return model, adam(model, 5e-3), F.cross_entropy, Task(seed).batches()


@training()
def lstm(seed: int) -> Built:
    model = Recurrent(nn.LSTM)
    return model, sgd(model, 0.3, 0.9), F.cross_entropy, Task(seed).batches()


@training()
def sigmoid_output_at_convergence(seed: int) -> Built:
    x, y = Task(seed, classes=2, noise=0.0).data
    model = nn.Sequential(layers(20, 32, 1), nn.Sigmoid())
    return model, adam(model, 0.03), F.binary_cross_entropy, drawn(x, y.float()[:, None], seed, 16, 300)


@training()
def tanh_output_at_its_bounds(seed: int) -> Built:
    x, y = Task(seed, classes=2, noise=0.0).data
    model = nn.Sequential(layers(20, 32, 1, act=nn.Tanh), nn.Tanh())
    return model, adam(model, 0.03), F.mse_loss, drawn(x, y.float()[:, None] * 2 - 1, seed)


@training()
def batch_norm_everywhere(seed: int) -> Built:
    stack: list[nn.Module] = [nn.BatchNorm1d(20)]
    for inputs, outputs in ((20, 64), (64, 64), (64, 64)):
        stack += [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU()]
    model = nn.Sequential(*stack, nn.Linear(64, 5))
    return model, sgd(model, 0.1, 0.9), F.cross_entropy, Task(seed, scale=40.0).batches()


@training()
def fine_tuning_with_a_tiny_rate(seed: int) -> Built:
    model, task = layers(20, 64, 5), Task(seed)
    before = adam(model, 1e-2)
    for x, y in task.batches(64, 150):
        before.zero_grad()
        F.cross_entropy(model(x), y).backward()
        before.step()
    return model, adam(model, 1e-6, weight_decay=0.0), F.cross_entropy, task.batches()


@training()
def adam_with_warm_up(seed: int) -> Built:
    model = layers(20, 64, 64, 5, act=nn.GELU)
    return model, paced(adam(model), lambda step: min(1, step / 60)), F.cross_entropy, Task(seed).batches()


@training()
def rate_that_ends_at_zero(seed: int) -> Built:
    model = layers(20, 64, 5)
    return (
        model,
        paced(sgd(model), lambda step: max(0.0, 1 - step / (STEPS - 1))),
        F.cross_entropy,
        Task(seed).batches(),
    )


@training()
def wide_and_sparse(seed: int) -> Built:
    model = layers(2, 512, 256, 3)
    return model, adam(model, 3e-3), F.cross_entropy, Task(seed, features=2, classes=3).batches(4)


@training()
def one_example_a_step(seed: int) -> Built:
    model = layers(20, 64, 64, 5)
    return model, sgd(model, 0.01), F.cross_entropy, Task(seed).batches(1)


@training()
def learnt_to_the_end_by_hinge(seed: int) -> Built:
    x, y = Task(seed, classes=2, noise=0.0, size=60).data
    model = layers(20, 64, 64, 1)
    sign = y.float()[:, None] * 2 - 1

    def hinge(output: Tensor, wanted: Tensor) -> Tensor:
        return torch.relu(1 - output * wanted).mean()

    return model, adam(model, 0.01), hinge, drawn(x, sign, seed, 16, 300)


@training()
def narrow_autoencoder(seed: int) -> Built:
    model = layers(20, 16, 3, 16, 20)
    x, _ = Task(seed).data
    return model, adam(model, 1e-2), F.mse_loss, drawn(x, x, seed)


@training()
def deep_tanh(seed: int) -> Built:
    model = initialised(layers(20, *[48] * 6, 5, act=nn.Tanh), nn.init.xavier_uniform_, 0.0)
    return model, adam(model), F.cross_entropy, Task(seed).batches()


@training()
def small_normal_weights(seed: int) -> Built:
    model = initialised(layers(20, 64, 64, 5), lambda w: nn.init.normal_(w, std=0.05), 0.0)
    return model, adam(model, 3e-3), F.cross_entropy, Task(seed).batches()


@training()
def some_classes_are_rarer(seed: int) -> Built:
    x, y = Task(seed, classes=4, size=2000).data
    chosen = torch.rand(len(y), generator=torch.Generator().manual_seed(seed)) < 1 / (1 + y)
    model = layers(20, 32, 4)
    return model, adam(model), F.cross_entropy, drawn(x[chosen], y[chosen], seed)


@training(steps=250)
def classes_in_their_order(seed: int) -> Built:
    x, y = Task(seed, classes=4, size=1000).data
    order = y.argsort()
    batches = ((x[rows], y[rows]) for _ in range(8) for rows in order.split(32))
    model = layers(20, 32, 4)
    return model, adam(model, 1e-4), F.cross_entropy, batches
