"""Trainings with one planted numerical fault each. The line that it is on ends with ``# planted``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Planted:
    """A training step with a fault.

    Attributes:
        model: the model.
        step: runs one step, optimizer included.
        operation: name of the operation that is at fault.
        module: path of the module that it runs in.
        source: what has the line that ends with ``# planted``: a function or a class.
        phase: when it runs.
        tensor: name of the tensor that is bad before the step; empty if the operation makes the bad values.
    """

    model: nn.Module
    step: Callable[[], None]
    operation: str
    module: str
    source: Any
    phase: str = "forward"
    tensor: str = ""

    @property
    def line(self) -> int:
        """Number of the planted line."""
        lines, first = inspect.getsourcelines(self.source)
        (offset,) = [place for place, line in enumerate(lines) if line.rstrip().endswith("# planted")]
        return first + offset


def updating(model: nn.Module, loss: Callable[[], Any], lr: float = 0.1) -> Callable[[], None]:
    """A step that computes a loss, its gradients and an update."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


class Block(nn.Module):
    def __init__(self, width: int, scale: float = 1.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = scale

    def forward(self, x: Tensor) -> Any:
        hidden = functional.relu(self.up(x))
        return x + self.down(hidden * self.scale)


def log_of_zero() -> Planted:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Any:
            probabilities = torch.softmax(1000 * self.linear(x), dim=-1)
            return probabilities.log()  # planted

    model = nn.Sequential(nn.Linear(4, 4), Head())
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    return Planted(
        model, updating(model, lambda: functional.nll_loss(model(x), y)), "aten.log.default", "1", Head
    )


def sqrt_at_zero_in_backward() -> Planted:
    model = nn.Linear(4, 4)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)

    def loss() -> Any:
        squares = model(torch.ones(2, 4)).pow(2)
        return squares.sqrt().sum()  # planted

    return Planted(model, updating(model, loss), "aten.div.Tensor", "", loss, phase="backward")


def half_precision_overflow() -> Planted:
    class Wide(Block):
        def forward(self, x: Tensor) -> Any:
            hidden = functional.relu(self.up(x))
            return x + self.down(hidden * hidden).float()  # planted

    wide = Wide(8)
    model = nn.Sequential(Block(8), wide)
    with torch.no_grad():
        wide.up.bias.fill_(300.0)

    def loss() -> Any:
        with torch.autocast("cpu", torch.float16):
            return model(torch.ones(2, 8)).float().pow(2).mean()

    return Planted(model, updating(model, loss), "aten.mul.Tensor", "1", Wide)


def masked_softmax_of_a_full_row() -> Planted:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, mask: Tensor) -> Any:
            scores = self.query(x) @ self.key(x).transpose(-1, -2)
            scores = scores.masked_fill(mask, float("-inf"))
            return torch.softmax(scores, dim=-1) @ x  # planted

    model = Attention()
    x, mask = torch.randn(3, 5, 4), torch.zeros(3, 1, 5, dtype=torch.bool)
    mask[0, 0, 2:] = True
    mask[1] = True  # a sequence of padding alone
    return Planted(
        model, updating(model, lambda: model(x, mask).sum()), "aten._softmax.default", "", Attention
    )


def division_by_a_zero_norm() -> Planted:
    model = nn.Linear(4, 4, bias=False)
    x = torch.randn(3, 4)
    x[1] = 0

    def loss() -> Any:
        y = model(x)
        unit = y / y.norm(dim=-1, keepdim=True)  # planted
        return unit.sum()

    return Planted(model, updating(model, loss), "aten.div.Tensor", "", loss)


def exp_overflow() -> Planted:
    class Exponent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Any:
            weights = torch.exp(self.linear(x))  # planted
            return weights / weights.sum(-1, keepdim=True)

    model = nn.Sequential(Exponent())
    x = torch.full((2, 4), 400.0)
    return Planted(model, updating(model, lambda: -model(x).log().mean()), "aten.exp.default", "0", Exponent)


def bad_sample_in_the_data() -> Planted:
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Any:
            return self.second(torch.relu(self.first(x)))  # planted

    model = Mlp()
    x = torch.randn(6, 4)
    x[5, 2] = float("nan")
    step = updating(model, lambda: model(x).mean())
    return Planted(model, step, "aten.addmm.default", "first", Mlp, tensor="input[0]")


def nan_weight_after_a_learning_rate_spike() -> Planted:
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Any:
            hidden = torch.tanh(self.first(x))
            return self.second(hidden)  # planted

    model = Mlp()
    optimizer = torch.optim.SGD(model.second.parameters(), lr=1e38)
    (1e6 * model(torch.ones(2, 4)).pow(2)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 1e-3
    step = updating(model, lambda: model(torch.ones(2, 4)).mean())
    return Planted(model, step, "aten.addmm.default", "second", Mlp, tensor="second.weight")


def zero_times_infinity_in_backward() -> Planted:
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.copy_(torch.eye(4))
        model.bias.zero_()

    def loss() -> Any:
        y = model(torch.tensor([[0.0, 1.0, 2.0, 3.0]]))
        roots = torch.pow(y, 0.5)  # planted
        # The root of zero has an infinite derivative. `where` ignores the root, and multiplies its derivative by zero.
        return torch.where(y > 0, roots, torch.zeros_like(y)).sum()

    step = updating(model, loss)
    return Planted(model, step, "aten.pow.Tensor_Scalar", "", loss, phase="backward")


def index_range_of_bfloat16() -> Planted:
    class Distances(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Any:
            positions = torch.arange(300, device=x.device).to(
                torch.bfloat16
            )  # integers above 256 are rounded
            gaps = positions[1:] - positions[:-1]
            return (self.scale * x[:, 1:] / gaps.float()).mean()  # planted

    model = Distances()
    return Planted(
        model, updating(model, lambda: model(torch.ones(2, 300))), "aten.div.Tensor", "", Distances
    )


def module_with_a_dict_output() -> Planted:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            y = self.linear(x)
            return {"mean": y, "scale": torch.rsqrt(y - y)}  # planted

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = Pair(), nn.Linear(4, 1)

        def forward(self, *, x: Tensor) -> Any:
            parts = self.encoder(x)
            return self.head(parts["mean"] * parts["scale"])

    model = Model()
    step = updating(model, lambda: model(x=torch.randn(2, 4)).mean())
    return Planted(model, step, "aten.rsqrt.default", "encoder", Pair)


Change = Callable[[nn.Module], None]


def changing(change: Change) -> tuple[nn.Module, Callable[[], None]]:
    """A model, and a step whose program changes something between the backward pass and the update of Adam."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        change(model)
        optimizer.step()

    return model, step


def gradients_divided_by_a_zero_norm() -> Planted:
    def normalize(model: nn.Module) -> None:
        for parameter in model.parameters():
            gradient = parameter.grad
            assert gradient is not None
            gradient.zero_()
            gradient.div_(gradient.norm())  # planted

    model, step = changing(normalize)
    return Planted(model, step, "aten.div_.Tensor", "", normalize, phase="gradients")


def gradients_replaced_by_bad_ones() -> Planted:
    def replace(model: nn.Module) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad * 1e30 * 1e30  # planted

    model, step = changing(replace)
    return Planted(model, step, "aten.mul.Tensor", "", replace, phase="gradients")


def part_of_a_gradient_divided_by_zero() -> Planted:
    def divide(model: nn.Module) -> None:
        gradient = model.get_parameter("0.weight").grad
        assert gradient is not None
        gradient[1].div_(0.0)  # planted
        gradient[2].zero_()

    model, step = changing(divide)
    return Planted(model, step, "aten.div_.Tensor", "", divide, phase="gradients")


def clipping_to_an_infinite_norm() -> Planted:
    def clip(model: nn.Module) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1e25)
        nn.utils.clip_grad_norm_(model.parameters(), float("inf"))  # planted

    model, step = changing(clip)
    return Planted(model, step, "aten.mul.Tensor", "", clip, phase="gradients")


def weight_divided_by_its_norm_before_the_update() -> Planted:
    def normalize(model: nn.Module) -> None:
        weight = model.get_parameter("0.weight").detach().zero_()
        weight.div_(weight.norm())  # planted

    model, step = changing(normalize)
    return Planted(model, step, "aten.div_.Tensor", "", normalize)


def weight_replaced_before_the_update() -> Planted:
    def normalize(model: nn.Module) -> None:
        weight = model.get_parameter("0.weight")
        zero = torch.zeros_like(weight)
        weight.data = zero / zero.norm()  # planted

    model, step = changing(normalize)
    return Planted(model, step, "aten.div.Tensor", "", normalize)


def hook_of_a_parameter() -> Planted:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

    def scale(gradient: Tensor) -> Tensor:
        return gradient * 1e30 * 1e30  # planted

    model.get_parameter("0.weight").register_hook(scale)
    step = updating(model, lambda: model(torch.randn(3, 4)).square().mean())
    return Planted(model, step, "aten.mul.Tensor", "0", scale, phase="backward")


def hook_of_an_activation() -> Planted:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

    def scale(gradient: Tensor) -> Tensor:
        return gradient * 1e30 * 1e30  # planted

    def loss() -> Any:
        activation = model[0](torch.randn(3, 4))
        activation.register_hook(scale)
        return model[1](activation).square().mean()

    return Planted(model, updating(model, loss), "aten.mul.Tensor", "0", scale, phase="backward")


def hook_of_an_accumulated_gradient() -> Planted:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

    def scale(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 1e30 * 1e30  # planted

    model.get_parameter("0.weight").register_post_accumulate_grad_hook(scale)
    step = updating(model, lambda: model(torch.randn(3, 4)).square().mean())
    return Planted(model, step, "aten.mul.Tensor", "0", scale, phase="backward")


def replaced_buffer() -> Planted:
    class Averaging(nn.Module):
        average: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)
            self.register_buffer("average", torch.zeros(2))

        def forward(self, x: Tensor) -> Any:
            y = self.linear(x)
            self.average = self.average / y.detach().mean(0).mul(0)  # planted
            return y

    model = Averaging()
    step = updating(model, lambda: model(torch.randn(3, 4)).square().mean())
    return Planted(model, step, "aten.div.Tensor", "", Averaging)


def state_of_an_optimizer() -> Planted:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()  # planted

    step()
    optimizer.state[model.weight]["exp_avg_sq"][0] = float("nan")
    return Planted(model, step, "aten.mul_.Tensor", "", step, phase="optimizer", tensor="weight:exp_avg_sq")


PLANTED: dict[str, Callable[[], Planted]] = {
    make.__name__: make
    for make in (
        log_of_zero,
        sqrt_at_zero_in_backward,
        half_precision_overflow,
        masked_softmax_of_a_full_row,
        division_by_a_zero_norm,
        exp_overflow,
        bad_sample_in_the_data,
        nan_weight_after_a_learning_rate_spike,
        zero_times_infinity_in_backward,
        index_range_of_bfloat16,
        module_with_a_dict_output,
        gradients_divided_by_a_zero_norm,
        gradients_replaced_by_bad_ones,
        part_of_a_gradient_divided_by_zero,
        clipping_to_an_infinite_norm,
        weight_divided_by_its_norm_before_the_update,
        weight_replaced_before_the_update,
        hook_of_a_parameter,
        hook_of_an_activation,
        hook_of_an_accumulated_gradient,
        replaced_buffer,
        state_of_an_optimizer,
    )
}
