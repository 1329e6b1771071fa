"""The first bad operation of a trace: where the non-finite values began that reached a loss, a gradient or a parameter.

The search starts at what was damaged (a gradient, else the loss, else a parameter or buffer, else an output of the model) and goes back
through the inputs that were not finite, until an operation has only finite inputs, or until a tensor was not finite when the step began.
Values that were damaged and then removed, as by ``torch.where``, reach nothing and are not reported.

Infinity that the program wrote is not a fault: a mask with -inf is filled in (``masked_fill``), read from a buffer, or passed to the
model. NaN that arises from such a mask, as in a softmax over a row without any element, is one; its origin is
the operation that made NaN of it. Infinity is a mask only as long as operations select it, add finite values to it, scale it, or ignore it, as a
softmax does. Other arithmetic with -inf that was there when the step began is a fault of that tensor, as of a sample with log(0). So is any
arithmetic with -inf in a parameter that is trained, +inf that is made of -inf, and any infinity in a loss or gradient.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Literal

from watchstep.trace.operation_kinds import OperationKind, is_elementwise, kind_of, may_mask
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
            is the first one that read it with a result that is not finite. ``error``: the operation raised.
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


class _Infinity(IntEnum):
    """Where infinity in a tensor comes from. Of several, the highest counts.

    Attributes:
        WRITTEN: the program wrote it in this step, or an operation like softmax has read it as a mask.
        GIVEN: it was in a tensor when the step began, and may be a mask; all of it is -inf.
        TRAINED: as GIVEN, in a parameter that is trained.
        FAULT: anything else.
    """

    WRITTEN = 0
    GIVEN = 1
    TRAINED = 2
    FAULT = 3


class _Search:
    """The operations of one step, with the writers of each tensor. Operations are identified by their place in the step."""

    def __init__(self, operations: list[Operation]) -> None:
        self.operations = operations
        self._place = {operation.index: place for place, operation in enumerate(operations)}
        self._writers: dict[int, list[int]] = {}
        self._bad_writers: dict[int, list[int]] = {}
        self._first_changes: dict[int, int] = {}  # id → place of the first writer that is no optimizer
        self._trained: set[str] = set()
        for place, operation in enumerate(operations):
            for output in operation.outputs:
                if output.name.endswith(_GRADIENT):
                    self._trained.add(output.name.removesuffix(_GRADIENT))
                elif operation.phase == "optimizer" and output.name:
                    self._trained.add(output.name)
                if not operation.is_view:
                    self._writers.setdefault(output.id, []).append(place)
                    if operation.phase != "optimizer":
                        self._first_changes.setdefault(output.id, place)
                    if output.nonfinite:
                        self._bad_writers.setdefault(output.id, []).append(place)
        self._states = self._bad_states()
        self._infinities: dict[int, _Infinity] = {}

    def _bad_states(self) -> dict[int, tuple[Operation, TracedTensor]]:
        """Return state of optimizers that was bad before their steps and what they made of it, by id, with its first reader: that arithmetic is not checked."""
        states: dict[int, tuple[Operation, TracedTensor]] = {}
        for place, operation in enumerate(self.operations):
            if operation.phase != "optimizer":
                continue
            for tensor in operation.inputs:
                if tensor.nonfinite and self._writer_place(tensor.id, place) is None:
                    states.setdefault(tensor.id, (operation, tensor))
            count = len(operation.outputs)
            for position, output in enumerate(operation.outputs):
                # Operations on lists read one tensor of each list for each output.
                is_list = count > 1 and len(operation.inputs) % count == 0
                read = operation.inputs[position::count] if is_list else operation.inputs
                source = next((states[tensor.id] for tensor in read if tensor.id in states), None)
                if source is not None:
                    states.setdefault(output.id, source)
        return states

    def damages(self, losses: Iterable[tuple[int, int]]) -> Iterator[list[tuple[int, str]]]:
        """Yield what was damaged, of one kind after the other, with the places of operations that show it. Most important first."""
        bad = [
            (place, output.name)
            for place, operation in enumerate(self.operations)
            for output in operation.outputs
            if output.name and (output.nonfinite or self._is_bad_gradient(operation, output, place))
        ]
        damaged = [
            (place, f"gradient of {name.removesuffix(_GRADIENT)}")
            for place, name in bad
            if name.endswith(_GRADIENT)
        ]
        for tensor, index in losses:
            writer = self._writer_place(tensor, self._place[index]) if index in self._place else None
            if writer is not None and self.operations[writer].is_bad:
                damaged.append((writer, "loss"))
        yield damaged
        # A mask is no damage where it is kept, passed on or returned.
        bad = [(place, name) for place, name in bad if self._infinity(place) is _Infinity.FAULT]
        yield [
            (place, name)
            for place, name in bad
            if not self.operations[place].is_view and not name.endswith(_GRADIENT) and not _is_argument(name)
        ]
        yield [(place, name) for place, name in bad if _is_argument(name)]
        if not any(operation.phase == "backward" for operation in self.operations):
            places = range(len(self.operations) - 1, -1, -1)
            last = next((place for place in places if self.operations[place].outputs), None)
            is_fault = last is not None and self._infinity(last) is _Infinity.FAULT
            yield [(last, "last result")] if last is not None and is_fault else []

    def _is_bad_gradient(self, operation: Operation, output: TracedTensor, place: int) -> bool:
        """Whether an unchecked output is a gradient in memory with bad values. On devices only what wrote the memory is checked."""
        is_unchecked = operation.is_view and output.nonfinite is None and output.name.endswith(_GRADIENT)
        return is_unchecked and self._was_bad(output, place)

    def origins(self, damaged: list[tuple[int, str]]) -> Iterator[BadOrigin]:
        """Yield the origins of what was damaged, in no order."""
        waiting = list(damaged)
        seen: set[int] = set()
        examined = 0
        while waiting and examined < _EXAMINED:
            place, reaches = waiting.pop()
            if place in seen:
                continue
            seen.add(place)
            operation = self.operations[place]
            culprits = self._culprits(operation, place)
            output = next((output for output in operation.outputs if output.nonfinite), None)
            if not culprits and output is not None:
                yield BadOrigin("operation", operation, output, reaches)
            for culprit in culprits:
                examined += 1
                writer = self._bad_writer_place(culprit.id, place)
                if writer is None:
                    readers = self._first_readers.get(culprit.id) or self._states.get(culprit.id)
                    reader, tensor = readers or (operation, culprit)
                    yield BadOrigin("tensor", reader, tensor, reaches)
                else:
                    waiting.append((writer, reaches))

    @cached_property
    def _first_readers(self) -> dict[int, tuple[Operation, TracedTensor]]:
        """The first operation with a bad result that read each tensor that was bad when the step began, and what it read, by id."""
        readers: dict[int, tuple[Operation, TracedTensor]] = {}
        for place, operation in enumerate(self.operations):
            if operation.is_bad and not operation.is_view and operation.phase != "optimizer":
                for tensor in self._bad_inputs(operation, place):
                    if self._bad_writer_place(tensor.id, place) is None:
                        readers.setdefault(tensor.id, (operation, tensor))
        return readers

    def starting(self) -> Iterator[Operation]:
        """Yield the operations with bad outputs, no bad inputs and no infinity that the program wrote."""
        for place, operation in enumerate(self.operations):
            if operation.phase == "optimizer":  # its state is not checked, so its inputs are not known
                continue
            if (
                operation.is_bad
                and not operation.is_view
                and not self._bad_inputs(operation, place)
                and self._infinity(place) is _Infinity.FAULT
            ):
                yield operation

    def _culprits(self, operation: Operation, place: int) -> list[TracedTensor]:
        """The inputs that explain an operation's bad outputs, which are a fault or become one."""
        bad = self._bad_inputs(operation, place)
        has_nan = _has_nan(operation.outputs)
        if has_nan:
            with_nan = [tensor for tensor in bad if self._may_have_nan(tensor, place)]
            if with_nan:
                return with_nan
        read = [(tensor, self._infinity_read(operation, tensor, place)) for tensor in bad]
        faults = [tensor for tensor, infinity in read if infinity is _Infinity.FAULT]
        if faults:
            return sorted(faults, key=_may_be_mask)  # NaN and +inf say more
        kind = kind_of(operation)
        # A row that is masked completely: what made NaN of the mask is at fault, not the mask.
        reads_masks = kind in {OperationKind.FILL, OperationKind.SELECTION, OperationKind.ADDITION}
        if (
            kind is OperationKind.SOFTMAX
            or (has_nan and reads_masks)
            or _makes_more_infinities(operation, bad)
        ):
            return []
        return [tensor for tensor, infinity in read if infinity is not _Infinity.WRITTEN]

    def _may_have_nan(self, tensor: TracedTensor, place: int) -> bool:
        if tensor.health is not None:
            return bool(tensor.health.nan)
        writer = self._bad_writer_place(tensor.id, place)
        return writer is None or _has_nan(self.operations[writer].outputs)

    def _bad_inputs(self, operation: Operation, place: int) -> list[TracedTensor]:
        bad = []
        written = {output.id for output in operation.outputs}
        for tensor in operation.inputs:
            if operation.phase == "optimizer" and (
                tensor.id in self._states or self._was_read_bad(tensor, place)
            ):
                is_bad = True
            elif tensor.health is not None and (tensor.id not in written or operation.is_view):
                is_bad = not tensor.health.is_finite
            else:  # changed in place, so what was written before decides
                is_bad = self._was_bad(tensor, place)
            if is_bad and _may_remain(operation, tensor):
                bad.append(tensor)
        return bad

    def _was_read_bad(self, tensor: TracedTensor, place: int) -> bool:
        """Whether a parameter was bad where it was read before its optimizer's step, and only optimizers changed it since."""
        is_changed = self._first_changes.get(tensor.id, place) < place
        return not is_changed and tensor.id in self._first_readers

    def _was_bad(self, tensor: TracedTensor, place: int) -> bool:
        """Whether a tensor had values that are not finite before an operation: none that wrote as many elements has replaced them since."""
        writers = self._writers.get(tensor.id, [])
        for position in range(bisect.bisect_left(writers, place) - 1, -1, -1):
            outputs = [
                output for output in self.operations[writers[position]].outputs if output.id == tensor.id
            ]
            if any(output.nonfinite for output in outputs):
                return True
            if any(math.prod(output.shape) >= math.prod(tensor.shape) for output in outputs):
                return False
        return bool(tensor.nonfinite)

    def _infinity_read(self, operation: Operation, tensor: TracedTensor, place: int) -> _Infinity:
        """Where infinity in an input comes from, as far as the operation may read it as a mask."""
        writer = self._bad_writer_place(tensor.id, place)
        if writer is not None:
            infinity = self._infinity(writer)
        elif not _may_be_mask(tensor):
            infinity = _Infinity.FAULT
        else:
            infinity = _Infinity.TRAINED if tensor.name in self._trained else _Infinity.GIVEN
        if infinity is _Infinity.WRITTEN:
            return infinity
        kind = kind_of(operation)
        if kind in {OperationKind.FILL, OperationKind.SELECTION}:
            return infinity
        is_mask = kind is not OperationKind.ARITHMETIC and may_mask(operation, tensor)
        return infinity if is_mask and infinity is _Infinity.GIVEN else _Infinity.FAULT

    def _infinity(self, place: int) -> _Infinity:
        """Where infinity in an operation's outputs comes from. NaN is a fault."""
        # Without recursion, since masks may pass through many operations.
        chain = [place]
        while chain:
            current = chain[-1]
            if current in self._infinities:
                chain.pop()
                continue
            operation = self.operations[current]
            kind = kind_of(operation)
            if not operation.is_bad or _has_nan(operation.outputs):
                self._infinities[current] = _Infinity.FAULT
            elif operation.is_constant:
                self._infinities[current] = _Infinity.WRITTEN
            elif kind is OperationKind.ARITHMETIC:
                self._infinities[current] = _Infinity.FAULT
            else:
                bad = self._bad_inputs(operation, current)
                waiting = [
                    writer
                    for tensor in bad
                    if (writer := self._bad_writer_place(tensor.id, current)) is not None
                    and writer not in self._infinities
                ]
                if waiting:
                    chain.extend(waiting)
                else:
                    self._infinities[current] = self._infinity_passed(operation, bad, current)
        return self._infinities[place]

    def _infinity_passed(self, operation: Operation, bad: list[TracedTensor], place: int) -> _Infinity:
        """Where infinity in the outputs of an operation that may pass it on comes from."""
        kind = kind_of(operation)
        if kind is OperationKind.FILL:
            written = [_Infinity.WRITTEN]
        elif not bad or self._makes_positive(operation, bad, place) or _makes_more_infinities(operation, bad):
            return _Infinity.FAULT
        else:
            written = []
        highest = max(written + [self._infinity_read(operation, tensor, place) for tensor in bad])
        is_mask = kind is OperationKind.SOFTMAX and highest is _Infinity.GIVEN
        return _Infinity.WRITTEN if is_mask else highest

    def _makes_positive(self, operation: Operation, bad: list[TracedTensor], place: int) -> bool:
        """Whether an operation makes +inf of -inf alone."""
        return _has_positive(operation.outputs) and not any(
            self._may_have_positive(tensor, place) for tensor in bad
        )

    def _may_have_positive(self, tensor: TracedTensor, place: int) -> bool:
        if tensor.health is not None:
            return bool(tensor.health.positive_infinite)
        writer = self._bad_writer_place(tensor.id, place)
        return writer is None or _has_positive(self.operations[writer].outputs)

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


def _is_argument(name: str) -> bool:
    """Whether a name is that of an argument or output of the model, as ``input[0]`` and ``output``."""
    return name == "output" or name.startswith(("input[", "output["))


def _has_nan(tensors: Iterable[TracedTensor]) -> bool:
    """Whether NaN is among the elements, or may be, because only ``nonfinite`` is known."""
    return any(tensor.nonfinite and (tensor.health is None or tensor.health.nan) for tensor in tensors)


def _may_be_mask(tensor: TracedTensor) -> bool:
    """Whether -inf is all that is not finite."""
    return tensor.health is not None and not tensor.health.nan and not tensor.health.positive_infinite


def _has_positive(tensors: Iterable[TracedTensor]) -> bool:
    """Whether +inf is among the elements, or may be, because only ``nonfinite`` is known."""
    return any(
        tensor.nonfinite and (tensor.health is None or tensor.health.positive_infinite) for tensor in tensors
    )


def _may_remain(operation: Operation, tensor: TracedTensor) -> bool:
    """Whether values of an input that are not finite may be in the outputs of an operation that fills in numbers."""
    health = tensor.health
    if health is None or health.nan or kind_of(operation) is not OperationKind.FILL:
        return True
    counts = [output.health for output in operation.outputs]
    return any(
        found is None
        or found.nan
        or (found.positive_infinite and health.positive_infinite)
        or (found.negative_infinite and health.negative_infinite)
        for found in counts
    )


def _makes_more_infinities(operation: Operation, bad: list[TracedTensor]) -> bool:
    """Whether an operation has overflowed: more elements are infinite than those that it read explain."""
    if not is_elementwise(operation) or not operation.outputs:
        return False
    made = operation.outputs[0].health
    if made is None or made.nan or not made.is_exact:
        return False
    explained = 0
    for tensor in bad:
        if tensor.health is None or not tensor.health.is_exact or not tensor.health.elements:
            return False
        # A smaller input is repeated over the output.
        explained += math.ceil(tensor.health.infinite * made.elements / tensor.health.elements)
    return made.infinite > explained
