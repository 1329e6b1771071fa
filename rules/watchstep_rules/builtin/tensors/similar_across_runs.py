"""A run with statistics that deviate from those of another run."""

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
        description="For each tensor the steps of the other run, ascending, and the statistic at each step.",
    )
    figure: str = Field("rms", description="The statistic to compare, also that of the reference.")
    tolerance: float = Field(
        0.5, ge=0, description="Tolerated difference from the reference, as a share of it."
    )
    atol: float = Field(1e-8, ge=0, description="Tolerated absolute difference, in addition to tolerance.")

    @field_validator("figure")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in FIGURES:
            raise ValueError(f"unknown figure {value!r}: use one of {', '.join(FIGURES)}")
        return value

    @field_validator("reference")
    @classmethod
    def _ascending(cls, value: References) -> References:
        return ascending(value)


def ascending(reference: References) -> References:
    """Check that steps ascend; returns the reference.

    Raises:
        ValueError: the steps of a tensor do not ascend.
    """
    for name, points in reference.items():
        if any(later[0] <= point[0] for point, later in pairwise(points)):
            raise ValueError(f"the steps of {name!r} do not ascend")
    return reference


class SimilarAcrossRuns(Rule[SimilarAcrossRunsParams, State]):
    """Fires when ``|figure - reference(step)| > atol + tolerance * |reference(step)|``.

    ``reference(step)`` is the statistic of the other run, linearly interpolated between its steps; any value that the other run had
    between them is accepted too. Nothing is judged before the first and after the last step. A run that equals the other therefore never
    fires, whatever the tolerance. The other run is not an input of the rule, because then the same rows could later be judged differently:
    its statistics are parameters, as computed by `watchstep_rules.signals.reference.reference_of`. Rows of the modes train and global are
    judged: shards as a whole tensor, and of several workers the lowest that has the tensor at the step.

    SageMaker's SimilarAcrossRuns compares tensors with those of another trial by an unpublished criterion. Half of the reference is our
    choice: two seeds of one program differ by less in weights, and by more in losses and gradients, for which ``for`` should require many
    consecutive steps. Off by default, because it needs a reference.
    """

    name = "similar_across_runs"
    summary = "statistics deviate from those of another run"
    needs = Needs(collections=("losses", "metrics", "weights", "biases", "gradients", "activations"))
    merge = "watermark"
    usual_causes = (
        "The program, its data, its seed or a library version differs from the other run.",
        "The number of workers changed, and with it the batch of a step.",
        "Rounding differs: another device, number format or compiler.",
    )
    what_to_try = (
        "Find the first step and tensor at which the two runs differ: watchstep runs diff.",
        "Compare seeds, versions, the order of the data and the batch of all workers together.",
    )

    def evaluate(
        self, params: SimilarAcrossRunsParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Compare each row with the step of the other run."""
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
    """The statistic of the other run at each row, and its lowest and highest possible value; NaN if it has none."""
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
        # For a step between two points, the later point has the range of the omitted steps before it.
        after = np.minimum(np.searchsorted(steps, step), len(steps) - 1)
        low = np.array([point[2] if len(point) > 2 else np.inf for point in points])[after]
        high = np.array([point[3] if len(point) > 2 else -np.inf for point in points])[after]
        between = steps[after] != step
        wanted[rows] = line
        lowest[rows] = np.where(between, np.minimum(line, low), line)
        highest[rows] = np.where(between, np.maximum(line, high), line)
    return wanted, lowest, highest
