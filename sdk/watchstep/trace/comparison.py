"""The first operation of two traces whose result differs.

Operations of a step that compute something are aligned by phase, name and module; views and new memory are left out. Where the sequences part, the comparison looks for the next operations that
agree, notes what it passed over, and goes on.

Results are compared by what the traces contain, the most exact first: full values, checksums of bits, statistics, whether there are non-finite values. An
operation is the cause of a difference if what it read is equal: everything that earlier operations wrote, what it read from outside of the traced
operations (`TracedTensor.checksum` of an input), and its numbers (`Operation.numbers`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from watchstep.reading.comparison.tolerances import Tolerances, differing_element
from watchstep.trace.operations import COLLECTIVES, Operation, TensorHealth, Trace, TracedTensor

DifferenceKind = Literal["result", "random", "input", "number"]
"""What differs first. ``result``: an operation computed another result from equal inputs. ``random``: an operation drew other random
numbers. ``input``: it read other values, which no traced operation had written. ``number``: a number among its arguments differs."""

_LOOKAHEAD = 400
_RUN = 4
"""Number of operations that must agree where sequences meet again."""
_MAX_PARTINGS = 100

_RANDOM = frozenset(
    [
        "bernoulli",
        "bernoulli_",
        "cauchy_",
        "exponential_",
        "geometric_",
        "log_normal_",
        "multinomial",
        "native_dropout",
        "normal",
        "normal_",
        "poisson",
        "rand",
        "rand_like",
        "randint",
        "randint_like",
        "randn",
        "randn_like",
        "random",
        "random_",
        "randperm",
        "rrelu_with_noise",
        "rrelu_with_noise_",
        "uniform",
        "uniform_",
        "_fused_dropout",
    ]
)
"""Operations that draw from a generator of PyTorch."""

_WORKSPACE_WORDS = (
    "rnn",
    "lstm",
    "gru",
    "batch_norm",
    "dot_product",
    "flash_attention",
    "efficient_attention",
)
_WORKSPACE_DTYPES = frozenset({"uint8", "int64", "uint64"})
"""Further outputs of such operations with these dtypes are memory for the backward pass, which is not filled completely, and generator states."""


@dataclass(frozen=True)
class OperationDifference:
    """An operation that differs.

    Attributes:
        kind: what differs.
        a: the operation in the first trace.
        b: the same operation in the second trace.
        position: of the output, the input or the number that differs.
        figure: what was compared: ``shape``, ``value[…]``, ``checksum``, a statistic, or ``number``.
        value_a: the figure in the first trace.
        value_b: the figure in the second trace.
    """

    kind: DifferenceKind
    a: Operation
    b: Operation
    position: int
    figure: str
    value_a: str
    value_b: str


@dataclass(frozen=True)
class TraceParting:
    """Where the sequences of operations part, and meet again.

    Attributes:
        step: the step.
        only_a: operations that only the first trace has here.
        only_b: operations that only the second trace has here.
        meets: whether equal operations follow; otherwise the rest of the step was not compared.
    """

    step: int
    only_a: tuple[Operation, ...]
    only_b: tuple[Operation, ...]
    meets: bool = True


@dataclass(frozen=True)
class TraceDifference:
    """Differences between two traces.

    Attributes:
        first: the first operation that differs; None if there is none.
        partings: where the sequences part, up to 100.
        compared: number of operations that both traces have, without those that compute nothing.
        without_figures: of these, those with a result that neither trace describes, views excluded.
        steps: steps that both traces have.
        notes: steps of one trace only, operations that were left out, and what could not be observed.
    """

    first: OperationDifference | None
    partings: tuple[TraceParting, ...]
    compared: int
    without_figures: int
    steps: tuple[int, ...]
    notes: tuple[str, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether an operation or the sequence differs."""
        return self.first is not None or bool(self.partings)

    @property
    def parts_first(self) -> bool:
        """Whether the sequences part before the first operation that differs."""
        if not self.partings or self.first is None:
            return bool(self.partings)
        parting = self.partings[0]
        passed = [operation.index for operation in parting.only_a]
        if passed:
            return passed[0] < self.first.a.index
        return parting.only_b[0].index < self.first.b.index


@dataclass
class _State:
    """What the comparison has found so far."""

    first: OperationDifference | None = None
    partings: list[TraceParting] = field(default_factory=list)
    compared: int = 0
    without_figures: int = 0


def compare_traces(a: Trace, b: Trace, tolerances: Tolerances | None = None) -> TraceDifference:
    """Find the first operation whose result differs.

    Args:
        a: A trace.
        b: Another one, of the same program.
        tolerances: Relative differences that count as equal, by dtype. With the tolerance 0 checksums decide, if both traces have them. Otherwise
            inputs from outside are compared by the operations that read them, because their checksums say nothing about the size of a difference.
    """
    tolerances = tolerances or Tolerances()
    state = _State()
    steps_a, steps_b = (_by_step(trace) for trace in (a, b))
    common = sorted(steps_a.keys() & steps_b.keys())
    for step in common:
        for left, right in _aligned(step, steps_a[step], steps_b[step], state.partings):
            state.compared += 1
            if state.first is None:
                state.first = _operation_difference(left, right, tolerances)
            state.without_figures += _is_without_figures(left, right)
    return TraceDifference(
        state.first,
        tuple(state.partings[:_MAX_PARTINGS]),
        state.compared,
        state.without_figures,
        tuple(common),
        tuple(_notes(a, b, common)),
    )


def _by_step(trace: Trace) -> dict[int, list[Operation]]:
    steps: dict[int, list[Operation]] = {}
    for operation in filter(_has_results, trace.operations):
        steps.setdefault(operation.step, []).append(operation)
    return steps


def _has_results(operation: Operation) -> bool:
    """Whether an operation computes something, or reads something first. Others depend on when a data loader's worker has delivered a batch."""
    if _base(operation.name).startswith(("empty", "new_empty", "set_")):
        return False
    tensors = (*operation.inputs, *operation.outputs)
    return not operation.is_view or any(tensor.checksum is not None for tensor in tensors)


def _notes(a: Trace, b: Trace, common: Sequence[int]) -> Iterator[str]:
    for name, trace in (("A", a), ("B", b)):
        alone = [step for step in trace.steps if step not in common]
        if alone:
            yield f"steps only in {name}: {', '.join(map(str, alone[:10]))}{', …' if len(alone) > 10 else ''}"
        if trace.left_out:
            yield f"{trace.left_out} operations of {name} were left out by a limit or a filter"
        yield from (f"{name}: {note}" for note in trace.notes)


_Key = tuple[str, str, str]


def _key(operation: Operation) -> _Key:
    return operation.phase, operation.name, operation.module


def _aligned(
    step: int, a: Sequence[Operation], b: Sequence[Operation], partings: list[TraceParting]
) -> Iterator[tuple[Operation, Operation]]:
    """Yield the operations that both sequences have, in order; adds where they part."""
    keys_a, keys_b = [_key(each) for each in a], [_key(each) for each in b]
    i = j = 0
    while i < len(a) and j < len(b):
        if keys_a[i] == keys_b[j]:
            yield a[i], b[j]
            i, j = i + 1, j + 1
            continue
        skip = _meeting(keys_a[i : i + _LOOKAHEAD], keys_b[j : j + _LOOKAHEAD])
        if skip is None:
            partings.append(TraceParting(step, tuple(a[i : i + 1]), tuple(b[j : j + 1]), meets=False))
            return
        partings.append(TraceParting(step, tuple(a[i : i + skip[0]]), tuple(b[j : j + skip[1]])))
        i, j = i + skip[0], j + skip[1]
    if i < len(a) or j < len(b):
        partings.append(TraceParting(step, tuple(a[i:]), tuple(b[j:])))


def _meeting(a: list[_Key], b: list[_Key]) -> tuple[int, int] | None:
    """Return how many operations to pass over in each sequence until several agree: as few as possible in all; None if they do not meet."""
    places: dict[tuple[_Key, ...], list[int]] = {}
    for place in range(len(b)):
        places.setdefault(tuple(b[place : place + _RUN]), []).append(place)
    candidates = [
        (place + found[0], place, found[0])
        for place in range(len(a))
        if (found := places.get(tuple(a[place : place + _RUN])))
    ]
    return min(candidates)[1:] if candidates else None


def _operation_difference(a: Operation, b: Operation, tolerances: Tolerances) -> OperationDifference | None:
    """Return how an operation differs: first what it read, then what it wrote."""
    for position, (x, y) in enumerate(itertools.zip_longest(a.numbers, b.numbers)):
        if x != y and not _is_close(x, y, tolerances):
            return OperationDifference("number", a, b, position, "number", str(x), str(y))
    if tolerances.is_exact:
        for position, (left, right) in enumerate(zip(a.inputs, b.inputs, strict=False)):
            if None not in {left.checksum, right.checksum} and left.checksum != right.checksum:
                return OperationDifference(
                    "input", a, b, position, "checksum", f"{left.checksum:x}", f"{right.checksum:x}"
                )
    for position, (left, right) in enumerate(itertools.zip_longest(a.outputs, b.outputs)):
        if a.name.startswith(COLLECTIVES):
            break  # may not have been complete when it was observed
        if left is not None and right is not None and _is_workspace(a, position, left):
            continue
        found = _tensor_difference(left, right, tolerances)
        if found is not None:
            is_random = _base(a.name) in _RANDOM
            return OperationDifference("random" if is_random else "result", a, b, position, *found)
    return None


def _is_close(x: float | None, y: float | None, tolerances: Tolerances) -> bool:
    if x is None or y is None:
        return False
    return (x != x and y != y) or abs(x - y) <= tolerances.of("float64") * max(abs(x), abs(y))  # noqa: PLR0124 - NaN


def _base(name: str) -> str:
    words = name.split(".")
    return words[1] if len(words) > 1 else name


def _is_workspace(operation: Operation, position: int, tensor: TracedTensor) -> bool:
    return (
        position > 0
        and tensor.dtype in _WORKSPACE_DTYPES
        and any(word in operation.name for word in _WORKSPACE_WORDS)
    )


_Found = tuple[str, str, str]


def _tensor_difference(
    a: TracedTensor | None, b: TracedTensor | None, tolerances: Tolerances
) -> _Found | None:
    """Return the figure in which a tensor differs, and its values."""
    if a is None or b is None:
        return "shape", _described(a), _described(b)
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return "shape", _described(a), _described(b)
    if a.values is not None and b.values is not None:
        element = differing_element(a.values, b.values, tolerances.of(a.dtype))
        if element is None:
            return None
        return f"value[{','.join(map(str, element.index))}]", f"{element.a:.9g}", f"{element.b:.9g}"
    if a.checksum is not None and b.checksum is not None:
        if a.checksum == b.checksum:
            return None
        if not tolerances.of(a.dtype):
            return _statistic_difference(a, b, 0.0) or ("checksum", f"{a.checksum:x}", f"{b.checksum:x}")
    return _statistic_difference(a, b, tolerances.of(a.dtype))


def _described(tensor: TracedTensor | None) -> str:
    return "none" if tensor is None else f"{tensor.dtype} {'x'.join(map(str, tensor.shape)) or 'scalar'}"


_COUNTS = ("nan", "positive_infinite", "negative_infinite")
_SIGNS = ("negative", "zero", "positive")
_STATISTICS = ("mean", "std", "norm", "minimum", "maximum", "smallest")


def _statistic_difference(a: TracedTensor, b: TracedTensor, tolerance: float) -> _Found | None:
    x, y = a.health, b.health
    if x is None or y is None:
        if a.nonfinite is not None and b.nonfinite is not None and a.nonfinite != b.nonfinite:
            return "non-finite", str(a.nonfinite), str(b.nonfinite)
        return None
    for name in _COUNTS:
        if getattr(x, name) != getattr(y, name):
            return name, str(getattr(x, name)), str(getattr(y, name))
    scale = max(_rms(x), _rms(y))
    for name in _STATISTICS:
        first, second = getattr(x, name), getattr(y, name)
        if first is None or second is None:
            continue
        magnitude = max(abs(first), abs(second)) if name == "norm" else max(abs(first), abs(second), scale)
        if abs(first - second) > tolerance * magnitude:
            return name, f"{first:.9g}", f"{second:.9g}"
    for name in _SIGNS:
        first, second = getattr(x, name), getattr(y, name)
        if first is None or second is None:
            continue
        allowed = max(1.0, tolerance * x.elements) if tolerance else 0.0
        if abs(first - second) > allowed:
            return name, str(first), str(second)
    return None


def _rms(health: TensorHealth) -> float:
    finite = health.elements - health.nan - health.infinite
    return 0.0 if health.norm is None or not finite else float(health.norm / finite**0.5)


def _is_without_figures(a: Operation, b: Operation) -> bool:
    return not (a.is_view or a.name.startswith(COLLECTIVES)) and any(
        not _is_comparable(left, right) for left, right in zip(a.outputs, b.outputs, strict=False)
    )


def _is_comparable(a: TracedTensor, b: TracedTensor) -> bool:
    return (
        (a.values is not None and b.values is not None)
        or (a.checksum is not None and b.checksum is not None)
        or (a.health is not None and b.health is not None)
    )
