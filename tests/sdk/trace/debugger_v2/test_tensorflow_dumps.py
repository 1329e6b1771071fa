from __future__ import annotations

import hashlib
import math
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.processes import run_python
from tests.sdk.trace.debugger_v2.dumps import dump, expected
from watchstep.trace import (
    Operation,
    Trace,
    TracedTensor,
    TraceMode,
    alerts_of,
    diagnose,
    read_debugger_v2,
    read_trace,
)
from watchstep.trace.debugger_v2.tensor_values import DTYPES

# Dumps that TensorFlow wrote are read as TensorFlow's own reader reads them, and the planted operation is found.


MODES = ("no_tensor", "curt_health", "concise_health", "full_health", "shape", "full_tensor")
NAMES = [
    *(f"{program}-{mode}" for mode in MODES for program in ("graph", "eager")),
    "nested-curt_health",
    "nested-full_health",
    "nested-full_tensor",
    "ring",
    "filtered",
    "hosts",
]
_CACHE: dict[str, Trace] = {}


def trace_of(name: str) -> Trace:
    if name not in _CACHE:
        _CACHE[name] = read_debugger_v2(dump(name))
    return _CACHE[name]


def of_phase(trace: Trace, phase: str) -> list[Operation]:
    return [operation for operation in trace.operations if operation.phase == phase]


def stack(trace: Trace, operation: Operation) -> list[list[Any]]:
    """The stack as TensorFlow's reader gives it: outermost first."""
    return [[site.file, site.line, site.function] for site in reversed(trace.stack_of(operation))]


def check_recorded(output: TracedTensor, mode: int, values: Any) -> None:
    """An output has what TensorFlow recorded of it."""
    if mode == 7:
        check_full(output, values)
        return
    if not values:
        assert (output.nonfinite, output.health, output.values) == (None, None, None)
        return
    health = output.health
    if mode == 2:
        assert (output.nonfinite, health) == (bool(values[1]), None)
    elif mode == 3:
        assert health is not None
        counts = [health.elements, health.negative_infinite, health.positive_infinite, health.nan]
        assert counts == values[1:]
        assert output.nonfinite == any(values[2:])
    elif mode == 4:
        assert health is not None
        assert (output.dtype, len(output.shape)) == (DTYPES[int(values[2])], values[3])
        assert [health.elements, health.negative_infinite, health.positive_infinite, health.nan] == values[
            4:8
        ]
        assert [health.negative, health.zero, health.positive] == values[8:]
    else:
        assert mode == 5
        rank = int(values[2])
        assert (output.dtype, output.nonfinite) == (DTYPES[int(values[1])], None)
        assert list(output.shape) == values[4 : 4 + rank]
        assert math.prod(output.shape) == values[3]


def check_full(output: TracedTensor, values: dict[str, Any]) -> None:
    if values["dtype"] == "object":  # strings
        assert output.values is None
        return
    array = np.array(values["values"], values["dtype"]).reshape(values["shape"])
    assert output.shape == array.shape
    assert output.values is not None
    np.testing.assert_array_equal(output.values, array)
    assert output.values.dtype == array.dtype
    if array.dtype.kind == "f":
        assert output.health is not None
        assert output.health.nan == np.isnan(array).sum()
        assert output.nonfinite == (not np.isfinite(array).all())


@pytest.mark.parametrize("name", NAMES)
def test_executions_of_python(name: str) -> None:
    trace, reference = trace_of(name), expected(name)
    operations = of_phase(trace, "eager")
    assert [each.name for each in operations] == [each["type"] for each in reference["executions"]]
    for operation, execution in zip(operations, reference["executions"], strict=True):
        assert len(operation.outputs) == execution["outputs"]
        # A function also reads what it returns.
        assert len(operation.inputs) >= execution["inputs"]
        assert execution["function"] or len(operation.inputs) == execution["inputs"]
        assert stack(trace, operation) == reference["stacks"][execution["stack"]]
        values = execution["values"] or ()
        if len(values) == len(operation.outputs):
            for output, recorded in zip(operation.outputs, values, strict=True):
                check_recorded(output, execution["mode"], recorded)


@pytest.mark.parametrize("name", NAMES)
def test_operations_of_graphs(name: str) -> None:
    trace, reference = trace_of(name), expected(name)
    operations = of_phase(trace, "graph")
    mode = [each["mode"] for each in reference["executions"]]
    # Several threads write, so only outputs of one operation have TensorFlow's order.
    found: dict[Any, list[Operation]] = defaultdict(list)
    for operation in operations:
        found[operation.name, operation.node].append(operation)
    assert len(operations) == len(reference["traces"])
    traces = reference["traces"]
    if name == "hosts":  # TensorFlow reads one host after the other, and a trace is ordered by time
        half = len(traces) // 2
        traces = [each for pair in zip(traces[:half], traces[half:], strict=True) for each in pair]
    for recorded in traces:
        alike = found[recorded["type"], recorded["name"]]
        # Graphs that are nested in different functions may have operations of one name.
        operation = next(
            each for each in alike if stack(trace, each) == reference["stacks"][recorded["stack"]]
        )
        alike.remove(operation)
        (output,) = operation.outputs
        check_recorded(output, mode[0] if mode else 0, recorded["values"])
        assert len(operation.inputs) == (recorded["inputs"] or operation.name.startswith("Placeholder"))


@pytest.mark.parametrize("name", NAMES)
def test_alerts(name: str) -> None:
    trace, reference = trace_of(name), expected(name)
    found = Counter(
        (each.name, each.output, each.elements, each.negative_infinite, each.positive_infinite, each.nan)
        for each in alerts_of(trace)
    )
    recorded = Counter(
        (each["type"], each["output"], each["size"], each["neg_inf"], each["pos_inf"], each["nan"])
        for each in reference["alerts"]
    )
    assert found == recorded
    assert bool(found) == (trace.mode.has_health)


@pytest.mark.parametrize("name", NAMES)
def test_sources_and_program(name: str) -> None:
    trace, reference = trace_of(name), expected(name)
    text = trace.sources[reference["program"]]
    assert hashlib.sha256(text.encode()).hexdigest() == reference["source"]
    assert trace.program == f"TensorFlow {reference['version']}"
    assert trace.steps == [-1]
    assert any("no training steps" in note for note in trace.notes)


@pytest.mark.parametrize("program", ["graph", "eager", "nested"])
@pytest.mark.parametrize("mode", ["curt_health", "concise_health", "full_health", "full_tensor"])
def test_the_planted_operation_is_named(program: str, mode: str) -> None:
    if program == "nested" and mode == "concise_health":
        mode = "full_health"
    trace = trace_of(f"{program}-{mode}")
    assert trace.mode is TraceMode(mode)
    first = diagnose(trace).first
    assert first is not None
    assert (first.cause, first.operation.name) == ("operation", "Sqrt" if program == "nested" else "Log")
    site = trace.line_of(first.operation)
    assert site is not None
    assert trace.text_of(site).endswith("# planted")


def test_a_logarithm_that_is_masked_is_contained() -> None:
    diagnosis = diagnose(trace_of("nested-full_health"))
    assert [operation.name for operation in diagnosis.contained] == ["Log"]


def test_loops_and_branches_are_followed() -> None:
    trace = trace_of("nested-full_health")
    by_id = {output.id: operation for operation in trace.operations for output in operation.outputs}
    additions = [operation for operation in trace.operations if operation.node == "while/add"]
    assert len(additions) == 3
    carried = [by_id[addition.inputs[0].id] for addition in additions]
    assert {operation.node for operation in carried} == {"while/Placeholder"}
    initial, *later = [by_id[operation.inputs[0].id] for operation in carried]
    assert initial.node == "zeros"
    assert later == additions[:2]
    (total,) = [operation for operation in trace.operations if operation.node == "Sum"]
    assert by_id[total.inputs[0].id].name == "Sqrt"


def test_a_gradient_belongs_to_its_operation() -> None:
    trace = trace_of("graph-full_health")
    gradient = next(
        operation for operation in trace.operations if operation.node == "gradient_tape/head/MatMul/MatMul"
    )
    assert gradient.forward is not None
    assert trace.operations[gradient.forward].node == "head/MatMul"
    assert gradient.module == "head"


def test_modules_are_name_scopes() -> None:
    trace = trace_of("graph-full_health")
    modules = {operation.node: operation.module for operation in trace.operations}
    assert modules["head/MatMul"] == modules["head/MatMul/ReadVariableOp"] == modules["head/add"] == "head"
    assert modules["gradient_tape/head/add/Sum"] == "head"
    assert modules["Log"] == modules["gradient_tape/mul/Mul"] == ""


def test_a_full_ring_is_not_taken_for_a_whole_trace() -> None:
    trace = trace_of("ring")
    assert len(of_phase(trace, "graph")) == 30
    assert alerts_of(trace)


def test_a_filter_leaves_outputs_without_values() -> None:
    trace = trace_of("filtered")
    operations = of_phase(trace, "eager")
    assert {output.dtype for operation in operations for output in operation.outputs} == {"float32", ""}
    assert all(operation.outputs[0].shape == (-1,) for operation in operations if operation.name == "Shape")


def test_the_command_reads_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    from watchstep.wrapper.trace_command import main

    with pytest.raises(SystemExit) as exit_:
        main([str(dump("graph-full_health"))])
    assert exit_.value.code == 1
    assert capsys.readouterr().out.startswith("first bad operation: Log (operation ")
    with pytest.raises(SystemExit) as exit_:
        main(["--alerts", str(dump("graph-full_health"))])
    assert exit_.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) == len(expected("graph-full_health")["alerts"])


# The guide


GUIDE = Path(__file__).parents[4] / "docs" / "guides" / "debugger-v2.md"


@pytest.mark.ci
def test_the_example_runs(tmp_path: Path) -> None:
    _, example = re.findall(r"```py\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "tensorflow-dump").symlink_to(dump("graph-concise_health"))
    output = run_python("-W", "error", "-c", example, cwd=tmp_path)
    assert output.startswith("Log /tmp/watchstep-dumps/dumped_program.py:")
    assert len(output.splitlines()) == 11
    assert read_trace(tmp_path / "tensorflow.trace").operations
