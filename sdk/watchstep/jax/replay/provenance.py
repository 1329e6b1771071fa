"""Where the non-finite elements of each value come from, computed while the operations are evaluated.

This is the search of `watchstep.trace.origins` from the damage backwards, in one pass: every value that is not finite has the origins of its
elements, so at the end the origins of a damaged result are known without a record of all operations. Infinity that the program wrote, or
that is in an argument, is no fault as long as operations select it, add finite values to it or scale it, as with masks of -inf.
Elementwise operations are examined element by element: an input matters only where the output is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from watchstep.jax.replay.first_bad import JaxOperation, ValueFigures
from watchstep.jax.replay.primitive_kinds import ELEMENTWISE, RESHAPES, kind_of_primitive
from watchstep.jax.replay.value_health import contents, host_values, is_checkable
from watchstep.trace.operation_kinds import OperationKind

_MAX_ORIGINS = 16
"""Largest number of origins of one value, the earliest ones."""


class InfinitySource(IntEnum):
    """Where the non-finite elements of a value come from. Of several, the highest counts.

    Attributes:
        WRITTEN: the program wrote them, as constants.
        GIVEN: they were in an argument, and have only been selected, or may be a mask of -inf.
        FAULT: anything else.
    """

    WRITTEN = 0
    GIVEN = 1
    FAULT = 2


@dataclass(frozen=True, slots=True)
class BadSource:
    """An operation that made non-finite values, or an argument that had them.

    Attributes:
        index: of the operation; -1 for an argument.
        operation: None for an argument.
        argument: its name; empty for an operation.
        figures: of the argument; None for an operation.
    """

    index: int
    operation: JaxOperation | None
    argument: str = ""
    figures: ValueFigures | None = None


@dataclass(frozen=True, slots=True)
class Provenance:
    """The origins of the non-finite elements of a value.

    Attributes:
        source: whether they are a fault.
        origins: in the order of the evaluation; empty if the program wrote them.
    """

    source: InfinitySource
    origins: tuple[BadSource, ...] = ()


WRITTEN = Provenance(InfinitySource.WRITTEN)


@dataclass(slots=True)
class Value:
    """A value of the evaluated program.

    Attributes:
        array: an array, a reference, or the literal of a jaxpr.
        provenance: None if all elements are finite, or cannot be otherwise. That of a reference changes with its contents.
        is_literal: whether it is a number in the program.
    """

    array: Any
    provenance: Provenance | None = None
    is_literal: bool = False


def merge(provenances: Iterable[Provenance | None]) -> Provenance | None:
    """Return the provenance of a value that is made of the elements of several; None if all are finite."""
    present = [each for each in provenances if each is not None]
    if not present:
        return None
    source = max(each.source for each in present)
    return Provenance(source, _joined(each.origins for each in present if each.source is source))


def explain(
    primitive: str,
    inputs: Sequence[Value],
    outputs: Sequence[Any],
    record: Callable[[], BadSource],
    note_reader: Callable[[BadSource], None],
) -> Provenance:
    """Return the provenance of the outputs of an operation, of which at least one is not finite.

    Args:
        primitive: Name of the operation.
        inputs: What it read.
        outputs: The arrays that it made.
        record: Records the operation as an origin.
        note_reader: Notes that the operation is one that made a fault of an argument.
    """
    made = _Explanation(primitive, inputs, [output for output in outputs if is_checkable(output)])
    if (passed := made.passed()) is not None:
        return passed
    culprits, is_own = made.culprits()
    origins = _joined(each.origins for each in culprits)
    for origin in origins:
        if origin.operation is None:
            note_reader(origin)
    if is_own or not origins:
        origins = _joined((origins, (record(),)))
    return Provenance(InfinitySource.FAULT, origins)


def _joined(several: Iterable[tuple[BadSource, ...]]) -> tuple[BadSource, ...]:
    unique = {(each.index, each.argument): each for origins in several for each in origins}
    return tuple(unique[key] for key in sorted(unique)[:_MAX_ORIGINS])


@dataclass(slots=True)
class _ReadValue:
    """A non-finite input where it matters: its elements that are NaN, +inf or -inf and may be in the outputs."""

    value: Value
    provenance: Provenance
    has_nan: bool
    has_positive: bool
    has_negative: bool

    @property
    def is_infinite(self) -> bool:
        return self.has_positive or self.has_negative


class _Explanation:
    """What the non-finite elements of an operation's inputs say about those of its outputs."""

    def __init__(self, primitive: str, inputs: Sequence[Value], outputs: Sequence[Any]) -> None:
        self.primitive = primitive
        self.kind = kind_of_primitive(primitive)
        arrays = [host_values(output) for output in outputs]
        self.has_nan = any(bool(np.isnan(array).any()) for array in arrays)
        self.has_positive = any(bool((array == np.inf).any()) for array in arrays if array.dtype.kind != "c")
        self.makes_bad = False  # of finite elements
        self.makes_nan = False  # of elements that are not NaN
        if primitive in ELEMENTWISE and len(arrays) == 1:
            self.read = self._read_elementwise(inputs, arrays[0])
        else:
            self.read = [each for value in inputs if (each := _read(value, None)) is not None]
            if self.kind is OperationKind.SELECTION:  # its outputs have no other elements than its inputs
                self.read = [
                    each for each in self.read if not each.has_nan or self.has_nan or each.is_infinite
                ]
            self.makes_nan = self.has_nan and not any(each.has_nan for each in self.read)

    def _read_elementwise(self, inputs: Sequence[Value], output: NDArray[Any]) -> list[_ReadValue]:
        bad_output = ~np.isfinite(output)
        explained = np.zeros(output.shape, bool)
        explained_nan = np.zeros(output.shape, bool)
        read = []
        for place, value in enumerate(inputs):
            if value.provenance is None:
                continue
            array = _aligned(host_values(value.array), output.ndim)
            matters = bad_output
            if self.primitive == "select_n":
                matters = bad_output & (_aligned(np.asarray(inputs[0].array), output.ndim) == place - 1)
            explained |= ~np.isfinite(array) & matters
            explained_nan |= np.isnan(array) & matters
            if (each := _read(value, matters, array)) is not None:
                read.append(each)
        self.makes_bad = bool((bad_output & ~explained).any())
        self.makes_nan = bool((np.isnan(output) & ~explained_nan).any())
        return read

    def passed(self) -> Provenance | None:
        """Return the provenance of outputs that are no fault; None if they are one."""
        if not self.read or self.makes_bad or self.kind is OperationKind.ARITHMETIC:
            return None
        sources = [self._source(each) for each in self.read]
        if InfinitySource.FAULT in sources:
            return None
        if self.has_nan:
            is_constant = max(sources) is InfinitySource.WRITTEN
            moves = self.primitive in RESHAPES if is_constant else self.kind is OperationKind.SELECTION
            if self.makes_nan or not moves:
                return None
        elif self._makes_positive():
            return None
        return Provenance(max(sources), _joined(each.provenance.origins for each in self.read))

    def _makes_positive(self) -> bool:
        """Whether +inf is made of -inf alone, other than by the negation of a constant."""
        if not self.has_positive or any(each.has_positive for each in self.read):
            return False
        return self.primitive != "neg"

    def _source(self, each: _ReadValue) -> InfinitySource:
        """Where non-finite elements of an input come from, as far as the operation may read them as a mask."""
        source = each.provenance.source
        if self.kind is OperationKind.SELECTION or source is InfinitySource.FAULT:
            return source
        if source is InfinitySource.WRITTEN:
            is_factor = each.value.is_literal and self.kind is OperationKind.SCALING
            return InfinitySource.FAULT if is_factor else source
        may_be_mask = self.kind is not OperationKind.ARITHMETIC and not each.has_positive and not each.has_nan
        return source if may_be_mask else InfinitySource.FAULT

    def culprits(self) -> tuple[list[Provenance], bool]:
        """Return the provenances of the inputs that explain a fault, and whether the operation itself has a part in it."""
        is_own = self.makes_bad
        faults = [each for each in self.read if self._source(each) is InfinitySource.FAULT]
        with_nan = [each for each in self.read if each.has_nan]
        if self.has_nan and with_nan:
            chosen = [*with_nan, *faults] if self.primitive in ELEMENTWISE else with_nan
            return [each.provenance for each in chosen], is_own or (self.makes_nan and not faults)
        if faults:
            return [each.provenance for each in faults], is_own
        reads_masks = self.kind in {OperationKind.SELECTION, OperationKind.ADDITION}
        given = [each for each in self.read if each.provenance.source is InfinitySource.GIVEN]
        if is_own or (self.has_nan and reads_masks) or not given:
            return [], True  # what made NaN of a mask is at fault, not the mask
        return [each.provenance for each in given], False


def _read(value: Value, matters: NDArray[Any] | None, array: NDArray[Any] | None = None) -> _ReadValue | None:
    if value.provenance is None:
        return None
    values = host_values(contents(value.array)) if array is None else array
    if matters is not None:
        values = np.broadcast_to(values, np.broadcast_shapes(values.shape, matters.shape))[matters]
    has_nan = bool(np.isnan(values).any())
    if values.dtype.kind == "c":
        infinite = bool(np.isinf(values).any())
        has_positive, has_negative = infinite, infinite
    else:
        has_positive, has_negative = bool((values == np.inf).any()), bool((values == -np.inf).any())
    if not (has_nan or has_positive or has_negative):
        return None
    return _ReadValue(value, value.provenance, has_nan, has_positive, has_negative)


def _aligned(array: NDArray[Any], dimensions: int) -> NDArray[Any]:
    """Append dimensions: a scalar operand, of each shard, belongs to all elements."""
    return array.reshape(array.shape + (1,) * (dimensions - array.ndim))
