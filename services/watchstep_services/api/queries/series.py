"""Series of a figure over the steps, with a limited number of points.

Several steps become one point with the mean and the extremes of their values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from watchstep.format.block import STAGES
from watchstep.format.statistics import Floats
from watchstep.format.tensors import MODES, Mode
from watchstep.reading.columns import Columns, Selection
from watchstep.reading.queries import columns_of
from watchstep.reading.run import Run

MAX_LINES = 64
"""Maximum number of lines in a response; there is a line per mode, worker, replica and stage."""

_KEYS = ("mode", "worker", "replica", "stage")


@dataclass(frozen=True)
class SeriesRequest:
    """Parameters of a series; see `Run.series`."""

    tensor: str
    figure: str
    worker: int | None
    mode: Mode | None
    first: int
    last: int
    points: int


@dataclass(frozen=True)
class Line:
    """A line of a series. Its columns have the same length, with ascending steps.

    Attributes:
        mode: mode of the rows.
        worker: worker; the lowest of merged shards.
        replica: replica.
        stage: local or reduced.
        step: first step of each point.
        last_step: last step of each point.
        count: number of rows of each point.
        mean: mean of the finite values of each point; NaN without any.
        min: smallest finite value of each point.
        max: largest finite value of each point.
        nonfinite: number of rows of each point without a finite value.
    """

    mode: str
    worker: int
    replica: int
    stage: str
    step: NDArray[np.int64]
    last_step: NDArray[np.int64]
    count: NDArray[np.int64]
    mean: Floats
    min: Floats
    max: Floats
    nonfinite: NDArray[np.int64]


@dataclass(frozen=True)
class Lines:
    """Lines of a series, and the number of omitted lines."""

    lines: list[Line]
    left_out: int


def read_lines(run: Run, request: SeriesRequest) -> Lines:
    """Read a series and bin its steps.

    Raises:
        ConfigError: the figure does not exist.
        NotFoundError: the tensor does not exist.
        OverBudgetError: the query exceeds the run's budget.
    """
    run.check_tensors([request.tensor])
    want = Selection((), frozenset([request.tensor]), request.first, request.last)
    merge = request.worker is None
    columns = run.index.consistently(lambda: columns_of(run.index, [request.figure], want, merge=merge))
    chosen = np.ones(len(columns["step"]), np.bool_)
    if request.worker is not None:
        chosen &= columns["worker"] == request.worker
    if request.mode is not None:
        chosen &= columns["mode"] == MODES.index(request.mode)
    rows = np.flatnonzero(chosen)
    groups = list(_groups(columns, rows))
    return Lines(
        [_line(columns, group, request) for group in groups[:MAX_LINES]], max(0, len(groups) - MAX_LINES)
    )


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
    step = columns["step"][rows].astype(np.int64)
    value = columns[request.figure][rows].astype(np.float64)
    starts = _starts(step, request.points)
    ends = np.append(starts[1:], len(rows))
    finite = np.isfinite(value)
    finite_count = np.add.reduceat(finite.astype(np.int64), starts)
    with np.errstate(all="ignore"):
        mean = np.add.reduceat(
            np.where(finite, value, 0.0) / np.repeat(np.maximum(finite_count, 1), ends - starts), starts
        )
        low = np.minimum.reduceat(np.where(finite, value, np.inf), starts)
        high = np.maximum.reduceat(np.where(finite, value, -np.inf), starts)
    first = rows[0]
    return Line(
        mode=MODES[columns["mode"][first]],
        worker=int(columns["worker"][first]),
        replica=int(columns["replica"][first]),
        stage=STAGES[columns["stage"][first]],
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
