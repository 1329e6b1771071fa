"""Diagnoses and comparisons of traces as text: the first bad or different operation, its source line, its inputs, and what it reached."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

from watchstep.platform.terminal_text import printable
from watchstep.trace.comparison import OperationDifference, TraceDifference, TraceParting
from watchstep.trace.operations import Operation, Trace, TracedTensor
from watchstep.trace.origins import BadOrigin, Diagnosis
from watchstep.trace.unusual import UnusualOperation, UnusualStep

_MAX_OTHERS = 5


def render_diagnosis(trace: Trace, diagnosis: Diagnosis, *, verbose: bool = False) -> str:
    """Render a diagnosis.

    Args:
        trace: The trace that it is about.
        diagnosis: The diagnosis.
        verbose: Whether further origins, contained values and the whole stack are shown.
    """
    return "\n".join(map(printable, _lines(trace, diagnosis, verbose=verbose))) + "\n"


def render_cause(trace: Trace, diagnosis: Diagnosis) -> str:
    """Render the first bad operation and its source line as one sentence without a full stop; what was found instead if there is none."""
    origin = diagnosis.first
    if origin is None:
        return printable(_nothing_found(trace))
    operation = origin.operation
    site = trace.line_of(operation)
    text = "" if site is None else trace.text_of(site)
    where = ("" if site is None else f" at {site}") + (f": {text}" if text else "")
    forward = _forward_of(trace, operation)
    name = operation.name if forward is None else f"the backward pass of {forward.name} ({operation.name})"
    if origin.cause == "error":
        return printable(f"{name} raised {operation.error}{where}")
    if origin.cause == "tensor":
        return printable(
            f"{_named(origin.tensor)} was not finite before the step; {name} read it first{where}"
        )
    return printable(f"{name} made the first NaN or infinity{where}")


def render_unusual(trace: Trace, found: UnusualStep) -> str:
    """Render the operations of a step whose results are outside of their usual range: the first one, and the farthest ones.

    Args:
        trace: The trace that it is about.
        found: What `watchstep.trace.unusual.unusual_operations` returned.
    """
    return "\n".join(map(printable, _unusual_lines(trace, found))) + "\n"


def _unusual_lines(trace: Trace, found: UnusualStep) -> Iterator[str]:
    steps = f"{found.earlier[0]} to {found.earlier[-1]}" if found.earlier else "none"
    if not found.operations:
        yield f"no result of step {found.step} is four times larger or smaller than in the traced steps before it ({steps}): {found.compared} compared"
    else:
        first = found.operations[0]
        yield f"first unusual operation: {_title(first.operation)}"
        yield from _site_lines(trace, first.operation)
        yield f"  {_range(first)} in steps {steps}"
        farthest = sorted(found.operations, key=lambda each: -each.factor)[:_MAX_OTHERS]
        yield f"{len(found.operations)} of {found.compared} results are unusual; the farthest:"
        for each in farthest:
            site = trace.line_of(each.operation)
            yield f"  {each.factor:8.3g} times {_title(each.operation)}{'' if site is None else f' at {site}'}"
    if found.samples:
        shares = ", ".join(f"row {each.row}: {each.share:.0%}" for each in found.samples)
        yield f"samples with the largest shares of the loss of step {found.step}: {shares}"


def _range(unusual: UnusualOperation) -> str:
    return f"root mean square {unusual.size:.4g}, usually {unusual.low:.4g} to {unusual.high:.4g}"


def suspects(worker: int) -> str:
    """Return what to suspect if a step is finite when it is computed again from the same inputs."""
    return (
        f"suspect the hardware of {socket.gethostname()} (rank {worker}), a race between threads, "
        "or state of the program such as a counter"
    )


def render_trace_difference(trace: Trace, difference: TraceDifference) -> str:
    """Render the first operation that differs.

    Args:
        trace: The first of the two traces; it has the source lines.
        difference: Of the two traces.
    """
    return "\n".join(map(printable, _difference_lines(trace, difference))) + "\n"


def trace_difference_data(trace: Trace, difference: TraceDifference) -> dict[str, Any]:
    """Return a comparison as JSON data, with the source lines of the first trace."""
    return {
        "first": None if difference.first is None else _first_data(trace, difference.first),
        "parts_first": difference.parts_first,
        "partings": [
            {
                "step": parting.step,
                "only_a": [_place_data(trace, each) for each in parting.only_a],
                "only_b": [each.name for each in parting.only_b],
                "meets": parting.meets,
            }
            for parting in difference.partings
        ],
        "compared": difference.compared,
        "without_figures": difference.without_figures,
        "steps": list(difference.steps),
        "notes": list(difference.notes),
    }


def _first_data(trace: Trace, first: OperationDifference) -> dict[str, Any]:
    return {
        "kind": first.kind,
        "operation": _place_data(trace, first.a),
        "position": first.position,
        "figure": first.figure,
        "a": first.value_a,
        "b": first.value_b,
    }


def _place_data(trace: Trace, operation: Operation) -> dict[str, Any]:
    site = trace.line_of(operation)
    return {
        "index": operation.index,
        "step": operation.step,
        "phase": operation.phase,
        "name": operation.name,
        "module": operation.module,
        "node": operation.node,
        "line": None
        if site is None
        else {"file": site.file, "line": site.line, "function": site.function, "text": trace.text_of(site)},
    }


_KINDS = {
    "result": "it computed another {figure} of output {position} from equal inputs: {a} and {b}",
    "random": "it drew other random numbers: {figure} of output {position} is {a} and {b}",
    "input": "its input {position} has other values, which no traced operation wrote: {figure} {a} and {b}",
    "number": "number {position} among its arguments is {a} and {b}",
}


def _difference_lines(trace: Trace, difference: TraceDifference) -> Iterator[str]:
    if difference.parts_first:
        yield from _parting_lines(trace, difference.partings[0])
    if difference.first is not None:
        yield from _first_lines(trace, difference.first)
    if not difference.differs:
        yield f"no difference in {difference.compared} operations of {len(difference.steps)} step(s)"
    later = difference.partings[1 if difference.parts_first else 0 :]
    if later:
        yield f"the sequences of operations part at {len(later)} further place(s), first in step {later[0].step}"
    if difference.without_figures:
        yield f"{difference.without_figures} operation(s) were not compared: the traces say nothing about their results"
    yield from difference.notes[:_MAX_OTHERS]


def _first_lines(trace: Trace, first: OperationDifference) -> Iterator[str]:
    yield f"first different operation: {_title(first.a)}"
    forward = _forward_of(trace, first.a)
    if forward is not None:
        yield f"  backward of {forward.name}, in {first.a.node}"
    yield from _site_lines(trace, first.a)
    values = {"figure": first.figure, "position": first.position, "a": first.value_a, "b": first.value_b}
    yield f"  {_KINDS[first.kind].format(**values)}"
    tensors = first.a.inputs if first.kind == "input" else first.a.outputs
    if first.kind != "number" and first.position < len(tensors) and tensors[first.position].name:
        yield f"  tensor {tensors[first.position].name}"


def _parting_lines(trace: Trace, parting: TraceParting) -> Iterator[str]:
    yield f"the sequences of operations part in step {parting.step}"
    for name, operations in (("A", parting.only_a), ("B", parting.only_b)):
        if operations:
            more = f", and {len(operations) - 1} more" if len(operations) > 1 else ""
            yield f"  only {name}: {_title(operations[0])}{more}"
    if parting.only_a:
        yield from _site_lines(trace, parting.only_a[0])
    if not parting.meets:
        yield "  they do not meet again in this step"


def _site_lines(trace: Trace, operation: Operation) -> Iterator[str]:
    if (site := trace.line_of(operation)) is not None:
        yield f"  at {site}"
        if text := trace.text_of(site):
            yield f"      {text}"


def _lines(trace: Trace, diagnosis: Diagnosis, *, verbose: bool) -> Iterator[str]:
    first = diagnosis.first
    if first is None:
        yield _nothing_found(trace)
    else:
        yield from _origin_lines(trace, first, verbose=verbose)
    if diagnosis.others:
        yield f"{len(diagnosis.others)} further operation(s) made non-finite values after it"
        if verbose:
            yield from (f"  {_title(origin.operation)}" for origin in diagnosis.others)
    if diagnosis.contained:
        yield f"{len(diagnosis.contained)} operation(s) made non-finite values that reached nothing"
        if verbose:
            yield from (f"  {_title(operation)}" for operation in diagnosis.contained)
    if trace.left_out:
        yield f"{trace.left_out} operations were left out by filters or the ring; an earlier origin may be among them"
    yield from trace.notes[:_MAX_OTHERS]


def _nothing_found(trace: Trace) -> str:
    if not trace.mode.has_health:
        return f"the trace was recorded in mode {trace.mode.value}, which finds no non-finite values"
    return f"no non-finite value reached a loss, a gradient, a parameter or an output in {len(trace.operations)} operations"


def _origin_lines(trace: Trace, origin: BadOrigin, *, verbose: bool) -> Iterator[str]:
    operation = origin.operation
    what = {
        "operation": "first bad operation",
        "tensor": "first operation that read a bad tensor",
        "error": "operation that raised",
    }
    yield f"{what[origin.cause]}: {_title(operation)}"
    if operation.error:
        yield f"  raised {operation.error}"
    forward = _forward_of(trace, operation)
    if forward is not None:
        yield f"  backward of {forward.name}, in {operation.node}"
    yield from _site_lines(trace, operation)
    if verbose:
        yield from (f"  called from {caller}" for caller in trace.stack_of(operation)[1:])
    for place, tensor in enumerate(operation.inputs):
        yield f"  input {place}: {_described(tensor)}"
    for place, tensor in enumerate(operation.outputs):
        yield f"  output {place}: {_described(tensor)}"
    if origin.cause == "tensor" and origin.tensor is not None:
        yield f"  {_named(origin.tensor)} was not finite before the step"
    yield f"  reached: {origin.reaches}"


def _title(operation: Operation) -> str:
    module = f" in {operation.module}" if operation.module else ""
    return f"{operation.name} (operation {operation.index}, step {operation.step}, {operation.phase}{module})"


def _forward_of(trace: Trace, operation: Operation) -> Operation | None:
    if operation.forward is None:
        return None
    return next((each for each in trace.operations if each.index == operation.forward), None)


def _named(tensor: TracedTensor | None) -> str:
    if tensor is None:
        return "a tensor"
    return tensor.name or f"a tensor ({_described(tensor)})"


def _described(tensor: TracedTensor) -> str:
    name = f"{tensor.name}, " if tensor.name else ""
    text = f"{name}{tensor.dtype or 'tensor'} {tensor.shape_text}"
    if tensor.health is not None:
        return f"{text}: {tensor.health}"
    return text if tensor.nonfinite is None else f"{text}: {'not finite' if tensor.nonfinite else 'finite'}"
