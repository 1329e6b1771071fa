"""Infinity is a mask only where it is used as one: what overflowed before a mask, and samples, labels and parameters with -inf, are named."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from watchstep.trace import (
    Diagnosis,
    Operation,
    Trace,
    TraceConfig,
    TracedTensor,
    TraceMode,
    Tracer,
    diagnose,
)
from watchstep.trace import tracer as tracer_module

FUTURE = torch.triu(torch.ones(6, 6, dtype=torch.bool), 1)
Loss = Callable[[], Tensor]
Case = Callable[[], tuple[nn.Module, Loss]]


@pytest.fixture(params=["host", "device"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where results are read: at once, or at the end of the step as on a device."""
    if request.param == "device":
        monkeypatch.setattr(tracer_module, "is_on_host", lambda tensor: False)
    return str(request.param)


def diagnosed(case: Case, mode: TraceMode = TraceMode.CURT_HEALTH, lr: float = 0.01) -> Diagnosis:
    """The diagnosis of one step."""
    torch.manual_seed(1)
    model, loss = case()
    optimizer = torch.optim.SGD(model.parameters(), lr)
    tracer = Tracer(model, TraceConfig(mode))
    with tracer.step():
        loss().backward()
        optimizer.step()
    trace = tracer.trace()
    assert trace.notes == ()
    return diagnose(trace)


def named(diagnosis: Diagnosis) -> tuple[str, str, str]:
    """The first origin: its cause, and its operation or the name of its tensor, and the phase."""
    first = diagnosis.first
    assert first is not None
    if first.cause == "tensor":
        assert first.tensor is not None
        return "tensor", first.tensor.name, first.operation.phase
    return first.cause, first.operation.name, first.operation.phase


class Attention(nn.Module):
    """Attention in half precision with a mask.

    Args:
        mask: Masks the scores.
        buffer: The mask as a buffer.
    """

    def __init__(self, mask: Callable[[Tensor, Tensor], Tensor], buffer: Tensor = FUTURE) -> None:
        super().__init__()
        self.projection = nn.Linear(16, 48)
        self.mask = mask
        self.register_buffer("allowed", buffer)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projection(x).split(16, 2)
        scores = (q.half() @ k.half().transpose(-2, -1)).float()
        weights = torch.softmax(self.mask(scores, self.get_buffer("allowed")), -1)
        return torch.matmul(weights, v)


def filled_in_place(scores: Tensor, mask: Tensor) -> Tensor:
    scores = scores.clone()
    return scores.masked_fill_(mask, -math.inf)


ADDED = torch.zeros(6, 6).masked_fill(FUTURE, -math.inf)
MASKS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor]] = {
    "masked_fill": (lambda scores, mask: scores.masked_fill(mask, -math.inf), FUTURE),
    "where": (lambda scores, mask: torch.where(mask, -math.inf, scores), FUTURE),
    "in place": (filled_in_place, FUTURE),
    "filled, scaled and copied": (
        lambda scores, mask: (scores.masked_fill(mask, -math.inf) / 4.0).contiguous().double().float(),
        FUTURE,
    ),
    "added": (lambda scores, mask: scores + mask, ADDED),
    "added, and clamped to a range without end": (
        lambda scores, mask: (scores + mask).clamp(-math.inf, math.inf),
        ADDED,
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_an_overflow_before_a_mask_is_named(name: str, place: str) -> None:
    def case() -> tuple[nn.Module, Loss]:
        model, x = Attention(*MASKS[name]), torch.randn(2, 6, 16) * 1000
        return model, lambda: model(x).square().mean()

    for mode in (TraceMode.CURT_HEALTH, TraceMode.STATISTICS):
        assert named(diagnosed(case, mode)) == ("operation", "aten.bmm.default", "forward")


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_alone_is_no_fault(name: str, place: str) -> None:
    def case() -> tuple[nn.Module, Loss]:
        model, x = Attention(*MASKS[name]), torch.randn(2, 6, 16)
        return model, lambda: model(x).square().mean()

    assert diagnosed(case) == Diagnosis(None)


@pytest.mark.parametrize("name", ["masked_fill", "added"])
def test_a_row_that_is_masked_completely_is_a_fault_of_the_softmax(name: str, place: str) -> None:
    mask, buffer = MASKS[name]

    def case() -> tuple[nn.Module, Loss]:
        model, x = Attention(mask, buffer.clone()), torch.randn(2, 6, 16)
        model.get_buffer("allowed")[3] = True if name == "masked_fill" else -math.inf
        return model, lambda: model(x).square().mean()

    assert named(diagnosed(case)) == ("operation", "aten._softmax.default", "forward")


def mlp(outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, outputs))


def action_mask() -> tuple[nn.Module, Loss]:
    model, x, invalid = mlp(), torch.randn(8, 4), torch.tensor([False, False, True])
    return model, lambda: functional.cross_entropy(
        (model(x) * 1e30 * 1e30).masked_fill(invalid, -math.inf), torch.zeros(8, dtype=torch.long)
    )


def clamped() -> tuple[nn.Module, Loss]:
    model, x = mlp(), torch.randn(8, 4)
    return model, lambda: (model(x) / torch.zeros(3)).clamp(-math.inf, math.inf).mean()


@pytest.mark.parametrize(
    ("case", "operation"), [(action_mask, "aten.mul.Tensor"), (clamped, "aten.div.Tensor")]
)
def test_an_overflow_before_another_fill_is_named(case: Case, operation: str, place: str) -> None:
    assert named(diagnosed(case)) == ("operation", operation, "forward")


@pytest.mark.parametrize("is_added", [False, True])
def test_a_masked_label_is_a_fault_of_the_loss(is_added: bool, place: str) -> None:
    def case() -> tuple[nn.Module, Loss]:
        model, x = mlp(), torch.randn(8, 4)
        model.register_buffer("invalid", torch.tensor([-math.inf, 0, 0]))

        def loss() -> Tensor:
            y = model(x)
            invalid = model.get_buffer("invalid")
            y = y + invalid if is_added else y.masked_fill(invalid.isinf(), -math.inf)
            return functional.cross_entropy(y, torch.zeros(8, dtype=torch.long))

        return model, loss

    assert named(diagnosed(case)) == ("operation", "aten.nll_loss_forward.default", "forward")


def samples(*values: float) -> Tensor:
    x = torch.randn(8, 4)
    x[3, : len(values)] = torch.tensor(values)
    return x


@pytest.mark.parametrize("value", [-math.inf, math.inf])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.GELU])
def test_a_sample_with_infinity_is_named(value: float, activation: type[nn.Module], place: str) -> None:
    def case() -> tuple[nn.Module, Loss]:
        model, x = nn.Sequential(nn.Linear(4, 8), activation(), nn.Linear(8, 2)), samples(value)
        return model, lambda: functional.cross_entropy(model(x), torch.arange(8) % 2)

    assert named(diagnosed(case)) == ("tensor", "input[0]", "forward")


def test_a_sample_is_followed_through_selections(place: str) -> None:
    class Selecting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            parts = torch.cat([x[:4], x[4:] * 0.5]).flip(0).double().float() + 1.0
            out: Tensor = self.linear(parts)
            return out

    def case() -> tuple[nn.Module, Loss]:
        model, x = Selecting(), samples(-math.inf)
        return model, lambda: model(x).square().mean()

    assert named(diagnosed(case)) == ("tensor", "input[0]", "forward")


@pytest.mark.parametrize("loss", [functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss])
def test_a_label_with_minus_infinity_is_named(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    labels = torch.rand(8, 1)
    labels[2] = 0
    labels = labels.log()

    def case() -> tuple[nn.Module, Loss]:
        model, x = mlp(1), torch.randn(8, 4)
        return model, lambda: loss(model(x), labels)

    diagnosis = diagnosed(case)
    assert named(diagnosis) == ("tensor", "", "forward")
    assert diagnosis.first is not None
    assert diagnosis.first.reaches == "loss"
    assert diagnosis.first.tensor is not None
    assert diagnosis.first.tensor.health is not None
    assert diagnosis.first.tensor.health.negative_infinite == 1


def normalized() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
    )


@pytest.mark.parametrize("in_training", [False, True])
@pytest.mark.parametrize(
    "name", ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "4.weight", "4.bias", "3.running_mean"]
)
def test_a_parameter_or_statistic_with_minus_infinity_is_named(
    name: str, in_training: bool, place: str
) -> None:
    def case() -> tuple[nn.Module, Loss]:
        model, x = normalized(), torch.randn(8, 4)
        model.state_dict()[name].view(-1)[0] = -math.inf
        model[3].train(in_training)
        return model, lambda: model(x).square().mean()

    assert named(diagnosed(case)) == ("tensor", name, "forward")


def test_a_parameter_of_which_the_loss_is_finite_is_named_before_its_update() -> None:
    def case() -> tuple[nn.Module, Loss]:
        model, x = mlp(), torch.randn(8, 4)
        with torch.no_grad():
            model.get_parameter("0.bias")[2] = -math.inf
        return model, lambda: model(x).square().mean()

    diagnosis = diagnosed(case)
    assert named(diagnosis) == ("tensor", "0.bias", "forward")
    assert diagnosis.first is not None
    assert diagnosis.first.reaches == "0.bias"


def test_a_parameter_that_is_repaired_before_its_update_is_not_named() -> None:
    torch.manual_seed(1)
    model, x = mlp(), torch.randn(8, 4)
    bias = model.get_parameter("0.bias")
    optimizer = torch.optim.SGD([bias], math.inf)
    with torch.no_grad():
        bias[2] = -math.inf
    tracer = Tracer(model)
    with tracer.step():
        model(x).square().mean().backward()
        with torch.no_grad():
            bias.nan_to_num_(neginf=0)
        optimizer.step()
    assert named(diagnose(tracer.trace())) == ("operation", "aten.add_.Tensor", "optimizer")


def test_a_parameter_under_autocast_is_named() -> None:
    def case() -> tuple[nn.Module, Loss]:
        model, x = mlp(), torch.randn(8, 4)
        with torch.no_grad():
            model.get_parameter("2.weight")[1, 3] = -math.inf

        def loss() -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return functional.cross_entropy(model(x).float(), torch.arange(8) % 3)

        return model, loss

    assert named(diagnosed(case)) == ("tensor", "2.weight", "forward")


def test_masks_in_sums_of_logarithms_filters_and_extremes_are_no_fault(place: str) -> None:
    def sums(y: Tensor) -> Tensor:
        total = torch.full((8,), -math.inf)
        for column in y.unbind(-1):
            total = torch.logaddexp(total, column)
        return total.mean()

    def filtered(y: Tensor) -> Tensor:
        y = y.masked_fill(y < y.topk(2).values[:, -1:], -math.inf) / 0.7
        return -functional.log_softmax(y, -1).gather(1, y.argmax(-1, keepdim=True)).mean()

    def smallest(y: Tensor) -> Tensor:
        best = torch.full((8,), math.inf)
        for column in y.unbind(-1):
            best = torch.minimum(best, column)
        return best.mean()

    def padded(y: Tensor) -> Tensor:
        return functional.pad(y, (0, 2), value=-math.inf).logsumexp(-1).mean()

    for loss in (sums, filtered, smallest, padded):

        def case(loss: Callable[[Tensor], Tensor] = loss) -> tuple[nn.Module, Loss]:
            model, x = mlp(5), torch.randn(8, 4)
            return model, lambda: loss(model(x))

        assert diagnosed(case) == Diagnosis(None), loss.__name__


def test_scores_that_overflow_where_a_mask_is_added_are_named() -> None:
    """The mask explains one of three infinite columns."""

    def case() -> tuple[nn.Module, Loss]:
        model, x = mlp(), torch.randn(8, 4)
        mask = torch.tensor([-math.inf, 0.0, 0.0])

        def loss() -> Tensor:
            y = model(x).masked_fill(torch.tensor([True, False, False]), -math.inf)
            return functional.cross_entropy((y - 1e38) * 10.0 + mask, torch.ones(8, dtype=torch.long))

        return model, loss

    assert named(diagnosed(case)) == ("operation", "aten.mul.Tensor", "forward")


def test_a_repeated_index_is_no_error() -> None:
    bad = TracedTensor(1, (1,), "float32", name="w:gradient", nonfinite=True)
    fine = TracedTensor(2, (1,), "float32", nonfinite=False)
    operations = [Operation(0, 0, "a", "forward", "", (), (output,)) for output in (bad, fine)]
    first = diagnose(Trace(operations)).first
    assert first is not None
    assert first.operation == operations[0]


def test_a_gradient_with_nan_is_named_and_not_its_update(place: str) -> None:
    torch.manual_seed(1)
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    tracer = Tracer(model)
    with tracer.step():
        model(x).square().sum(-1).sqrt().sum().backward()
        optimizer.step()
    first = diagnose(tracer.trace()).first
    assert first is not None
    assert (first.operation.name, first.operation.phase) == ("aten.div.Tensor", "backward")
    assert first.reaches.startswith("gradient of ")
