"""Responses to queries, as JSON without non-finite numbers or as Arrow, and the figures of a tensor summary."""

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


class HistogramOutput(BaseModel):
    """Distribution of a tensor's elements over powers of two, over the steps."""

    tensor: str
    edges: list[int] = Field(description="Row i covers the steps edges[i] to edges[i + 1] - 1.")
    lower: Numbers = Field(description="Elements of column j are between lower[j] and upper[j].")
    upper: Numbers
    counts: list[list[int]]
    zeros: list[int] = Field(description="Number of elements equal to zero, which no column contains.")
    nonfinite: list[int]
    first: list[int] = Field(description="First measured step of each row; -1: none.")
    last: list[int] = Field(description="Last measured step of each row; -1: none.")


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
