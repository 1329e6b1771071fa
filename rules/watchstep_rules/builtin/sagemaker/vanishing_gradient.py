"""A gradient whose mean magnitude is below a threshold, whatever the others' is."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from watchstep.format.block import Block
from watchstep.format.statistics import abs_mean
from watchstep_rules.builtin.gradients.vanishing_gradient import VanishingGradient
from watchstep_rules.builtin.sagemaker.amazon import AmazonParams
from watchstep_rules.rule import Finding, Needs, Rule, State, finding_at


class SagemakerVanishingGradientParams(AmazonParams):
    """Parameters of `SagemakerVanishingGradient`."""

    amazon: ClassVar[str] = "VanishingGradient"
    threshold: float = Field(1e-7, gt=0, description="Mean magnitude below which a gradient has vanished.")


class SagemakerVanishingGradientState(State):
    """Nothing."""


class SagemakerVanishingGradient(Rule[SagemakerVanishingGradientParams, SagemakerVanishingGradientState]):
    """Fires when ``mean(|g|) < threshold`` for any gradient: SageMaker's VanishingGradient, with its 1e-7.

    The mean is over all elements, zeros included; a gradient that holds NaN or infinity has no such mean. Biases before
    normalisation, embeddings of which a batch touches few rows, and trainings that have converged have such gradients:
    `vanishing_gradient` leaves them alone, this rule does not.
    """

    name = "sagemaker_vanishing_gradient"
    summary = "the mean magnitude of a gradient is below a threshold, as SageMaker tests it"
    needs = Needs(collections=("gradients",), roles=("gradient",))
    merge = "sealed"
    usual_causes = VanishingGradient.usual_causes
    what_to_try = VanishingGradient.what_to_try
    params_type = SagemakerVanishingGradientParams
    state_type = SagemakerVanishingGradientState

    def evaluate(
        self,
        params: SagemakerVanishingGradientParams,
        state: SagemakerVanishingGradientState,
        context: Block,  # noqa: ARG002 - the contract's
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[SagemakerVanishingGradientState, list[Finding]]:
        """Judge each row by itself."""
        size = abs_mean(block.statistics)
        return state, [
            finding_at(
                self.name,
                block,
                int(row),
                value=float(size[row]),
                threshold=params.threshold,
                message=f"mean |gradient| of {block.info(int(row)).name} is {size[row]:.3g}, below {params.threshold:.3g}",
            )
            for row in np.flatnonzero((size < params.threshold) & (block.statistics.nonfinite == 0))
        ]
