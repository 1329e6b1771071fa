"""Operations of a step whose results are far larger or smaller than in the steps before it, and the samples that the loss is made of.

For steps that are finite but wrong, such as a loss spike. Operations of several traced steps are the same if phase, name, module, backward function and source line are, in order. Their results
are compared by their root mean square.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from watchstep.trace.operations import Operation, Trace, TracedTensor

_FACTOR = 4.0
"""Ours: the root mean square of a result seldom changes fourfold within some steps."""

_MIN_STEPS = 2
_MOST_SAMPLES = 3
_MOST_STEPS_BACK = 64

_Key = tuple[object, ...]


@dataclass(frozen=True)
class UnusualOperation:
    """An operation with a result outside of its usual range.

    Attributes:
        operation: the operation.
        output: the result.
        size: its root mean square.
        low: the smallest one in the steps before.
        high: the largest one in the steps before.
    """

    operation: Operation
    output: TracedTensor
    size: float
    low: float
    high: float

    @property
    def factor(self) -> float:
        """How many times larger than the largest, or smaller than the smallest; at least 1."""
        return self.size / self.high if self.size > self.high else self.low / max(self.size, 1e-300)


@dataclass(frozen=True)
class SampleShare:
    """A row of a batch.

    Attributes:
        row: its position.
        share: its share of the sum of the magnitudes of all losses of the batch.
    """

    row: int
    share: float


@dataclass(frozen=True)
class UnusualStep:
    """What is unusual in a step.

    Attributes:
        step: the step.
        earlier: traced steps that it was compared with, ascending.
        compared: number of its operations that were compared.
        operations: those whose results are four times outside of their usual range, in the order in which they ran.
        samples: the rows of the batch with the largest shares of the loss, where the loss of each row is an operation's result.
    """

    step: int
    earlier: tuple[int, ...]
    compared: int
    operations: tuple[UnusualOperation, ...]
    samples: tuple[SampleShare, ...]


def unusual_operations(trace: Trace, step: int) -> UnusualStep:
    """Compare a step with the traced ones before it.

    Args:
        trace: Traced in mode ``statistics``.
        step: The step.
    """
    by_step: dict[int, list[Operation]] = defaultdict(list)
    for operation in trace.operations:
        if operation.step <= step:
            by_step[operation.step].append(operation)
    now = by_step.pop(step, [])
    usual: dict[_Key, list[float]] = defaultdict(list)
    for operations in by_step.values():
        for key, _, output in _results(trace, operations):
            usual[key].append(_size(output))
    found, compared = [], 0
    for key, operation, output in _results(trace, now):
        sizes = usual.get(key, [])
        if len(sizes) < _MIN_STEPS or max(sizes) == 0:
            continue
        compared += 1
        unusual = UnusualOperation(operation, output, _size(output), min(sizes), max(sizes))
        if unusual.factor >= _FACTOR:
            found.append(unusual)
    return UnusualStep(step, tuple(sorted(by_step)), compared, tuple(found), _samples(trace, now))


def _results(trace: Trace, operations: Iterable[Operation]) -> Iterable[tuple[_Key, Operation, TracedTensor]]:
    seen: Counter[_Key] = Counter()
    for operation in operations:
        if operation.is_view or operation.is_constant:
            continue
        site = trace.line_of(operation)
        line = None if site is None else (site.file, site.line)
        key = (operation.phase, operation.name, operation.module, operation.node, line)
        seen[key] += 1
        for place, output in enumerate(operation.outputs):
            if output.health is not None and output.health.norm is not None:
                yield (*key, seen[key], place, len(output.shape)), operation, output


def _size(output: TracedTensor) -> float:
    assert output.health is not None
    assert output.health.norm is not None
    return output.health.norm / math.sqrt(max(output.health.elements, 1))


def _samples(trace: Trace, operations: list[Operation]) -> tuple[SampleShare, ...]:
    """Return the rows with the largest losses: of the last result with one element per sample that the loss was computed from."""
    wrote: dict[int, Operation] = {}
    for operation in operations:
        if operation.phase == "forward" and not operation.is_view:
            wrote.update(dict.fromkeys((output.id for output in operation.outputs), operation))
    losses = [number for number, after in trace.losses if after in {each.index for each in operations}]
    for number in losses[:1]:
        rows = _rows(number, wrote)
        if rows is not None and len(rows) > 1 and np.isfinite(rows).all() and np.abs(rows).sum() > 0:
            shares = np.abs(rows) / np.abs(rows).sum()
            largest = np.argsort(-shares, kind="stable")[:_MOST_SAMPLES]
            return tuple(SampleShare(int(row), float(shares[row])) for row in largest)
    return ()


def _rows(number: int, wrote: Mapping[int, Operation]) -> np.ndarray[tuple[int], np.dtype[np.float64]] | None:
    """Follow a loss back through operations on single numbers to a result with one element per sample."""
    for _ in range(_MOST_STEPS_BACK):
        operation = wrote.get(number)
        if operation is None:
            return None
        for each in operation.inputs:
            source = wrote.get(each.id)
            values = (
                None if source is None else next((o.values for o in source.outputs if o.id == each.id), None)
            )
            if values is not None and each.shape and values.size == each.shape[0] > 1:
                return values.reshape(-1).astype(np.float64)
        scalars = [each.id for each in operation.inputs if not each.shape and each.id != number]
        if not scalars:
            return None
        number = scalars[0]
    return None
