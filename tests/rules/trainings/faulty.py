"""Faulty trainings of published kinds, each with its expected symptom."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own abbreviation
from torch import Tensor, nn

from tests.rules.trainings.parts import (
    Built,
    Task,
    adam,
    drawn,
    initialised,
    layers,
    sgd,
    training,
)


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
    x, y = Task(seed, classes=2).data
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
    x, y = Task(seed, classes=2, size=4000).data
    chosen = (y == 0) | (torch.rand(len(y), generator=torch.Generator().manual_seed(seed)) < 0.02)
    model = layers(20, 32, 2)
    return model, adam(model), F.cross_entropy, drawn(x[chosen], y[chosen], seed)


@training("class_imbalance")
def one_positive_in_thirty_as_floats(seed: int) -> Built:
    x, y = Task(seed, classes=2, size=4000).data
    chosen = (y == 0) | (torch.rand(len(y), generator=torch.Generator().manual_seed(seed)) < 0.033)
    model = layers(20, 32, 1)
    batches = drawn(x[chosen], y[chosen].float()[:, None], seed)
    return model, adam(model), F.binary_cross_entropy_with_logits, batches


@training("class_imbalance")
def one_rare_class_of_five(seed: int) -> Built:
    x, y = Task(seed, size=4000).data
    chosen = (y != 3) | (torch.rand(len(y), generator=torch.Generator().manual_seed(seed)) < 0.02)
    model = layers(20, 32, 5)
    return model, adam(model), F.cross_entropy, drawn(x[chosen], y[chosen], seed)


@training("vanishing_gradient", also=("poor_initialization",))
def twelve_sigmoids(seed: int) -> Built:
    model = initialised(layers(20, *[24] * 12, 5, act=nn.Sigmoid), nn.init.xavier_uniform_, 0.0)
    return model, sgd(model, 0.01), F.cross_entropy, Task(seed).batches()


@training("exploding_gradient", also=("nan_or_inf", "poor_initialization", "saturated_activation"))
def linear_regression_with_too_large_a_rate(seed: int) -> Built:
    x, _ = Task(seed).data
    wanted = x @ torch.randn(20, 1, generator=torch.Generator().manual_seed(seed))
    model = layers(20, 1)
    return model, sgd(model, 5.0), F.mse_loss, drawn(x, wanted, seed)
