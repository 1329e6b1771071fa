"""A trace: the operations of some steps in the order in which they ran, their tensors, and their source lines.

Tensors that share memory have the same id within a step, so the operations that wrote a tensor can be found from one that read it. Memory
that an operation allocates gets a new id, also at an address that was used before.
"""

from __future__ import annotations

import linecache
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from numpy.typing import NDArray

Phase = Literal["forward", "backward", "recomputation", "gradients", "optimizer", "eager", "graph"]
"""When an operation ran. ``recomputation`` is a forward pass that runs again within a backward pass (activation checkpointing). ``gradients`` is what
the program computes of gradients after their backward pass, such as clipping, or an update without an optimizer. ``eager`` and ``graph`` are those of
a program that executes graphs (TensorFlow)."""

COLLECTIVES = ("c10d.", "_c10d_functional.")
"""Beginnings of the names of operations between ranks, which may still be running when they are observed."""


class TraceMode(str, Enum):
    """What is recorded of each output. Names and meanings are those of TensorFlow's Debugger V2, with two more.

    Attributes:
        NO_TENSOR: nothing of the values.
        CURT_HEALTH: whether any element is NaN or infinite.
        CONCISE_HEALTH: numbers of NaN, +inf and -inf.
        FULL_HEALTH: also numbers of negative, zero and positive elements.
        SHAPE: as NO_TENSOR. Shapes and dtypes are recorded in every mode.
        STATISTICS: `FULL_HEALTH` and the minimum, maximum, smallest magnitude, mean, standard deviation and L2 norm of the finite elements. Also the values of
            results of forward passes with one element for each of at most 4096 samples, such as losses.
        FULL_TENSOR: `FULL_HEALTH` and the values.
    """

    NO_TENSOR = "no_tensor"
    CURT_HEALTH = "curt_health"
    CONCISE_HEALTH = "concise_health"
    FULL_HEALTH = "full_health"
    SHAPE = "shape"
    STATISTICS = "statistics"
    FULL_TENSOR = "full_tensor"

    @property
    def has_health(self) -> bool:
        """Whether non-finite values are found."""
        return self not in {TraceMode.NO_TENSOR, TraceMode.SHAPE}


@dataclass(frozen=True, slots=True)
class TensorHealth:
    """Counts of a tensor's elements, and statistics of the finite ones where they were recorded.

    Attributes:
        elements: number of elements.
        nan: of these, NaN.
        positive_infinite: of these, +inf.
        negative_infinite: of these, -inf.
        negative: of these, finite and negative; None if not counted.
        zero: of these, zero; None if not counted.
        positive: of these, finite and positive; None if not counted.
        minimum: of the finite elements; None if not recorded.
        maximum: of the finite elements; None if not recorded.
        mean: of the finite elements; None if not recorded.
        std: standard deviation of the finite elements; None if not recorded.
        norm: L2 norm of the finite elements; None if not recorded.
        smallest: smallest magnitude of the finite elements that are not zero; None if there is none, or it was not recorded.
        first_bad: index of the first element that is NaN or infinite; empty if there is none, or it is not known.
        bad_rows: number of places along the first dimension with such an element; None if not counted.
        is_exact: whether the counts are exact. Otherwise the extremes alone are known, and a count is 1 if there is at least one such
            element; next to NaN, infinite elements are not known.
    """

    elements: int
    nan: int = 0
    positive_infinite: int = 0
    negative_infinite: int = 0
    negative: int | None = None
    zero: int | None = None
    positive: int | None = None
    minimum: float | None = None
    maximum: float | None = None
    mean: float | None = None
    std: float | None = None
    norm: float | None = None
    smallest: float | None = None
    first_bad: tuple[int, ...] = ()
    bad_rows: int | None = None
    is_exact: bool = True

    @property
    def infinite(self) -> int:
        """Number of infinite elements."""
        return self.positive_infinite + self.negative_infinite

    @property
    def is_finite(self) -> bool:
        """Whether all elements are finite."""
        return not self.nan and not self.infinite

    @property
    def abs_minimum(self) -> float | None:
        """Smallest magnitude of the finite elements; None if there is none, or it was not recorded."""
        if self.minimum is None:
            return None
        return 0.0 if self.zero else self.smallest

    @property
    def abs_maximum(self) -> float | None:
        """Largest magnitude of the finite elements; None if there is none, or it was not recorded."""
        return None if self.minimum is None or self.maximum is None else max(-self.minimum, self.maximum)

    def __str__(self) -> str:
        """The counts that are not zero, as ``3 of 32 -inf``."""
        counts = [(self.nan, "NaN"), (self.positive_infinite, "+inf"), (self.negative_infinite, "-inf")]
        parts = [f"{count} {name}" if self.is_exact else name for count, name in counts if count]
        text = f"{', '.join(parts)} of {self.elements}" if parts else f"finite, {self.elements} elements"
        if self.zero and not parts:
            text += f", {self.zero} zero"
        if self.minimum is not None and self.maximum is not None:
            text += f", finite values {self.minimum:.4g} … {self.maximum:.4g}"
        return f"{text}, first at {list(self.first_bad)}" if self.first_bad else text


@dataclass(frozen=True, slots=True)
class TracedTensor:
    """A tensor that an operation read or wrote.

    Attributes:
        id: the same for tensors that share memory.
        shape: its shape; -1 for a dimension that was not recorded, and (-1,) if the rank was not.
        dtype: e.g. ``float32``; empty if it was not recorded.
        device: e.g. ``cpu`` or ``cuda:0``.
        name: of a parameter, buffer, gradient or argument of the model; empty for others.
        nonfinite: whether an element is NaN or infinite; None if it was not checked.
        health: counts; None if not counted. Inputs are counted when an output of their operation is not finite.
        values: all elements; None if they were not recorded. Shape ``shape``; bfloat16 and fp8 are widened to float32.
        checksum: of the bits of all elements, as in `watchstep.kernels.array_kernel`; None if it was not recorded. Of an input only where its
            memory is first read and no traced operation of the step wrote it.
    """

    id: int
    shape: tuple[int, ...]
    dtype: str
    device: str = "cpu"
    name: str = ""
    nonfinite: bool | None = None
    health: TensorHealth | None = None
    values: NDArray[Any] | None = field(default=None, compare=False, repr=False)
    checksum: int | None = None

    @property
    def shape_text(self) -> str:
        """The shape as ``16x3``; ``scalar`` for one without dimensions, and ``?`` for a dimension that was not recorded."""
        return "x".join("?" if size < 0 else str(size) for size in self.shape) or "scalar"


@dataclass(frozen=True, slots=True)
class CallSite:
    """A line of a source file.

    Attributes:
        file: path of the file.
        line: number of the line, from 1.
        function: name of the function.
        is_library: whether the file belongs to an installed package.
    """

    file: str
    line: int
    function: str
    is_library: bool = False

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True, slots=True)
class Operation:
    """One executed operation.

    Attributes:
        index: position in the trace, ascending; numbers may be missing where a filter or a ring left operations out.
        step: step of the run; -1 if unknown.
        name: e.g. ``aten.log.default``.
        phase: when it ran.
        module: path of the module whose forward pass ran, or whose backward pass this is; empty outside of the model.
        inputs: tensors that it read, in the order of its arguments.
        outputs: tensors that it wrote, those that it changed in place included.
        stack: index of its stack in `Trace.stacks`; for a backward operation that of the forward operation, where known, unless a function of the
            program computes the backward pass.
        node: name of the backward function that ran it, e.g. ``LogBackward0``, or of the operation in its graph, e.g. ``dense/MatMul``;
            empty in other phases.
        forward: index of the forward operation that the backward function belongs to; None if unknown.
        is_view: whether its outputs only show memory of its inputs.
        infinite_argument: whether a number among its arguments is infinite or NaN, as for a mask with -inf.
        is_constant: whether it makes a tensor of numbers that the program wrote.
        error: type and text of the exception that it raised; empty if none.
        numbers: its first numeric arguments, recorded with checksums.
    """

    index: int
    step: int
    name: str
    phase: Phase
    module: str
    inputs: tuple[TracedTensor, ...]
    outputs: tuple[TracedTensor, ...]
    stack: int = -1
    node: str = ""
    forward: int | None = None
    is_view: bool = False
    infinite_argument: bool = False
    is_constant: bool = False
    error: str = ""
    numbers: tuple[float, ...] = ()

    @property
    def is_bad(self) -> bool:
        """Whether an output is not finite."""
        return any(output.nonfinite for output in self.outputs)


@dataclass(frozen=True)
class Trace:
    """Operations of some steps.

    Attributes:
        operations: in the order in which they ran.
        stacks: source lines, innermost first; `Operation.stack` is an index of it.
        sources: text of source files by path, where they could be read.
        mode: what was recorded of each output.
        losses: ids of tensors whose backward pass was started, with the index of the operation after which that happened; of a program
            of TensorFlow, results of one element that nothing else reads, with the index of a later operation.
        left_out: number of operations that the ring or a filter left out.
        program: what made it, as ``torch 2.13.0``.
        notes: what could not be observed.
        raised: steps that an exception has ended.
    """

    operations: Sequence[Operation]
    stacks: Sequence[tuple[CallSite, ...]] = ()
    sources: dict[str, str] = field(default_factory=dict)
    mode: TraceMode = TraceMode.CURT_HEALTH
    losses: tuple[tuple[int, int], ...] = ()
    left_out: int = 0
    program: str = ""
    notes: tuple[str, ...] = ()
    raised: tuple[int, ...] = ()

    def stack_of(self, operation: Operation) -> tuple[CallSite, ...]:
        """Source lines of an operation, innermost first; empty if unknown."""
        return self.stacks[operation.stack] if 0 <= operation.stack < len(self.stacks) else ()

    def line_of(self, operation: Operation) -> CallSite | None:
        """The line that caused an operation: the innermost one outside of installed packages, else the innermost one."""
        stack = self.stack_of(operation)
        own = next((site for site in stack if not site.is_library), None)
        return own or (stack[0] if stack else None)

    def text_of(self, site: CallSite) -> str:
        """The text of a source line without indentation; empty if unknown."""
        lines = self.sources.get(site.file, "").splitlines()
        return lines[site.line - 1].strip() if 0 < site.line <= len(lines) else ""

    @property
    def steps(self) -> list[int]:
        """The steps, ascending."""
        return sorted({operation.step for operation in self.operations})


_MAX_SOURCE_BYTES = 2 * 2**20
"""Maximum size of one source file in a trace."""
_LIBRARIES = tuple(
    f"{path}/"
    for path in {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    if path
)


def is_library(file: str) -> bool:
    """Return whether a source file belongs to an installed package."""
    return file.startswith(_LIBRARIES) or "/site-packages/" in file or "/dist-packages/" in file


def source_texts(files: Iterable[str]) -> dict[str, str]:
    """Return the text of each source file of the program, those of installed packages left out."""
    texts = {}
    for file in sorted(set(files)):
        if not is_library(file):
            text = "".join(linecache.getlines(file))  # also knows cells of notebooks
            if text and len(text) <= _MAX_SOURCE_BYTES:
                texts[file] = text
    return texts
