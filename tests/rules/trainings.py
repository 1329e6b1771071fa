"""Small trainings that rules are held to: healthy ones that look odd, and faulty ones of published kinds.

Data are made here, from the seed. ``CASES`` has the form that ``python -m benchmarks.detection --cases`` reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own abbreviation
from torch import Tensor, nn

Loss = Callable[[Any, Any], Tensor]
Built = tuple[nn.Module, torch.optim.Optimizer, Loss, Iterator[tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class Training:
    """One training, in the words of the benchmark of detection."""

    build: Callable[[int], Built]
    steps: int
    truth: frozenset[str] = frozenset()
    also: frozenset[str] = frozenset()
    onset: int = 0

    @property
    def kind(self) -> str:
        """Whether something is wrong with it."""
        return "faulty" if self.truth else "healthy"


CASES: dict[str, Training] = {}
STEPS = 200
OFTEN = frozenset({"loss_not_decreasing", "slow_convergence", "oscillating_loss"})
"""What a training that does not learn may be said to be besides."""

Make = Callable[[int], Built]


def training(
    *truth: str, also: tuple[str, ...] = (), steps: int = STEPS, onset: int = 0
) -> Callable[[Make], Make]:
    """Register a training, healthy where it has no truth."""

    def register(make: Make) -> Make:
        def build(seed: int) -> Built:
            torch.manual_seed(seed)
            return make(seed)

        CASES[make.__name__] = Training(build, steps, frozenset(truth), frozenset(also) | OFTEN, onset)
        return make

    return register


@dataclass
class Task:
    """Gaussian inputs, and classes by a random linear map; shape (size, features)."""

    seed: int
    features: int = 20
    classes: int = 5
    size: int = 800
    scale: float = 1.0
    noise: float = 0.3
    made: tuple[Tensor, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        own = torch.Generator().manual_seed(self.seed + 5)
        x = torch.randn(self.size, self.features, generator=own)
        scores = x @ torch.randn(self.features, self.classes, generator=own)
        y = (scores + self.noise * torch.randn(scores.shape, generator=own)).argmax(1)
        self.made = (x * self.scale, y)

    def batches(self, batch: int = 32, steps: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
        return drawn(*self.made, self.seed, batch, steps)


def drawn(
    x: Tensor, y: Tensor, seed: int, batch: int = 32, steps: int = STEPS
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches drawn with replacement."""
    own = torch.Generator().manual_seed(seed + 9)
    for _ in range(steps):
        rows = torch.randint(0, len(x), (batch,), generator=own)
        yield x[rows], y[rows]


def layers(*sizes: int, act: Callable[[], nn.Module] = nn.ReLU, extra: Any = None) -> nn.Sequential:
    """Linear layers with activations between them, and something after each activation."""
    stack: list[nn.Module] = []
    for one, two in pairwise(sizes[:-1]):
        stack += [nn.Linear(one, two), act(), *([extra()] if extra else [])]
    return nn.Sequential(*stack, nn.Linear(sizes[-2], sizes[-1]))


def initialised(model: nn.Module, draw: Callable[[Tensor], Any], bias: float | None = None) -> nn.Module:
    """All linear weights drawn, biases constant."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            draw(module.weight)
            if bias is not None:
                nn.init.constant_(module.bias, bias)
    return model


def paced(optimizer: torch.optim.Optimizer, rate: Callable[[int], float]) -> torch.optim.Optimizer:
    """The optimizer with a learning rate that is multiplied step by step."""
    rates, done = [group["lr"] for group in optimizer.param_groups], count()

    def set_rate(*_: Any) -> None:
        share = rate(next(done))
        for group, whole in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = whole * share

    optimizer.register_step_pre_hook(set_rate)
    return optimizer


def adam(model: nn.Module, rate: float = 1e-3, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate, **more)


def sgd(model: nn.Module, rate: float = 0.1, momentum: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)


# Healthy


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
    x, y = Task(seed, classes=2, noise=0.0).made
    model = nn.Sequential(layers(20, 32, 1), nn.Sigmoid())
    return model, adam(model, 0.03), F.binary_cross_entropy, drawn(x, y.float()[:, None], seed, 16, 300)


@training()
def tanh_output_at_its_bounds(seed: int) -> Built:
    x, y = Task(seed, classes=2, noise=0.0).made
    model = nn.Sequential(layers(20, 32, 1, act=nn.Tanh), nn.Tanh())
    return model, adam(model, 0.03), F.mse_loss, drawn(x, y.float()[:, None] * 2 - 1, seed)


@training()
def batch_norm_everywhere(seed: int) -> Built:
    stack: list[nn.Module] = [nn.BatchNorm1d(20)]
    for one, two in ((20, 64), (64, 64), (64, 64)):
        stack += [nn.Linear(one, two), nn.BatchNorm1d(two), nn.ReLU()]
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
    x, y = Task(seed, classes=2, noise=0.0, size=60).made
    model = layers(20, 64, 64, 1)
    sign = y.float()[:, None] * 2 - 1

    def hinge(output: Tensor, wanted: Tensor) -> Tensor:
        return torch.relu(1 - output * wanted).mean()

    return model, adam(model, 0.01), hinge, drawn(x, sign, seed, 16, 300)


@training()
def narrow_autoencoder(seed: int) -> Built:
    model = layers(20, 16, 3, 16, 20)
    x, _ = Task(seed).made
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
    x, y = Task(seed, classes=4, size=2000).made
    kept = torch.rand(len(y), generator=torch.Generator().manual_seed(seed)) < 1 / (1 + y)
    model = layers(20, 32, 4)
    return model, adam(model), F.cross_entropy, drawn(x[kept], y[kept], seed)


@training(steps=250)
def classes_in_their_order(seed: int) -> Built:
    x, y = Task(seed, classes=4, size=1000).made
    order = y.argsort()
    batches = ((x[rows], y[rows]) for _ in range(8) for rows in order.split(32))
    model = layers(20, 32, 4)
    return model, adam(model, 1e-4), F.cross_entropy, batches


# Faulty


@training("dead_relu", also=("vanishing_gradient", "weight_not_updating", "exploding_gradient"))
def units_that_a_rate_kills(seed: int) -> Built:
    model = layers(20, 32, 32, 5)
    return model, adam(model, 2.0), F.cross_entropy, Task(seed, scale=5.0).batches()


@training("dead_relu", also=("vanishing_gradient", "weight_not_updating", "poor_initialization"))
def units_that_begin_dead(seed: int) -> Built:
    model = layers(20, 32, 32, 5)
    nn.init.constant_(model[2].bias, -20.0)  # type: ignore[arg-type]  # a Linear's
    return model, sgd(model), F.cross_entropy, Task(seed).batches()


@training("dead_relu", also=("vanishing_gradient", "weight_not_updating"))
def output_that_is_rectified(seed: int) -> Built:
    x, y = Task(seed, classes=2).made
    model = nn.Sequential(layers(20, 32, 1), nn.ReLU())
    return model, adam(model, 0.01), F.mse_loss, drawn(x, y.float()[:, None] - 2, seed)


@training("saturated_activation", also=("poor_initialization", "vanishing_gradient"))
def tanh_of_raw_pixels(seed: int) -> Built:
    model = layers(20, 64, 64, 5, act=nn.Tanh)
    return model, sgd(model, 0.01), F.cross_entropy, Task(seed, scale=255.0).batches()


@training("saturated_activation", also=("poor_initialization", "vanishing_gradient"))
def sigmoids_of_large_weights(seed: int) -> Built:
    model = initialised(layers(20, 64, 64, 5, act=nn.Sigmoid), lambda w: nn.init.uniform_(w, 0.0, 4.0), -2.0)
    return model, sgd(model, 0.01), F.cross_entropy, Task(seed, scale=3.0).batches()


@training("saturated_activation", also=("exploding_gradient", "vanishing_gradient", "dead_relu"))
def tanh_that_a_rate_drives_out(seed: int) -> Built:
    model = layers(20, 32, 32, 5, act=nn.Tanh)
    return model, adam(model, 1.0), F.cross_entropy, Task(seed, scale=3.0).batches()


@training("poor_initialization", also=("vanishing_gradient", "weight_not_updating", "dead_relu"))
def all_weights_zero(seed: int) -> Built:
    model = initialised(layers(20, 32, 32, 5), nn.init.zeros_, 0.0)
    return model, sgd(model), F.cross_entropy, Task(seed).batches()


@training("poor_initialization", also=("saturated_activation",))
def all_weights_one_half(seed: int) -> Built:
    model = initialised(layers(20, 32, 32, 5, act=nn.Sigmoid), lambda w: nn.init.constant_(w, 0.5), 0.0)
    return model, sgd(model), F.cross_entropy, Task(seed).batches()


@training("poor_initialization", also=("exploding_gradient", "dead_relu"))
def weights_of_unit_variance(seed: int) -> Built:
    model = initialised(layers(20, 64, 64, 64, 5), lambda w: nn.init.normal_(w, std=1.0), 0.0)
    return model, adam(model), F.cross_entropy, Task(seed).batches()


@training("poor_initialization", also=("vanishing_gradient", "weight_not_updating", "dead_relu"))
def weights_of_no_size(seed: int) -> Built:
    model = initialised(layers(20, 64, 64, 64, 5), lambda w: nn.init.normal_(w, std=1e-3), 0.0)
    return model, sgd(model), F.cross_entropy, Task(seed).batches()


class Stopping(torch.optim.Adam):
    """From some step on it does nothing."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return super().step(closure) if self.calls <= 60 else None


@training("weight_not_updating", onset=60)
def optimizer_that_stops(seed: int) -> Built:
    model = layers(20, 32, 5)
    return model, Stopping(model.parameters(), 3e-3), F.cross_entropy, Task(seed).batches()


@training("weight_not_updating")
def rate_of_zero(seed: int) -> Built:
    model = layers(20, 32, 5)
    return model, sgd(model, 0.0), F.cross_entropy, Task(seed).batches()


class Detached(nn.Module):
    """What its author converted to numpy and back between two layers learns nothing before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers(20, 32, 32), layers(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.as_tensor(self.first(x).detach().numpy()))  # type: ignore[no-any-return]  # as above


@training("weight_not_updating")
def trunk_that_is_detached(seed: int) -> Built:
    model = Detached()
    return model, torch.optim.Adam(model.parameters(), 3e-3), F.cross_entropy, Task(seed).batches()


@training("weight_not_updating")
def norms_alone_learn(seed: int) -> Built:
    model = layers(20, 32, 32, 5, extra=lambda: nn.LayerNorm(32))
    for module in model:
        module.requires_grad_(isinstance(module, nn.LayerNorm))
    return model, adam(model), F.cross_entropy, Task(seed).batches()


@training("weight_not_updating")
def updates_that_half_precision_rounds_away(seed: int) -> Built:
    model = layers(20, 32, 5).bfloat16()
    batches = ((x.bfloat16(), y) for x, y in Task(seed).batches())
    return model, adam(model, 1e-6, weight_decay=0.0), F.cross_entropy, batches


@training("class_imbalance")
def one_class_in_fifty(seed: int) -> Built:
    x, y = Task(seed, classes=2, size=4000).made
    kept = (y == 0) | (torch.rand(len(y), generator=torch.Generator().manual_seed(seed)) < 0.02)
    model = layers(20, 32, 2)
    return model, adam(model), F.cross_entropy, drawn(x[kept], y[kept], seed)


@training("class_imbalance")
def one_positive_in_thirty_as_floats(seed: int) -> Built:
    x, y = Task(seed, classes=2, size=4000).made
    kept = (y == 0) | (torch.rand(len(y), generator=torch.Generator().manual_seed(seed)) < 0.033)
    model = layers(20, 32, 1)
    batches = drawn(x[kept], y[kept].float()[:, None], seed)
    return model, adam(model), F.binary_cross_entropy_with_logits, batches


@training("class_imbalance")
def one_rare_class_of_five(seed: int) -> Built:
    x, y = Task(seed, size=4000).made
    kept = (y != 3) | (torch.rand(len(y), generator=torch.Generator().manual_seed(seed)) < 0.03)
    model = layers(20, 32, 5)
    return model, adam(model), F.cross_entropy, drawn(x[kept], y[kept], seed)


@training("vanishing_gradient", also=("poor_initialization",))
def twelve_sigmoids(seed: int) -> Built:
    model = initialised(layers(20, *[24] * 12, 5, act=nn.Sigmoid), nn.init.xavier_uniform_, 0.0)
    return model, sgd(model, 0.01), F.cross_entropy, Task(seed).batches()


@training("exploding_gradient", also=("nan_or_inf", "poor_initialization", "saturated_activation"))
def linear_regression_with_too_large_a_rate(seed: int) -> Built:
    x, _ = Task(seed).made
    wanted = x @ torch.randn(20, 1, generator=torch.Generator().manual_seed(seed))
    model = layers(20, 1)
    return model, sgd(model, 5.0), F.mse_loss, drawn(x, wanted, seed)
