"""Answers to queries: numbers that JSON can hold, and Arrow where it is asked for.

The figures of one tensor's summary.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from fastapi import Response
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from watchstep.format.statistics import DERIVED, StatisticsBatch

if TYPE_CHECKING:
    import pyarrow as pa


ARROW = "application/vnd.apache.arrow.stream"

Numbers = list[float | None]


class LineOutput(BaseModel):
    """One line of a series: a mode, a worker with a whole tensor, a replica, a stage. Its lists have one length."""

    mode: str
    worker: int = Field(description="The lowest, where shards merged.")
    replica: int
    stage: str
    step: list[int] = Field(description="The first step of each point.")
    last_step: list[int] = Field(
        description="The last step of each point; the first where it is of one step."
    )
    count: list[int] = Field(description="Rows of each point.")
    mean: Numbers = Field(description="Of the point's finite values; null where it has none.")
    min: Numbers
    max: Numbers
    nonfinite: list[int] = Field(description="Rows of the point without a finite value.")


class SeriesOutput(BaseModel):
    """One figure of one tensor over the steps."""

    tensor: str
    figure: str
    lines: list[LineOutput]
    left_out: int = Field(description="Lines that there are beyond these; name a worker or a mode.")


class HeatmapOutput(BaseModel):
    """One figure of many tensors over the steps."""

    figure: str
    tensors: list[str] = Field(description="Names, in the model's order; one row of values each.")
    left_out: int = Field(description="Tensors of the collection beyond these.")
    edges: list[int] = Field(description="Column i holds the steps edges[i] to edges[i + 1] - 1.")
    values: list[Numbers] = Field(description="null where a cell has no finite value.")


class HistogramOutput(BaseModel):
    """How a tensor's elements spread over powers of two, over the steps."""

    tensor: str
    edges: list[int] = Field(description="Row i holds the steps edges[i] to edges[i + 1] - 1.")
    lower: Numbers = Field(description="Elements of column j lie from lower[j] to upper[j].")
    upper: Numbers
    counts: list[list[int]]
    zeros: list[int] = Field(description="Elements equal to zero, which lie in no column.")
    nonfinite: list[int]


class ColumnOutput(BaseModel):
    """A column of a query's answer."""

    name: str
    type: str = Field(description="As Arrow calls it.")


class SqlOutput(BaseModel):
    """What a query gave."""

    columns: list[ColumnOutput]
    rows: list[list[Any]]
    more: bool = Field(description="There are more rows than the limit.")


class TensorEntry(BaseModel):
    """A tensor that was recorded."""

    name: str
    module: str
    module_type: str
    role: str
    order: int
    shape: list[int]
    dtype: str
    collections: list[str]
    derived: bool = Field(
        description="Not logged by the program: a loss as backward() was given it, divided where the program divides it."
    )


def numbers(values: NDArray[Any]) -> Numbers:
    """Finite numbers as they are, others as null: JSON has none of them."""
    return [value if math.isfinite(value) else None for value in values.tolist()]


def arrow(table: pa.Table) -> Response:
    """A table as an Arrow stream."""
    import pyarrow as pa

    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return Response(sink.getvalue(), media_type=ARROW)


def wants_arrow(accept: str | None) -> bool:
    """Whether a request asks for Arrow."""
    return accept is not None and ARROW in accept


def whole_numbers(values: NDArray[np.integer[Any]]) -> list[Any]:
    """Whole numbers, of any shape, as lists."""
    held: list[Any] = values.tolist()
    return held


_WHOLE = ("count", "nan", "pos_inf", "neg_inf", "zero", "negative")
_REAL = ("min", "max", "mean", "abs_min")
_DERIVED = ("std", "l2", "abs_max", "rms", "zero_share")


class FiguresOutput(BaseModel):
    """Figures of all elements; those from min on are of the finite ones, and null where there is none."""

    count: int
    nan: int
    pos_inf: int
    neg_inf: int
    zero: int
    negative: int
    min: float | None
    max: float | None
    mean: float | None
    abs_min: float | None = Field(description="The smallest magnitude but zero.")
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
"""Name → figure of a batch of one row."""
