"""The first bad operation of a JAX step as an operation trace, which reports and readers of traces know."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import jax

from watchstep.jax.replay.first_bad import FirstBad, ValueFigures
from watchstep.trace.operations import Operation, Trace, TracedTensor, TraceMode, source_texts
from watchstep.trace.origins import BadOrigin, Diagnosis


def trace_of(first: FirstBad, step: int) -> tuple[Trace, Diagnosis]:
    """Return the trace of the operations that made the NaN and infinities of a step, and what it says.

    Operations have the name of their primitive with the control flow around it, as ``scan[2]/div``. The last ones stand for the result that they reached.

    Args:
        first: The first bad operation, or the first one that read a bad argument.
        step: The number of the step.
    """
    assert first.operation is not None
    numbers = itertools.count()
    arguments: dict[str, int] = {}

    def tensors(values: tuple[ValueFigures, ...]) -> Iterator[TracedTensor]:
        for value in values:
            number = arguments.setdefault(value.name, next(numbers)) if value.name else next(numbers)
            is_bad = value.health is not None and not value.health.is_finite
            yield TracedTensor(
                number, value.shape, value.dtype, name=value.name, nonfinite=is_bad, health=value.health
            )

    made = (first.operation, *first.others)
    operations = [
        Operation(
            each.index,
            step,
            each.path,
            each.phase,
            each.module,
            tuple(tensors(each.inputs)),
            tuple(tensors(each.outputs)),
            place,
        )
        for place, each in enumerate(made)
    ]
    name = _name_of(first.reaches[0])
    for place, each in enumerate(tuple(operations)):  # of several, a reader of the trace finds the first one
        bad = tuple(output for output in each.outputs if output.nonfinite)
        reached = tuple(replace(output, id=next(numbers), name=name, health=None) for output in bad[:1])
        operations.append(Operation(first.evaluated + place, step, "result", "gradients", "", bad, reached))
    trace = Trace(
        sorted(operations, key=lambda each: each.index),
        tuple(each.sites for each in made),
        source_texts(site.file for each in made for site in each.sites),
        TraceMode.FULL_HEALTH,
        program=f"jax {jax.__version__}",
        notes=(
            *first.notes,
            f"{first.evaluated} operations were evaluated; the trace has those that made the first NaN or infinity",
        ),
    )
    is_operation = first.cause == "operation"
    read = operations[0].outputs if is_operation else operations[0].inputs
    tensor = next(
        (each for each in read if each.nonfinite and (is_operation or each.name == first.argument)), None
    )
    others = tuple(BadOrigin("operation", each, None, "") for each in operations[1 : len(made)])
    origin = BadOrigin("operation" if is_operation else "tensor", operations[0], tensor, first.reaches[0])
    return trace, Diagnosis(origin, others)


def _name_of(reached: str) -> str:
    """Return the name of a result in a trace."""
    return (
        f"{reached.removeprefix('gradient of ')}:gradient" if reached.startswith("gradient of ") else reached
    )
