"""The first operation of two traces that differs: forward, backward, by its inputs, its numbers, or random numbers; and where sequences part."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from watchstep.reading.comparison.tolerances import Tolerances
from watchstep.trace import (
    Operation,
    Trace,
    TraceConfig,
    TraceDifference,
    TracedTensor,
    TraceMode,
    Tracer,
    compare_traces,
    read_trace,
    render_trace_difference,
    write_trace,
)

EXACT = Tolerances.uniform(0.0)
CHECKSUMS = TraceConfig(TraceMode.STATISTICS, checksums=True, ring_steps=10)


class Scaled(nn.Module):
    """Multiplies by a number of the run."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return x * self.number


class Shifted(torch.autograd.Function):
    """An identity whose gradient has an offset of the run."""

    offset = 0.0

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> Tensor:
        return gradient + torch.full((), Shifted.offset)


def _shifted(x: Tensor) -> Tensor:
    result: Tensor = Shifted.apply(x)  # type: ignore[no-untyped-call]
    return result


class Model(nn.Module):
    def __init__(self, number: float = 1.0) -> None:
        super().__init__()
        self.first, self.scaled, self.last = nn.Linear(4, 8), Scaled(number), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(_shifted(self.scaled(self.first(x)).relu()))
        return y


def traced(
    change: Callable[[Model], None] = lambda _: None,
    *,
    number: float = 1.0,
    data: Callable[[], Tensor] = lambda: torch.ones(3, 4),
    offset: float = 0.0,
    config: TraceConfig = CHECKSUMS,
    steps: int = 2,
) -> Trace:
    """A trace of a training in which one thing may be different."""
    torch.manual_seed(0)
    Shifted.offset = offset
    model = Model(number)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    change(model)
    tracer = Tracer(model, config)
    for _ in range(steps):
        with tracer.step():
            loss = model(data()).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return tracer.trace()


def test_equal_trainings_have_equal_traces(tmp_path: Path) -> None:
    a, b = traced(), traced()
    write_trace(b, tmp_path / "b.trace")
    found = compare_traces(a, read_trace(tmp_path / "b.trace"), EXACT)
    assert (found.first, found.partings, found.notes, found.steps) == (None, (), (), (0, 1))
    assert found.without_figures == 0
    assert found.compared > 30
    assert not found.differs
    assert render_trace_difference(a, found) == f"no difference in {found.compared} operations of 2 step(s)\n"


def test_a_number_of_the_program(tmp_path: Path) -> None:
    a, b = traced(number=1.0), traced(number=1.0 + 1e-9)
    write_trace(b, tmp_path / "b.trace")
    found = compare_traces(a, read_trace(tmp_path / "b.trace"), EXACT)
    assert found.first is not None
    assert (found.first.kind, found.first.a.name, found.first.a.module) == (
        "number",
        "aten.mul.Tensor",
        "scaled",
    )
    site = a.line_of(found.first.a)
    assert site is not None
    assert a.text_of(site) == "return x * self.number"
    text = render_trace_difference(a, found)
    assert "first different operation: aten.mul.Tensor (operation " in text
    assert "number 0 among its arguments is 1.0 and 1.000000001" in text


def test_an_operation_with_equal_inputs_and_another_result() -> None:
    a, b = traced(), traced()
    changed = next(each for each in b.operations if each.name == "aten.relu.default" and each.step == 1)
    output = replace(changed.outputs[0], checksum=1)
    operations = [replace(each, outputs=(output,)) if each is changed else each for each in b.operations]
    found = compare_traces(a, replace(b, operations=operations), EXACT).first
    assert found is not None
    assert (found.kind, found.a.index, found.position, found.figure) == (
        "result",
        changed.index,
        0,
        "checksum",
    )


def test_a_difference_in_the_backward_pass_only() -> None:
    a, b = traced(), traced(offset=1e-6)
    found = compare_traces(a, b, EXACT)
    assert found.first is not None
    assert (found.first.a.phase, found.first.a.step) == ("backward", 0)
    site = a.line_of(found.first.a)
    assert site is not None
    # Not the line of the forward operation: the program computes this gradient.
    assert (a.text_of(site), site.function) == (
        "return gradient + torch.full((), Shifted.offset)",
        "backward",
    )
    assert "backward of aten.clone.default, in ShiftedBackward" in render_trace_difference(a, found)


def test_data_of_another_source_is_an_input() -> None:
    rows = torch.arange(12.0).reshape(3, 4)  # the same samples in another order, so that no sum shows it
    orders = [rows.numpy(), rows.flip(0).numpy().copy()]
    a, b = (traced(data=functools.partial(torch.from_numpy, order)) for order in orders)
    found = compare_traces(a, b, EXACT)
    assert found.first is not None
    assert (found.first.kind, found.first.figure) == ("input", "checksum")
    assert found.first.a.inputs[found.first.position].name == "input[0]"
    assert "tensor input[0]" in render_trace_difference(a, found)


def test_random_numbers_and_weights() -> None:
    def seed(_: Model) -> None:
        torch.manual_seed(1)

    def add(model: Model) -> None:
        with torch.no_grad():
            model.first.weight[0, 0] += 1e-3

    a, b = (traced(change, data=lambda: torch.randn(3, 4)) for change in (lambda _: None, seed))
    found = compare_traces(a, b).first
    assert found is not None
    assert (found.kind, found.a.name) == ("random", "aten.randn.default")
    found = compare_traces(traced(), traced(add), EXACT).first
    assert found is not None
    assert (found.kind, found.a.inputs[found.position].name) == ("input", "first.weight")


@pytest.mark.parametrize("mode", [TraceMode.STATISTICS, TraceMode.FULL_TENSOR])
@pytest.mark.parametrize(("relative", "differs"), [(1e-6, False), (1e-2, True)])
def test_a_tolerance_without_checksums(mode: TraceMode, relative: float, differs: bool) -> None:
    def change(model: Model) -> None:
        with torch.no_grad():
            model.first.weight.mul_(1 + relative)

    config = TraceConfig(mode)
    found = compare_traces(traced(config=config), traced(change, config=config))
    assert found.differs == differs
    if differs:
        assert found.first is not None
        assert (found.first.a.name, found.first.a.module) == ("aten.addmm.default", "first")
        assert found.first.figure.startswith("value[" if mode is TraceMode.FULL_TENSOR else "mean")


def test_health_alone_shows_non_finite_values_only() -> None:
    def break_it(model: Model) -> None:
        with torch.no_grad():
            model.last.bias[0] = float("nan")

    config = TraceConfig(TraceMode.CURT_HEALTH)
    found = compare_traces(traced(config=config), traced(break_it, config=config))
    assert found.first is not None
    assert (found.first.a.module, found.first.figure) == ("last", "non-finite")
    assert compare_traces(traced(config=config), traced(config=config)).without_figures > 0


class Extra(Model):
    """A model with further operations, and the same results."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        (x + 1).cos()
        return y


def test_sequences_that_part_meet_again() -> None:
    a = traced()

    def insert(model: Model) -> None:
        model.__class__ = Extra

    b = traced(insert)
    found = compare_traces(a, b, EXACT)
    assert found.first is None
    assert [
        ([each.name for each in parting.only_b], parting.only_a, parting.meets) for parting in found.partings
    ] == [(["aten.add.Tensor", "aten.cos.default"], (), True)] * 2
    assert found.differs
    assert found.parts_first
    mirrored = compare_traces(b, a, EXACT)
    text = render_trace_difference(b, mirrored)
    assert "the sequences of operations part in step 0" in text
    assert "only A: aten.add.Tensor" in text
    assert inspect.getsource(Extra.forward).splitlines()[2].strip() in text


def test_steps_of_one_trace_only_are_noted() -> None:
    found: TraceDifference = compare_traces(traced(steps=3), traced(), EXACT)
    assert (found.steps, found.notes) == ((0, 1), ("steps only in A: 2",))


def test_results_that_may_not_be_complete_or_have_no_values_are_not_compared() -> None:
    def trace(checksum: int) -> Trace:
        names = (
            "c10d.allreduce_.default",
            "aten.empty.memory_format",
            "aten._cudnn_rnn.default",
            "aten.sin.default",
        )
        result = TracedTensor(0, (2,), "float32", checksum=1)
        other = TracedTensor(1, (2,), "uint8", checksum=checksum)
        outputs = [(replace(other, dtype="float32"),), (other,), (result, other), (result,)]
        return Trace(
            [
                Operation(index, 0, name, "forward", "", (), written)
                for index, (name, written) in enumerate(zip(names, outputs, strict=True))
            ]
        )

    assert not compare_traces(trace(1), trace(2), EXACT).differs


def test_modules_are_found_when_they_are_called() -> None:
    tracer = Tracer(config=CHECKSUMS, finds_modules=True)
    with tracer.step():
        torch.manual_seed(0)
        model = Model()
        loss = nn.MSELoss()(model(torch.ones(3, 4)), torch.zeros(3, 2))
        loss.backward()
    operations = tracer.trace().operations
    modules = {operation.module for operation in operations}
    assert {"first", "scaled", "last", "MSELoss"} <= modules
    initial = next(each for each in operations if each.name == "aten.uniform_.default")
    assert initial.outputs[0].name == "first.weight"
    assert any(output.name == "last.bias:gradient" for each in operations for output in each.outputs)
