"""The first bad operation of a step of a JAX program, as data and as text."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from watchstep.platform.terminal_text import printable
from watchstep.trace.operations import CallSite, Phase, TensorHealth

_MAX_NAMES = 5


@dataclass(frozen=True, slots=True)
class ValueFigures:
    """A value that an operation read or made.

    Attributes:
        shape: its shape; of a shard within ``shard_map``.
        dtype: e.g. ``float32``, or ``key<fry>`` for random keys.
        health: counts and extremes; None for integers, booleans, keys and empty arrays.
        name: of an argument of the step that was not finite; empty for others.
    """

    shape: tuple[int, ...]
    dtype: str
    health: TensorHealth | None
    name: str = ""

    def __str__(self) -> str:
        name = f"{self.name}, " if self.name else ""
        text = f"{name}{self.dtype} {'x'.join(map(str, self.shape)) or 'scalar'}"
        return text if self.health is None else f"{text}: {self.health}"


@dataclass(frozen=True, slots=True)
class LoopIteration:
    """An iteration of a loop.

    Attributes:
        loop: ``scan`` or ``while``.
        number: from 0; of a scan in reverse, the place of its element.
    """

    loop: Literal["scan", "while"]
    number: int


@dataclass(frozen=True, slots=True)
class JaxOperation:
    """One evaluated primitive.

    Attributes:
        index: number of operations that were evaluated before it.
        primitive: name of the primitive, e.g. ``dot_general``.
        path: control flow around it, as ``scan[2]/cond[1]/dot_general``: iteration, branch, shard.
        iterations: of the loops around it, outermost first.
        shard: number of the shard within ``shard_map``; None outside of it.
        phase: ``forward``, ``backward`` or ``recomputation``. Updates of the optimizer count as forward.
        module: named scopes around it, e.g. of Flax modules, as ``encoder/dense``; empty if there are none.
        sites: frames of the program that traced it, innermost first.
        inputs: what it read.
        outputs: what it made.
    """

    index: int
    primitive: str
    path: str
    iterations: tuple[LoopIteration, ...]
    shard: int | None
    phase: Phase
    module: str
    sites: tuple[CallSite, ...]
    inputs: tuple[ValueFigures, ...]
    outputs: tuple[ValueFigures, ...]

    @property
    def site(self) -> CallSite | None:
        """The innermost line of the user's program; of a library if there is no other, None if JAX has none."""
        return next(
            (site for site in self.sites if not site.is_library), self.sites[0] if self.sites else None
        )

    @property
    def title(self) -> str:
        """As ``dot_general (operation 53, scan[2]/dot_general, forward)``."""
        path = f"{self.path}, " if self.path != self.primitive else ""
        module = f" in {self.module}" if self.module else ""
        return f"{self.primitive} (operation {self.index}, {path}{self.phase}{module})"


@dataclass(frozen=True, slots=True)
class FirstBad:
    """Where the NaN and infinities in the results of a step began.

    Attributes:
        cause: ``operation``: it made them from finite values, or NaN from a mask. ``argument``: a value was not finite when the step began.
        operation: the operation; for ``argument``, the first one that read it and made values that are not finite, None if it only passes through.
        argument: the name of the argument, as ``params.layer.kernel``; empty for ``operation``.
        argument_figures: what the argument contains; None for ``operation``.
        reaches: names of the results that were damaged by it.
        others: further operations whose non-finite values reached a result, in order.
        contained: number of operations whose non-finite values reached nothing.
        evaluated: number of evaluated operations.
        notes: what was not evaluated as in the program, as sentences.
    """

    cause: Literal["operation", "argument"]
    operation: JaxOperation | None
    argument: str
    argument_figures: ValueFigures | None
    reaches: tuple[str, ...]
    others: tuple[JaxOperation, ...] = ()
    contained: int = 0
    evaluated: int = 0
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(map(printable, self._lines()))

    def data(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {
            "cause": self.cause,
            "operation": None if self.operation is None else _operation_data(self.operation),
            "argument": self.argument,
            "reaches": list(self.reaches),
            "others": [_operation_data(each) for each in self.others],
            "contained": self.contained,
            "evaluated": self.evaluated,
            "notes": list(self.notes),
        }

    def _lines(self) -> Iterator[str]:
        if self.cause == "argument":
            contents = "" if self.argument_figures is None else f": {self.argument_figures}"
            yield f"argument {self.argument} was not finite before the step{contents}"
        if self.operation is not None:
            what = "first bad operation" if self.cause == "operation" else "first operation that read it"
            yield f"{what}: {self.operation.title}"
            yield from _operation_lines(self.operation)
        names = ", ".join(self.reaches[:_MAX_NAMES])
        more = f" and {len(self.reaches) - _MAX_NAMES} more" if len(self.reaches) > _MAX_NAMES else ""
        yield f"  reached: {names}{more}"
        if self.others:
            yield f"{len(self.others)} further operation(s) made non-finite values after it"
        if self.contained:
            yield f"{self.contained} operation(s) made non-finite values that reached nothing"
        yield from (f"note: {note}" for note in self.notes)


def _operation_lines(operation: JaxOperation) -> Iterator[str]:
    if (site := operation.site) is not None:
        yield f"  at {site}"
        if text := linecache.getline(site.file, site.line).strip():
            yield f"      {text}"
    for each in operation.iterations:
        yield f"  iteration {each.number} of {each.loop}"
    if operation.shard is not None:
        yield f"  shard {operation.shard} of shard_map"
    for place, value in enumerate(operation.inputs):
        yield f"  input {place}: {value}"
    for place, value in enumerate(operation.outputs):
        yield f"  output {place}: {value}"


def _operation_data(operation: JaxOperation) -> dict[str, Any]:
    site = operation.site
    return {
        "index": operation.index,
        "primitive": operation.primitive,
        "path": operation.path,
        "iterations": [{"loop": each.loop, "number": each.number} for each in operation.iterations],
        "shard": operation.shard,
        "phase": operation.phase,
        "module": operation.module,
        "line": None if site is None else {"file": site.file, "line": site.line, "function": site.function},
        "inputs": list(map(str, operation.inputs)),
        "outputs": list(map(str, operation.outputs)),
    }
