"""Lines over a grid of columns that all lines of a response share, so that a page draws them over each other."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from pydantic import BaseModel, Field

Values = list[float | None]

MAX_COLUMNS = 2000
"""Maximum number of columns of a picture; no screen of today shows more."""

LAST_STEP = 2**62

Columns = Annotated[
    int,
    Query(
        ge=1,
        le=MAX_COLUMNS,
        description="Maximum number of columns, for example the width of the picture in pixels.",
    ),
]
FirstStep = Annotated[int, Query(ge=0, le=LAST_STEP, description="First step.")]
LastStep = Annotated[int, Query(ge=0, le=LAST_STEP, description="Last step.")]


class NewestValue(BaseModel):
    """The value of the newest row of a line, also if it is not finite."""

    step: int
    value: float | None = Field(
        description="Of several workers the mean, unless one is not finite; null: not finite."
    )
    text: str = Field(description="The value as text: nan, inf or -inf if it is not finite.")


class BinnedLine(BaseModel):
    """One figure of one tensor in one mode, over the columns of the grid. Each list has one entry per column.

    A column summarizes the rows of its steps and of all workers, or of one.
    """

    tensor: str
    figure: str
    mode: str
    workers: int = Field(description="Number of workers with rows.")
    worker: int | None = Field(None, description="Rank, of a line of one worker; null: of all workers.")
    derived: bool = Field(
        False, description="Whether the program did not log the loss; then it was read at backward()."
    )
    count: list[int] = Field(description="Number of rows of each column; 0: none was recorded.")
    mean: Values = Field(description="Mean of the finite values of each column; null: there are none.")
    min: Values
    max: Values
    nonfinite: list[int] = Field(description="Number of rows of each column without a finite value.")
    newest: NewestValue | None = Field(description="Null: no row in these columns.")


class LineGroup(BaseModel):
    """Lines of one kind."""

    lines: list[BinnedLine]
    left_out: int = Field(0, description="Number of lines that are omitted because there are too many.")


class StepGrid(BaseModel):
    """The columns of a picture over the steps."""

    first: int = Field(description="First recorded step of the run; 0 without records.")
    last: int = Field(description="Last recorded step of the run; -1 without records.")
    edges: list[int] = Field(description="Column i covers the steps edges[i] to edges[i + 1] - 1.")
    time_ns: list[int | None] = Field(
        description="Earliest time of the rows of each column by the clock of its worker; null: no row."
    )
