"""A run whose figures part from those of another one."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

import numpy as np
from pydantic import Field, field_validator

from watchstep.format.block import Block
from watchstep.format.statistics import Floats
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.reference import (
    FIGURES,
    MOST_POINTS,
    MOST_TENSORS,
    Point,
    figure_of,
    is_training,
    lowest_workers,
)

Points = Annotated[list[Point], Field(min_length=1, max_length=MOST_POINTS)]
References = Annotated[dict[str, Points], Field(max_length=MOST_TENSORS)]


class SimilarAcrossRunsParams(Params):
    """Parameters of `SimilarAcrossRuns`."""

    reference: References = Field(
        {},
        description="For each tensor the other run's steps, ascending, and its figure there.",
    )
    figure: str = Field("rms", description="The figure that is compared; the reference is of the same.")
    tolerance: float = Field(
        0.5, ge=0, description="How far from the reference the figure may be, as a share of it …"
    )
    atol: float = Field(1e-8, ge=0, description="… and besides, as it stands.")

    @field_validator("figure")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in FIGURES:
            raise ValueError(f"figure {value!r} is not known: use one of {', '.join(FIGURES)}")
        return value

    @field_validator("reference")
    @classmethod
    def _ascending(cls, value: References) -> References:
        return ascending(value)


def ascending(reference: References) -> References:
    """The same reference.

    Raises:
        ValueError: the steps of a tensor do not ascend.
    """
    for name, points in reference.items():
        if any(later[0] <= point[0] for point, later in pairwise(points)):
            raise ValueError(f"the steps of {name!r} do not ascend")
    return reference


class SimilarAcrossRuns(Rule[SimilarAcrossRunsParams, State]):
    """Fires when ``|figure - reference(step)| > atol + tolerance * |reference(step)|``.

    ``reference(step)`` is the other run's figure. Between its steps it is on straight lines, and the figure may besides be
    anything that the other run had between them; before the first and after the last nothing is judged. So a run that
    is equal to the other never fires, whatever the tolerance. The other run is no input of a rule, for then the same rows could be judged otherwise later:
    its figures stand in the parameters, as `watchstep_rules.signals.reference.reference_of` gives them. Rows of the modes train
    and global are judged, of shards the whole tensor, of several workers the lowest that has the tensor at the step.

    SageMaker's SimilarAcrossRuns compares tensors with those of another trial by a criterion that is not published. Half of the
    reference is our choice: two seeds of one program differ by less in weights, by more in losses and gradients, where
    `for` should ask for many steps in a row. Off by default: it needs a reference.
    """

    name = "similar_across_runs"
    summary = "figures are no longer those of another run"
    needs = Needs(collections=("losses", "metrics", "weights", "biases", "gradients", "activations"))
    merge = "sealed"
    usual_causes = (
        "The program, its data, its seed or a library's version is not what it was in the other run.",
        "The number of workers changed, and with it the batch of a step.",
        "Numbers are rounded otherwise: another device, number format or compiler.",
    )
    what_to_try = (
        "Find the first step and tensor at which the two runs part: watchstep runs diff.",
        "Compare seeds, versions, the order of the data and the batch of all workers together.",
    )

    def evaluate(
        self, params: SimilarAcrossRunsParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Hold each row against the other run's step."""
        known = block.mask_of_tensors([info.name in params.reference for info in block.catalogue])
        if not known.any():  # without a reference, or in a block of other tensors
            return state, []
        rows = np.flatnonzero(known & is_training(block) & lowest_workers(block))
        if not len(rows):
            return state, []
        seen = figure_of(block.statistics, params.figure)[rows]
        wanted, lowest, highest = (column[rows] for column in _reference(params, block))
        apart = np.maximum(np.maximum(lowest - seen, seen - highest), 0.0)
        limit = params.atol + params.tolerance * np.abs(wanted)
        return state, [
            finding_at(
                self.name,
                block,
                int(rows[place]),
                value=float(seen[place]),
                threshold=float(wanted[place]),
                message=(
                    f"{params.figure} of {block.info(int(rows[place])).name} is {seen[place]:.4g}, in the other run "
                    f"{wanted[place]:.4g}: {limit[place]:.3g} apart are tolerated"
                ),
            )
            for place in np.flatnonzero(apart > limit)
        ]


def _reference(params: SimilarAcrossRunsParams, block: Block) -> tuple[Floats, Floats, Floats]:
    """The other run's figure at each row, and the lowest and highest that it may have been; NaN where it has none."""
    wanted, lowest, highest = np.full((3, len(block)), np.nan)
    order = np.argsort(block.tensor, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(block.tensor[order])) + 1):
        name = block.info(int(rows[0])).name
        if name not in params.reference:
            continue
        points, step = params.reference[name], block.step[rows]
        steps = np.array([point[0] for point in points])
        figures = np.array([point[1] for point in points])
        line = np.interp(step, steps, figures, left=np.nan, right=np.nan)
        # Of a step between two points, the range that the later one has of the steps that were left out before it.
        after = np.minimum(np.searchsorted(steps, step), len(steps) - 1)
        low = np.array([point[2] if len(point) > 2 else np.inf for point in points])[after]
        high = np.array([point[3] if len(point) > 2 else -np.inf for point in points])[after]
        between = steps[after] != step
        wanted[rows] = line
        lowest[rows] = np.where(between, np.minimum(line, low), line)
        highest[rows] = np.where(between, np.maximum(line, high), line)
    return wanted, lowest, highest
