"""The first bad operation of a trace: where the non-finite values began that reached a loss, a gradient or a parameter.

The search starts at what was damaged (a gradient, else the loss, else a parameter or buffer, else an output of the model) and goes back
through the inputs that were not finite, until an operation has only finite inputs, or until a tensor was not finite when the step began.
Values that were damaged and then removed, as by ``torch.where``, reach nothing and are not reported.

Infinity that the program wrote is not a fault: a mask with -inf is filled in (``masked_fill``), read from a buffer, or passed to the
model. NaN that arises from such a mask, as in a softmax over a row without any element, is one; its origin is
the operation that made NaN of it.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from watchstep.trace.operations import Operation, Trace, TracedTensor

Cause = Literal["operation", "tensor", "error"]
_GRADIENT = ":gradient"
_EXAMINED = 200_000
"""Maximum number of (operation, input) pairs that a search goes through."""


@dataclass(frozen=True)
class BadOrigin:
    """Where non-finite values began.

    Attributes:
        cause: ``operation``: it made them from finite inputs. ``tensor``: a tensor was not finite when the step began, and the operation
            read it first. ``error``: the operation raised.
        operation: the operation.
        tensor: the tensor that was not finite when the step began; the output for ``operation``; None for ``error``.
        reaches: what was damaged, e.g. ``gradient of fc.weight``; empty if nothing was.
    """

    cause: Cause
    operation: Operation
    tensor: TracedTensor | None
    reaches: str


@dataclass(frozen=True)
class Diagnosis:
    """What a trace says about non-finite values.

    Attributes:
        first: the first bad operation; None if no damage was found.
        others: further origins that reached something, in the order of the operations.
        contained: operations that made non-finite values which reached nothing, in order.
    """

    first: BadOrigin | None
    others: tuple[BadOrigin, ...] = ()
    contained: tuple[Operation, ...] = ()


def diagnose(trace: Trace, step: int | None = None) -> Diagnosis:
    """Find the first bad operation.

    Args:
        trace: The trace, recorded in a mode with health.
        step: The step to examine; by default the first one with damage.
    """
    steps = trace.steps if step is None else [step]
    contained: list[Operation] = []
    for number in steps:
        found = _diagnose_step(trace, number)
        if found.first is not None:
            return Diagnosis(found.first, found.others, (*contained, *found.contained))
        contained.extend(found.contained)
    return Diagnosis(None, (), tuple(contained))


def _diagnose_step(trace: Trace, step: int) -> Diagnosis:
    search = _Search([operation for operation in trace.operations if operation.step == step])
    origins: dict[int, BadOrigin] = {}
    for damaged in search.damages(trace.losses):
        for origin in search.origins(damaged):
            origins.setdefault(origin.operation.index, origin)
        if origins:
            break
    ordered = [origins[index] for index in sorted(origins)]
    # An exception that the program handles is no fault.
    errors = [operation for operation in search.operations if operation.error and step in trace.raised]
    if not ordered and errors:
        ordered = [BadOrigin("error", errors[-1], None, "the exception that the program raised")]
    named = {origin.operation.index for origin in ordered}
    contained = tuple(operation for operation in search.starting() if operation.index not in named)
    return Diagnosis(ordered[0] if ordered else None, tuple(ordered[1:]), contained)


class _Search:
    """The operations of one step, with the writers of each tensor."""

    def __init__(self, operations: list[Operation]) -> None:
        self.operations = operations
        self._place = {operation.index: place for place, operation in enumerate(operations)}
        self._writers: dict[int, list[int]] = {}
        self._bad_writers: dict[int, list[int]] = {}
        for place, operation in enumerate(operations):
            if not operation.is_view:
                for output in operation.outputs:
                    self._writers.setdefault(output.id, []).append(place)
                    if output.nonfinite:
                        self._bad_writers.setdefault(output.id, []).append(place)
        self._intended: dict[int, bool] = {}

    def damages(self, losses: Iterable[tuple[int, int]]) -> Iterator[list[tuple[Operation, str]]]:
        """Yield what was damaged, of one kind after the other, with the operations that show it. Most important first."""
        bad = [
            (operation, output.name)
            for operation in self.operations
            for output in operation.outputs
            if output.nonfinite and output.name
        ]
        damaged = [
            (operation, f"gradient of {name.removesuffix(_GRADIENT)}")
            for operation, name in bad
            if name.endswith(_GRADIENT)
        ]
        for tensor, index in losses:
            if (
                index in self._place
                and (writer := self._writer_place(tensor, self._place[index])) is not None
            ):
                damaged.extend([(self.operations[writer], "loss")] if self.operations[writer].is_bad else [])
        yield damaged
        yield [
            (operation, name)
            for operation, name in bad
            if not operation.is_view and not name.endswith(_GRADIENT) and not _is_argument(name)
        ]
        yield [(operation, name) for operation, name in bad if _is_argument(name)]
        if not any(operation.phase == "backward" for operation in self.operations):
            last = next((operation for operation in reversed(self.operations) if operation.outputs), None)
            yield [(last, "last result")] if last is not None and last.is_bad else []

    def origins(self, damaged: list[tuple[Operation, str]]) -> Iterator[BadOrigin]:
        """Yield the origins of what was damaged, in no order."""
        waiting = [(self._place[operation.index], name) for operation, name in damaged]
        seen: set[int] = set()
        examined = 0
        while waiting and examined < _EXAMINED:
            place, reaches = waiting.pop()
            if place in seen:
                continue
            seen.add(place)
            operation = self.operations[place]
            culprits = self._culprits(operation, place)
            if not culprits and not self._is_intended(place):
                output = next(output for output in operation.outputs if output.nonfinite)
                yield BadOrigin("operation", operation, output, reaches)
            for culprit in culprits:
                examined += 1
                writer = self._bad_writer_place(culprit.id, place)
                if writer is None:
                    yield BadOrigin("tensor", operation, culprit, reaches)
                else:
                    waiting.append((writer, reaches))

    def starting(self) -> Iterator[Operation]:
        """Yield the operations with bad outputs, no bad inputs and no infinity that the program wrote."""
        for place, operation in enumerate(self.operations):
            if operation.phase == "optimizer":  # its state is not checked, so its inputs are not known
                continue
            if (
                operation.is_bad
                and not operation.is_view
                and not self._bad_inputs(operation, place)
                and not self._is_intended(place)
            ):
                yield operation

    def _culprits(self, operation: Operation, place: int) -> list[TracedTensor]:
        """The inputs that explain an operation's bad outputs."""
        bad = self._bad_inputs(operation, place)
        if _has_nan(operation.outputs):
            with_nan = [tensor for tensor in bad if self._may_have_nan(tensor, place)]
            if with_nan:
                return with_nan
        return [tensor for tensor in bad if not self._is_intended_input(tensor, place)]

    def _may_have_nan(self, tensor: TracedTensor, place: int) -> bool:
        if tensor.health is not None:
            return bool(tensor.health.nan)
        writer = self._bad_writer_place(tensor.id, place)
        return writer is None or _has_nan(self.operations[writer].outputs)

    def _bad_inputs(self, operation: Operation, place: int) -> list[TracedTensor]:
        bad = []
        written = {output.id for output in operation.outputs}
        for tensor in operation.inputs:
            if tensor.health is not None and (tensor.id not in written or operation.is_view):
                is_bad = not tensor.health.is_finite
            else:  # changed in place, so what was written before decides
                is_bad = self._was_bad(tensor, place)
            if is_bad:
                bad.append(tensor)
        return bad

    def _was_bad(self, tensor: TracedTensor, place: int) -> bool:
        """Whether a tensor had values that are not finite before an operation: none that wrote as many elements has replaced them since."""
        writers = self._writers.get(tensor.id, [])
        for writer in reversed(writers[: bisect.bisect_left(writers, place)]):
            outputs = [output for output in self.operations[writer].outputs if output.id == tensor.id]
            if any(output.nonfinite for output in outputs):
                return True
            if any(math.prod(output.shape) >= math.prod(tensor.shape) for output in outputs):
                return False
        return bool(tensor.nonfinite)

    def _is_intended_input(self, tensor: TracedTensor, place: int) -> bool:
        writer = self._bad_writer_place(tensor.id, place)
        if writer is not None:
            return self._is_intended(writer)
        health = tensor.health
        return health is not None and not health.nan and not health.positive_infinite

    def _is_intended(self, place: int) -> bool:
        """Whether an operation's outputs are infinite because the program wrote so."""
        # Without recursion, since masks may pass through many operations.
        chain = [place]
        while chain:
            current = chain[-1]
            if current in self._intended:
                chain.pop()
                continue
            operation = self.operations[current]
            if not operation.is_bad or _has_nan(operation.outputs):
                self._intended[current] = False
            elif operation.is_constant or (operation.infinite_argument and _is_fill(operation)):
                self._intended[current] = True
            else:
                bad = self._bad_inputs(operation, current)
                writers = [
                    writer
                    for tensor in bad
                    if (writer := self._bad_writer_place(tensor.id, current)) is not None
                ]
                waiting = [writer for writer in writers if writer not in self._intended]
                if waiting:
                    chain.extend(waiting)
                    continue
                self._intended[current] = bool(bad) and all(
                    self._is_intended_input(tensor, current) for tensor in bad
                )
        return self._intended[place]

    def _writer_place(self, tensor: int, place: int) -> int | None:
        """The place of the last operation before another one that wrote a tensor's memory."""
        writers = self._writers.get(tensor, [])
        position = bisect.bisect_left(writers, place)
        return writers[position - 1] if position else None

    def _bad_writer_place(self, tensor: int, place: int) -> int | None:
        """The place of the last operation before another one that wrote non-finite values to a tensor's memory."""
        writers = self._bad_writers.get(tensor, [])
        position = bisect.bisect_left(writers, place)
        return writers[position - 1] if position else None


_FILLS = frozenset(
    [
        "masked_fill",
        "masked_fill_",
        "full",
        "full_like",
        "new_full",
        "fill",
        "fill_",
        "where",
        "scalar_tensor",
        "clamp",
        "clamp_",
        "clamp_min",
        "clamp_max",
        "constant_pad_nd",
        "index_fill",
        "index_fill_",
    ]
)
"""Operations that write a number as it is, without arithmetic."""


def _is_argument(name: str) -> bool:
    """Whether a name is that of an argument or output of the model, as ``input[0]`` and ``output``."""
    return name == "output" or name.startswith(("input[", "output["))


def _is_fill(operation: Operation) -> bool:
    return operation.name.split(".")[1:2] != [] and operation.name.split(".")[1] in _FILLS


def _has_nan(tensors: Iterable[TracedTensor]) -> bool:
    """Whether NaN is among the elements, or may be, because only ``nonfinite`` is known."""
    return any(tensor.nonfinite and (tensor.health is None or tensor.health.nan) for tensor in tensors)
