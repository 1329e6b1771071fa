"""Responses to queries, as JSON without non-finite numbers or as Arrow, and the figures of a tensor summary.

Series of a figure over the steps, with a limited number of points.

Several steps become one point with the mean and the extremes of their values.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from fastapi import Response
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from watchstep.format.block import STAGES
from watchstep.format.statistics import DERIVED, Floats, StatisticsBatch
from watchstep.format.tensors import MODES, Mode
from watchstep.reading.columns import Columns, Selection
from watchstep.reading.queries import columns_of
from watchstep.reading.run import Run

if TYPE_CHECKING:
    import pyarrow as pa


ARROW = "application/vnd.apache.arrow.stream"

Numbers = list[float | None]


class LineOutput(BaseModel):
    """A line of a series: rows of one mode, worker, replica and stage. Its lists have the same length."""

    mode: str
    worker: int = Field(description="Worker; the lowest of merged shards.")
    replica: int
    stage: str
    step: list[int] = Field(description="First step of each point.")
    last_step: list[int] = Field(description="Last step of each point.")
    count: list[int] = Field(description="Number of rows of each point.")
    mean: Numbers = Field(description="Mean of the finite values of each point; null: none.")
    min: Numbers
    max: Numbers
    nonfinite: list[int] = Field(description="Number of rows of each point without a finite value.")


class SeriesOutput(BaseModel):
    """One figure of one tensor over the steps."""

    tensor: str
    figure: str
    lines: list[LineOutput]
    left_out: int = Field(description="Number of omitted lines; select a worker or a mode to get them.")


class HeatmapOutput(BaseModel):
    """One figure of many tensors over the steps."""

    figure: str
    tensors: list[str] = Field(description="Names in the model's order, one per row of values.")
    left_out: int = Field(description="Number of omitted tensors.")
    edges: list[int] = Field(description="Column i covers the steps edges[i] to edges[i + 1] - 1.")
    values: list[Numbers] = Field(description="Values by tensor and column; null: no finite value.")


class HistogramOutput(BaseModel):
    """Distribution of a tensor's elements over powers of two, over the steps."""

    tensor: str
    edges: list[int] = Field(description="Row i covers the steps edges[i] to edges[i + 1] - 1.")
    lower: Numbers = Field(description="Elements of column j are between lower[j] and upper[j].")
    upper: Numbers
    counts: list[list[int]]
    zeros: list[int] = Field(description="Number of elements equal to zero, which no column contains.")
    nonfinite: list[int]


class ColumnOutput(BaseModel):
    """A column of a query result."""

    name: str
    type: str = Field(description="Arrow type of the column.")


class SqlOutput(BaseModel):
    """Result of a query."""

    columns: list[ColumnOutput]
    rows: list[list[Any]]
    more: bool = Field(description="Whether the result has more rows than the limit.")


class TensorEntry(BaseModel):
    """A recorded tensor."""

    name: str
    module: str
    module_type: str
    role: str
    order: int
    shape: list[int]
    dtype: str
    collections: list[str]
    derived: bool = Field(
        description="Whether the program did not log the loss in training: then it is the argument of backward(), divided as the program divides it."
    )


def numbers(values: NDArray[Any]) -> Numbers:
    """Return numbers for JSON, which has no non-finite numbers: these become null."""
    return [value if math.isfinite(value) else None for value in values.tolist()]


def arrow(table: pa.Table) -> Response:
    """Return a response with a table as an Arrow stream."""
    import pyarrow as pa

    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return Response(sink.getvalue(), media_type=ARROW)


def wants_arrow(accept: str | None) -> bool:
    """Return whether a request accepts Arrow."""
    return accept is not None and ARROW in accept


def whole_numbers(values: NDArray[np.integer[Any]]) -> list[Any]:
    """Return integers of any shape as nested lists."""
    result: list[Any] = values.tolist()
    return result


_WHOLE = ("count", "nan", "pos_inf", "neg_inf", "zero", "negative")
_REAL = ("min", "max", "mean", "abs_min")
_DERIVED = ("std", "l2", "abs_max", "rms", "zero_share")


class FiguresOutput(BaseModel):
    """Figures of all elements. From min on they cover finite elements only, and are null without any."""

    count: int
    nan: int
    pos_inf: int
    neg_inf: int
    zero: int
    negative: int
    min: float | None
    max: float | None
    mean: float | None
    abs_min: float | None = Field(description="Smallest magnitude except zero.")
    std: float | None
    l2: float | None
    abs_max: float | None
    rms: float | None
    zero_share: float | None


def _real(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _whole(name: str) -> Callable[[StatisticsBatch], float | None]:
    return lambda batch: int(getattr(batch, name)[0])


def _recorded(name: str) -> Callable[[StatisticsBatch], float | None]:
    return lambda batch: _real(float(getattr(batch, name)[0]))


def _derived(name: str) -> Callable[[StatisticsBatch], float | None]:
    return lambda batch: _real(float(DERIVED[name](batch)[0]))


FIGURES: dict[str, Callable[[StatisticsBatch], float | None]] = {
    **{name: _whole(name) for name in _WHOLE},
    **{name: _recorded(name) for name in _REAL},
    **{name: _derived(name) for name in _DERIVED},
}
"""Name to function that computes the figure of a batch of one row."""


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
