"""Series of a figure over the steps, with a limited number of points: several steps become one point.

A point has the mean and the extremes of its values, so that a single bad step remains visible in a picture of any width. The service,
the pictures and the report use these points.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from watchstep.errors import ConfigError
from watchstep.format.block import STAGES
from watchstep.format.statistics import Floats
from watchstep.format.tensors import MODES, Mode, mode_index
from watchstep.reading.columns import Columns, Selection
from watchstep.reading.index import RunIndex
from watchstep.reading.queries import columns_of

MAX_LINES = 64
"""Maximum number of lines of a series; there is a line per mode, worker, replica and stage."""

_KEYS = ("mode", "worker", "replica", "stage")


@dataclass(frozen=True)
class SeriesRequest:
    """Parameters of a series.

    Attributes:
        tensor: the tensor.
        figure: as for `Run.series`.
        worker: only rows of this worker; None merges shards.
        mode: only rows of this mode; None for all.
        first: first step.
        last: last step.
        points: maximum number of points of a line.
        merge: whether shards are merged to the whole tensor; otherwise each worker has its lines.
    """

    tensor: str
    figure: str
    worker: int | None = None
    mode: Mode | None = None
    first: int = 0
    last: int = 2**62
    points: int = 1000
    merge: bool = True


@dataclass(frozen=True, kw_only=True)
class BinnedValues:
    """Values over the steps, in points. Its columns have the same length, with ascending steps.

    Attributes:
        step: first step of each point.
        last_step: last step of each point.
        count: number of rows of each point.
        mean: mean of the finite values of each point; NaN without any.
        min: smallest finite value of each point.
        max: largest finite value of each point.
        nonfinite: number of rows of each point without a finite value.
    """

    step: NDArray[np.int64]
    last_step: NDArray[np.int64]
    count: NDArray[np.int64]
    mean: Floats
    min: Floats
    max: Floats
    nonfinite: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Line(BinnedValues):
    """A line of a series.

    Attributes:
        mode: mode of the rows.
        worker: worker; the lowest of merged shards.
        replica: replica.
        stage: local or reduced.
    """

    mode: str
    worker: int
    replica: int
    stage: str


@dataclass(frozen=True)
class Lines:
    """Lines of a series, and the number of omitted lines."""

    lines: list[Line]
    left_out: int


def read_lines(index: RunIndex, request: SeriesRequest) -> Lines:
    """Read a series and bin its steps; see `Run.binned_series`."""
    return read_figures(index, request, [request.figure])[request.figure]


def read_figures(index: RunIndex, request: SeriesRequest, figures: Sequence[str]) -> dict[str, Lines]:
    """Read several figures of a tensor at once, each as `read_lines` for that figure.

    Raises:
        ConfigError: a figure does not exist, or the mode is unknown.
        StoreError: the store cannot be read.
        OverBudgetError: the query exceeds the index's budget.
    """
    mode = None if request.mode is None else mode_index(request.mode)
    if request.points < 1:
        raise ConfigError(f"invalid number of points {request.points}", "use 1 or more")
    want = Selection((), frozenset([request.tensor]), request.first, request.last)
    merge = request.merge and request.worker is None
    columns = index.consistently(lambda: columns_of(index, figures, want, merge=merge))
    chosen = np.ones(len(columns["step"]), np.bool_)
    if request.worker is not None:
        chosen &= columns["worker"] == request.worker
    if mode is not None:
        chosen &= columns["mode"] == mode
    groups = list(_groups(columns, np.flatnonzero(chosen)))
    return {
        figure: Lines(
            [_line(columns, group, replace(request, figure=figure)) for group in groups[:MAX_LINES]],
            max(0, len(groups) - MAX_LINES),
        )
        for figure in figures
    }


def _groups(columns: Columns, rows: NDArray[np.intp]) -> Iterator[NDArray[np.intp]]:
    """Yield the rows of each line, by step."""
    if not len(rows):
        return
    order = rows[np.lexsort([columns["step"][rows], *(columns[name][rows] for name in reversed(_KEYS))])]
    changes = np.zeros(len(order), np.bool_)
    for name in _KEYS:
        changes[1:] |= columns[name][order][1:] != columns[name][order][:-1]
    yield from np.split(order, np.flatnonzero(changes))


def _line(columns: Columns, rows: NDArray[np.intp], request: SeriesRequest) -> Line:
    first = rows[0]
    values = bin_values(columns["step"][rows], columns[request.figure][rows], request.points)
    return Line(
        mode=MODES[columns["mode"][first]],
        worker=int(columns["worker"][first]),
        replica=int(columns["replica"][first]),
        stage=STAGES[columns["stage"][first]],
        **{field.name: getattr(values, field.name) for field in fields(values)},
    )


def bin_values(steps: NDArray[np.integer[Any]], values: NDArray[Any], points: int) -> BinnedValues:
    """Bin values over the steps.

    Args:
        steps: ascending steps, shape (n,).
        values: values of the steps, shape (n,).
        points: maximum number of points. With fewer values, each one is a point.
    """
    step, value = steps.astype(np.int64), values.astype(np.float64)
    starts = _starts(step, points)
    if not len(step):
        none = np.empty(0, np.float64)
        return BinnedValues(
            step=step, last_step=step, count=step, mean=none, min=none, max=none, nonfinite=step
        )
    ends = np.append(starts[1:], len(step))
    finite = np.isfinite(value)
    finite_count = np.add.reduceat(finite.astype(np.int64), starts)
    with np.errstate(all="ignore"):
        mean = np.add.reduceat(
            np.where(finite, value, 0.0) / np.repeat(np.maximum(finite_count, 1), ends - starts), starts
        )
        low = np.minimum.reduceat(np.where(finite, value, np.inf), starts)
        high = np.maximum.reduceat(np.where(finite, value, -np.inf), starts)
    return BinnedValues(
        step=step[starts],
        last_step=step[ends - 1],
        count=ends - starts,
        mean=np.where(finite_count > 0, mean, np.nan),
        min=np.where(finite_count > 0, low, np.nan),
        max=np.where(finite_count > 0, high, np.nan),
        nonfinite=(ends - starts) - finite_count,
    )


def _starts(step: NDArray[np.int64], points: int) -> NDArray[np.intp]:
    """Return the first row of each point: one point per row for few rows, else per range of steps of equal width."""
    if len(step) <= points:
        return np.arange(len(step))
    span = int(step[-1]) - int(step[0]) + 1
    width = -(-span // points)
    bins = (step - step[0]) // width
    return np.flatnonzero(np.append(True, bins[1:] != bins[:-1]))
