"""Alerts of a trace: each recorded output that was not finite, in the order in which the operations ran.

They correspond to ``InfNanAlert`` of TensorFlow's Debugger V2, for traces of any program. Which of them is the first bad operation, and
which reached nothing, is what `watchstep.trace.diagnose` finds out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from watchstep.trace.operations import Operation, Trace, TracedTensor


@dataclass(frozen=True, slots=True)
class InfNanAlert:
    """An output with NaN or infinity.

    Attributes:
        operation: index of the operation.
        output: number of its output.
        name: name of the operation.
        elements: number of elements; None if it was not recorded.
        nan: number of NaN; None if it was not counted.
        positive_infinite: number of +inf; None if it was not counted.
        negative_infinite: number of -inf; None if it was not counted.
    """

    operation: int
    output: int
    name: str
    elements: int | None = None
    nan: int | None = None
    positive_infinite: int | None = None
    negative_infinite: int | None = None


def alerts_of(trace: Trace, limit: int | None = None) -> list[InfNanAlert]:
    """Return the alerts of a trace.

    Args:
        trace: The trace, recorded in a mode with health.
        limit: Maximum number; None for all.
    """
    return list(itertools.islice(_alerts(trace), limit))


def _alerts(trace: Trace) -> Iterator[InfNanAlert]:
    for operation in trace.operations:
        for place, output in enumerate(operation.outputs):
            if output.nonfinite:
                yield _alert(operation, place, output)


def _alert(operation: Operation, place: int, output: TracedTensor) -> InfNanAlert:
    health = output.health
    if health is None:
        return InfNanAlert(operation.index, place, operation.name)
    if not health.is_exact:
        return InfNanAlert(operation.index, place, operation.name, health.elements)
    return InfNanAlert(
        operation.index,
        place,
        operation.name,
        health.elements,
        health.nan,
        health.positive_infinite,
        health.negative_infinite,
    )
