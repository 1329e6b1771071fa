"""A layer whose gradient is close to nothing while others still learn."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from watchstep.block import Block
from watchstep.derived import abs_mean
from watchstep_rules.contract import Needs, Params, Rule, State
from watchstep_rules.finding import Finding, finding_at


class VanishingGradientParams(Params):
    """Parameters of `VanishingGradient`."""

    threshold: float = Field(
        1e-7, gt=0, description="Mean magnitude below which a gradient counts as vanished."
    )
    relative: float = Field(
        1e-3,
        gt=0,
        le=1,
        description="… and it is less than this share of the largest layer's in the same step.",
    )
    min_dimensions: int = Field(2, ge=0, description="Judge parameters with at least so many dimensions.")


class VanishingGradientState(State):
    """Nothing is remembered."""


class VanishingGradient(Rule[VanishingGradientParams, VanishingGradientState]):
    """Fires when ``mean(|g|) < threshold`` and ``mean(|g|) < relative * max over layers of mean(|g|)``.

    The first test and its 1e-7 are SageMaker's VanishingGradient. The second tells a layer that starves from a
    training that has converged, where all gradients are small together; its 1e-3 is the first-to-last-layer ratio of
    AutoTrainer (Zhang et al., ICSE 2021). Vectors are left out: the gradient of a bias before batch
    normalisation, or of a key bias in attention, is zero by construction.
    """

    name = "vanishing_gradient"
    summary = "a layer's gradient is close to nothing while others still learn"
    needs = Needs(collections=("gradients",), roles=("gradient",))
    merge = "sealed"
    params_type = VanishingGradientParams
    state_type = VanishingGradientState

    def evaluate(
        self,
        params: VanishingGradientParams,
        state: VanishingGradientState,
        context: Block,  # noqa: ARG002 - the contract's
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[VanishingGradientState, list[Finding]]:
        """Judge each step by itself, its layers against each other."""
        wide = block.mask_of_tensors([len(info.shape) >= params.min_dimensions for info in block.catalogue])
        judged = block.where(wide)
        if not len(judged):
            return state, []
        size = abs_mean(judged.statistics)
        _, step = np.unique(np.stack([judged.step, judged.worker, judged.mode]), axis=1, return_inverse=True)
        largest = np.full(int(step.max()) + 1, -np.inf)
        np.fmax.at(largest, step.ravel(), size)
        limit = np.minimum(params.threshold, params.relative * largest[step.ravel()])
        return state, [
            self._finding(judged, int(row), float(size[row]), float(limit[row]))
            for row in np.flatnonzero(size < limit)
        ]

    def _finding(self, block: Block, row: int, size: float, limit: float) -> Finding:
        message = f"mean |gradient| of {block.info(row).name} is {size:.3g}, below {limit:.3g}, while other layers learn"
        return finding_at(self.name, block, row, value=size, threshold=limit, message=message)
