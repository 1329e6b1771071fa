"""Responses of the pictures of tensors: heatmap, headroom in number formats, and the page of one tensor."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from watchstep.reading.headroom import FormatState
from watchstep_rules.signals.constant_thresholds import Side
from watchstep_services.api.queries.answers import HistogramOutput, LineOutput, Numbers, TensorEntry


class ModuleNode(BaseModel):
    """A module of the model, as far as the paths of its tensors name it."""

    path: str = Field(description="Path from the model, e.g. model.blocks.0.mlp.")
    name: str = Field(description="Last part of the path.")
    module_type: str = Field(description="Class of the module; empty if it has no tensor itself.")
    parent: int | None = Field(description="Index of the parent in the list; null for an outermost module.")
    depth: int = Field(description="Number of modules around it.")
    rows: list[int] = Field(description="Rows of its own tensors.")
    first_row: int = Field(description="First row of it and the modules in it.")
    end_row: int = Field(description="Row after the last one of it and the modules in it.")


class CellCounts(BaseModel):
    """Counts of a matrix that is mostly zero: entry i is in row[i] and column[i]."""

    row: list[int]
    column: list[int]
    count: list[int]


class HeatmapOutput(BaseModel):
    """One figure of many tensors over the steps: a row per tensor, in the model's order, and a column per range of steps."""

    figure: str
    mode: str | None = Field(description="Mode of the rows; null: all.")
    tensors: list[str] = Field(description="Names, one per row.")
    layers: list[TensorEntry] = Field(description="The tensors with their modules, one per row.")
    modules: list[ModuleNode] = Field(description="The module tree; each module precedes the modules in it.")
    left_out: int = Field(description="Number of omitted tensors.")
    first: int = Field(description="First recorded step of the run; 0 without records.")
    last: int = Field(description="Last recorded step of the run; -1 without records.")
    edges: list[int] = Field(description="Column i covers the steps edges[i] to edges[i + 1] - 1.")
    mean: list[Numbers] | None = Field(
        description="Mean of the finite values of each cell; null: there is none. Null without reduce=mean."
    )
    min: list[Numbers] | None = Field(description="Smallest value of each cell. Null without reduce=min.")
    max: list[Numbers] | None = Field(description="Largest value of each cell. Null without reduce=max.")
    nonfinite: CellCounts = Field(description="Numbers of NaN and infinite elements, where there are any.")
    low: float | None = Field(description="Smallest value of the matrices; null without any.")
    high: float | None = Field(description="Largest value of the matrices; null without any.")


class NumberFormatOutput(BaseModel):
    """The limits of a number format."""

    name: str
    largest: float = Field(description="Largest finite number.")
    smallest_normal: float = Field(description="Smallest normal number; below it, numbers have fewer digits.")
    smallest: float = Field(description="Smallest subnormal number; smaller magnitudes become zero.")
    source: str = Field(description="Where the limits are defined.")


class FormatHeadroomOutput(BaseModel):
    """How far a tensor is from the limits of a number format."""

    format: str
    overflow_bits: float | None = Field(
        description="Powers of two from the largest magnitude to the largest number; negative: elements overflow. Null without elements."
    )
    underflow_bits: float | None = Field(
        description="Powers of two from the smallest normal number to the smallest magnitude; negative: elements lose digits or become zero."
    )
    state: FormatState = Field(
        description="overflow; close: less than a doubling remains; underflow: some elements become zero; subnormal: some lose digits; ok."
    )


class FormatSharesOutput(BaseModel):
    """Shares of a tensor's finite, non-zero elements beyond the limits of a number format, by powers of two."""

    format: str
    overflow: float = Field(description="At or above the power of two after the largest number.")
    subnormal: float = Field(description="Below the smallest normal number, and not below the smallest one.")
    underflow: float = Field(description="Below the smallest number.")


class TensorHeadroom(BaseModel):
    """Extremes of a tensor's magnitudes, and what remains to the limits of number formats."""

    tensor: str
    largest: float | None = Field(description="Largest magnitude; null without a finite, non-zero element.")
    largest_step: int = Field(description="First step with it; -1: none.")
    smallest: float | None = Field(description="Smallest non-zero magnitude.")
    smallest_step: int = Field(description="First step with it; -1: none.")
    formats: list[FormatHeadroomOutput]
    shares: list[FormatSharesOutput] = Field(
        description="From the last histogram of the page of a tensor; otherwise empty."
    )


class HeadroomOutput(BaseModel):
    """Headroom of tensors in number formats."""

    formats: list[NumberFormatOutput]
    mode: str | None = Field(description="Mode of the rows; null: all.")
    edges: list[int] = Field(description="Column i covers the steps edges[i] to edges[i + 1] - 1.")
    largest: Numbers = Field(description="Largest magnitude of each column, over all tensors.")
    smallest: Numbers = Field(description="Smallest non-zero magnitude of each column, over all tensors.")
    tensors: list[TensorHeadroom] = Field(description="In the model's order.")
    left_out: int = Field(description="Number of omitted tensors.")


class FigureLines(BaseModel):
    """One figure of the tensor over the steps."""

    figure: str
    lines: list[LineOutput]
    left_out: int = Field(description="Number of omitted lines; select a worker or a mode to get them.")


class ThresholdOutput(BaseModel):
    """A threshold of all steps. It is one condition of the rule, which may have others."""

    figure: str
    parameter: str = Field(description="Parameter of the rule.")
    value: float
    side: Side = Field(description="On which side of the threshold values meet the condition.")


class RecordedThreshold(BaseModel):
    """A finding of a rule about the tensor: its value at a step, and its threshold there."""

    attempt: str
    step: int
    mode: str
    worker: int
    value: float | None = Field(description="In the rule's own unit; null if it is not finite.")
    threshold: float | None
    message: str


class WatchingRule(BaseModel):
    """A rule config that judges the tensor."""

    name: str
    rule: str
    severity: Literal["info", "warning", "critical"]
    thresholds: list[ThresholdOutput]
    findings: list[RecordedThreshold] = Field(
        description="By attempt and step. Only the first findings of a rule config on an attempt are stored."
    )
    left_out: int = Field(description="Number of stored findings about the tensor that are omitted.")


class SavedObject(BaseModel):
    """An object with full tensors: a snapshot, or the saved tensors of a collection."""

    attempt: str
    worker: int
    step: int
    mode: str
    collection: str = Field(description="Collection; empty for a snapshot of weights and gradients.")


class TensorNeighbours(BaseModel):
    """Tensors beside a tensor, in the model's order."""

    previous: str | None = Field(description="The tensor of the same role before it; null: it is the first.")
    next: str | None = Field(description="The tensor of the same role after it; null: it is the last.")
    module: list[TensorEntry] = Field(
        description="Tensors of its module, with itself; at most 100. Empty if it belongs to no module."
    )


class TensorPage(BaseModel):
    """What is recorded about one tensor."""

    tensor: TensorEntry
    location: str = Field(description="URL of the run on its store, for watchstep.open_run.")
    neighbours: TensorNeighbours
    figures: list[str] = Field(description="Names of all recorded and derived figures, and of probes.")
    first: int = Field(description="First recorded step of the run; 0 without records.")
    last: int = Field(description="Last recorded step of the run; -1 without records.")
    modes: list[str] = Field(description="Modes in which it was measured within the requested steps.")
    workers: list[int] = Field(description="Workers that measured it within the requested steps.")
    series: list[FigureLines]
    rules: list[WatchingRule]
    histogram: HistogramOutput | None = Field(
        description="Null if rows=0, or if there is no row of the mode and the worker."
    )
    headroom: TensorHeadroom
    saved: list[SavedObject] = Field(
        description="Objects that may contain the full tensor, by step: those of its collections, and snapshots. Their headers are not read."
    )
    saved_left_out: int = Field(description="Number of earlier objects that are omitted.")
