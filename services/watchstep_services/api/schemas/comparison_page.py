"""The response of the page that compares runs."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from watchstep_services.api.schemas.binned_lines import Values
from watchstep_services.api.schemas.run_pages import RunFacts

Align = Literal["step", "time"]


class ComparedRun(BaseModel):
    """A compared run."""

    facts: RunFacts
    first: int = Field(description="First recorded step; 0 without records.")
    last: int = Field(description="Last recorded step; -1 without records.")
    started_ns: int | None = Field(description="Time that is 0 on the time axis; null: no rows.")
    problem: str = Field(description="Why it has no statistics; empty: it has.")
    location: str = Field(description="URL of the run on its store, for watchstep.open_run.")


class ComparedLine(BaseModel):
    """A series of one run over the common grid. Each list has one entry per column."""

    run: str
    workers: int
    count: list[int]
    mean: Values
    min: Values
    max: Values
    nonfinite: list[int]


class ComparedSeries(BaseModel):
    """One figure of one tensor of several runs."""

    tensor: str
    figure: str
    mode: str
    lines: list[ComparedLine] = Field(description="Of the runs that have it, in the order of the request.")


class ComparisonGrid(BaseModel):
    """The common columns."""

    align: Align
    edges: list[int] = Field(
        description="Column i covers edges[i] to edges[i + 1] - 1: steps, or nanoseconds since the first row of each run."
    )


class FirstDifference(BaseModel):
    """Where a tensor first differs."""

    step: int
    mode: str
    tensor: str
    worker: int
    figure: str
    a: float | None = Field(description="Value of the reference; null: none, or not finite.")
    b: float | None
    relative: float | None = Field(description="Difference in relation to the figure's scale.")


class Divergence(BaseModel):
    """Where a run first differs from the reference, the first run of the request."""

    reference: str
    run: str
    first: FirstDifference | None = Field(
        description="The first difference in the order of the computation; null: none was found in the compared steps."
    )
    tensors: list[FirstDifference] = Field(
        description="The first difference of each tensor, by step and the order of the computation; at most 500."
    )
    compared_first: int = Field(description="First step that was compared.")
    compared_last: int = Field(description="Last step that was compared; -1: none.")
    tensors_left_out: int = Field(
        description="Number of tensors that were not compared because the time was over."
    )
    complete: bool = Field(
        description="Whether each tensor was compared up to its first difference, or to the last common step."
    )
    rows: int = Field(description="Number of compared rows.")
    only_reference: list[str] = Field(description="Tensors of the reference only; at most 100.")
    only_run: list[str]
    notes: list[str]


class DifferingSetting(BaseModel):
    """A setting that is not the same in all runs."""

    source: Literal["hyperparameter", "environment", "config"]
    name: str
    values: list[str | float | bool | None] = Field(
        description="By run, in the order of the request; null: not set."
    )
    step: int | None = Field(
        description="Of a hyperparameter: the first step at which the values differ; null: of the whole run."
    )


class ComparedSettings(BaseModel):
    """The settings of all runs."""

    differing: list[DifferingSetting] = Field(
        description="Hyperparameters first, by step, then the environment and the capture configuration; at most 200."
    )
    compared: dict[str, int] = Field(
        description="Kind of setting to the number of settings that were compared."
    )


class Comparison(BaseModel):
    """Several runs on a common axis."""

    runs: list[ComparedRun]
    grid: ComparisonGrid
    series: list[ComparedSeries]
    left_out: int = Field(description="Number of series that are omitted because there are too many.")
    tensors: list[str] = Field(
        description="Tensors that can be chosen: those of two or more runs; at most 1,000."
    )
    divergences: list[Divergence]
    settings: ComparedSettings
