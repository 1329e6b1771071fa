"""The first bad operation of a trace: laws, and planted faults."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.sdk.trace.planted import PLANTED
from watchstep.trace import Tracer, diagnose
from watchstep.trace import tracer as tracer_module
from watchstep.trace.report import render_diagnosis

# Laws


def changed_in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y.mul_(0.5)
    return y


def written_to_a_part(x: Tensor) -> Tensor:
    whole = torch.zeros(2, *x.shape)
    whole[1] = x
    return whole[1] + whole[0]


def masked(x: Tensor) -> Tensor:
    mask = torch.zeros_like(x).masked_fill(torch.ones_like(x) > 2, float("-inf"))
    return x + mask


def contained(x: Tensor) -> Tensor:
    """Makes a NaN that reaches nothing."""
    torch.log(-torch.ones(3)).clone()
    return x * 1.0


HEALTHY: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "add": lambda x: x + 0.25,
    "view": lambda x: x.reshape(-1).view(4, 4),
    "transpose": lambda x: x.t().contiguous(),
    "in place": changed_in_place,
    "part": written_to_a_part,
    "parts": lambda x: torch.cat([x[:2], x[2:]]),
    "masked": masked,
    "contained": contained,
    "matmul": lambda x: x @ torch.eye(4),
}
BAD: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "log": (lambda x: x + torch.log(x.detach() * 0.0), "aten.log.default"),
    "divide": (lambda x: x / (x.detach() * 0.0), "aten.div.Tensor"),
    "exp": (lambda x: x * torch.exp(x.detach() * 0.0 + 1e4), "aten.exp.default"),
    "sqrt": (lambda x: x + torch.sqrt(x.detach() * 0.0 - 1.0), "aten.sqrt.default"),
}
healthy_operations = st.lists(st.sampled_from(sorted(HEALTHY)), max_size=6)


@given(before=healthy_operations, bad=st.sampled_from(sorted(BAD)), after=healthy_operations)
def test_the_planted_operation_is_the_first_bad_one(before: list[str], bad: str, after: list[str]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    plant, name = BAD[bad]
    tracer = Tracer(model)
    with tracer.step():
        x: Tensor = model(torch.rand(4, 4) + 0.5)
        for operation in before:
            x = HEALTHY[operation](x)
        x = plant(x)
        for operation in after:
            x = HEALTHY[operation](x)
        x.sum().backward()
    trace = tracer.trace()
    assert trace.notes == ()
    diagnosis = diagnose(trace)
    first = diagnosis.first
    if first is None:  # a later tanh has made infinity finite again, and its gradient zero
        assert "tanh" in after
        assert name in {each.name for each in diagnosis.contained}
        return
    assert first.cause == "operation"
    starts = [
        each for each in trace.operations if each.name == name and each.is_bad and each.phase == "forward"
    ]
    if first.operation.phase == "backward":
        # A later tanh has made the infinity finite again, so the damage began in the backward pass of the same operation.
        assert "tanh" in after
        assert first.operation.forward in {each.index for each in starts}
        return
    assert first.operation.name == name
    assert first.operation in starts
    if "contained" not in before + after or name != "aten.log.default":
        assert first.operation == starts[0]


@given(operations=healthy_operations)
def test_a_healthy_program_has_none(operations: list[str]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    tracer = Tracer(model)
    with tracer.step():
        x: Tensor = model(torch.rand(4, 4) + 0.5)
        for operation in operations:
            x = HEALTHY[operation](x)
        x.sum().backward()
    diagnosis = diagnose(tracer.trace())
    assert diagnosis.first is None
    assert [each.name for each in diagnosis.contained] == ["aten.log.default"] * operations.count("contained")


# Planted faults


@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("name", sorted(PLANTED))
def test_the_first_bad_operation_is_named_with_its_line(
    name: str, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not on_host:  # as on a device, whose results are read at the end of the step
        monkeypatch.setattr(tracer_module, "is_on_host", lambda tensor: False)
    torch.manual_seed(0)
    planted = PLANTED[name]()
    tracer = Tracer(planted.model)
    with tracer.step(7):
        planted.step()
    trace = tracer.trace()
    first = diagnose(trace).first
    assert first is not None
    assert first.operation.name == planted.operation, render_diagnosis(trace, diagnose(trace), verbose=True)
    site = trace.line_of(first.operation)
    assert site is not None
    assert (site.line, site.file) == (planted.line, planted.step.__code__.co_filename)
    assert (first.operation.module, first.operation.phase, first.operation.step) == (
        planted.module,
        planted.phase,
        7,
    )
    assert first.cause == ("tensor" if planted.tensor else "operation")
    if planted.tensor:
        assert first.tensor is not None
        assert first.tensor.name == planted.tensor
