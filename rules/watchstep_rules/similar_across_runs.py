"""A run whose figures part from those of another one."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

import numpy as np
from pydantic import Field, field_validator

from watchstep.block import Block
from watchstep.statistics import Floats
from watchstep_rules.contract import Needs, Params, Rule, State
from watchstep_rules.finding import Finding, finding_at
from watchstep_rules.reference import FIGURES, MOST_POINTS, MOST_TENSORS, figure_of, is_training

Points = Annotated[list[tuple[int, float]], Field(min_length=1, max_length=MOST_POINTS)]


class SimilarAcrossRunsParams(Params):
    """Parameters of `SimilarAcrossRuns`."""

    reference: dict[str, Points] = Field(
        {},
        max_length=MOST_TENSORS,
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
    def _ascending(cls, value: dict[str, Points]) -> dict[str, Points]:
        for name, points in value.items():
            if any(later <= step for (step, _), (later, _) in pairwise(points)):
                raise ValueError(f"the steps of {name!r} do not ascend")
        return value


class SimilarAcrossRunsState(State):
    """Nothing."""


class SimilarAcrossRuns(Rule[SimilarAcrossRunsParams, SimilarAcrossRunsState]):
    """Fires when ``|figure - reference(step)| > atol + tolerance * |reference(step)|``.

    ``reference(step)`` is the other run's figure, on straight lines between its steps; before the first and after the
    last nothing is judged. The other run is no input of a rule, for then the same rows could be judged otherwise later:
    its figures stand in the parameters, as `watchstep_rules.reference.reference_of` gives them. Rows of the modes train
    and global are judged, of shards the whole tensor.

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
    params_type = SimilarAcrossRunsParams
    state_type = SimilarAcrossRunsState

    def evaluate(
        self,
        params: SimilarAcrossRunsParams,
        state: SimilarAcrossRunsState,
        context: Block,  # noqa: ARG002 - the contract's
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[SimilarAcrossRunsState, list[Finding]]:
        """Hold each row against the other run's step."""
        known = block.mask_of_tensors([info.name in params.reference for info in block.catalogue])
        rows = np.flatnonzero(known & is_training(block))
        if not len(rows):
            return state, []
        seen = figure_of(block.statistics, params.figure)[rows]
        wanted = _reference(params, block)[rows]
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
            for place in np.flatnonzero(np.abs(seen - wanted) > limit)
        ]


def _reference(params: SimilarAcrossRunsParams, block: Block) -> Floats:
    """The other run's figure at each row; NaN where it has none."""
    wanted = np.full(len(block), np.nan)
    order = np.argsort(block.tensor, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(block.tensor[order])) + 1):
        name = block.info(int(rows[0])).name
        if name in params.reference:
            steps, values = zip(*params.reference[name], strict=True)
            wanted[rows] = np.interp(block.step[rows], steps, values, left=np.nan, right=np.nan)
    return wanted
