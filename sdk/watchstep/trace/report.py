"""A diagnosis as text: the first bad operation, its source line, its inputs, and what it reached."""

from __future__ import annotations

from collections.abc import Iterator

from watchstep.platform.terminal_text import printable
from watchstep.trace.operations import Operation, Trace, TracedTensor
from watchstep.trace.origins import BadOrigin, Diagnosis

_MAX_OTHERS = 5


def render_diagnosis(trace: Trace, diagnosis: Diagnosis, *, verbose: bool = False) -> str:
    """Render a diagnosis.

    Args:
        trace: The trace that it is about.
        diagnosis: The diagnosis.
        verbose: Whether further origins, contained values and the whole stack are shown.
    """
    return "\n".join(map(printable, _lines(trace, diagnosis, verbose=verbose))) + "\n"


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
    if (site := trace.line_of(operation)) is not None:
        yield f"  at {site}"
        if text := trace.text_of(site):
            yield f"      {text}"
    if verbose:
        yield from (f"  called from {caller}" for caller in trace.stack_of(operation)[1:])
    for place, tensor in enumerate(operation.inputs):
        yield f"  input {place}: {_described(tensor)}"
    for place, tensor in enumerate(operation.outputs):
        yield f"  output {place}: {_described(tensor)}"
    if origin.cause == "tensor" and origin.tensor is not None:
        yield f"  {origin.tensor.name or f'tensor {origin.tensor.id}'} was not finite before the step"
    yield f"  reached: {origin.reaches}"


def _title(operation: Operation) -> str:
    module = f" in {operation.module}" if operation.module else ""
    return f"{operation.name} (operation {operation.index}, step {operation.step}, {operation.phase}{module})"


def _forward_of(trace: Trace, operation: Operation) -> Operation | None:
    if operation.forward is None:
        return None
    return next((each for each in trace.operations if each.index == operation.forward), None)


def _described(tensor: TracedTensor) -> str:
    name = f"{tensor.name}, " if tensor.name else ""
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    text = f"{name}{tensor.dtype} {shape}"
    if tensor.health is not None:
        return f"{text}: {tensor.health}"
    return text if tensor.nonfinite is None else f"{text}: {'not finite' if tensor.nonfinite else 'finite'}"
