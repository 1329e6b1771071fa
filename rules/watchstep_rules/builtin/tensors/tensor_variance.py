"""A tensor with a variance outside the configured bounds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block
from watchstep.format.statistics import variance
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at


class TensorVarianceParams(Params):
    """Parameters of `TensorVariance`; without any the rule judges nothing."""

    max_threshold: float | None = Field(None, ge=0, description="Largest tolerated variance.")
    min_threshold: float | None = Field(None, ge=0, description="Smallest tolerated variance.")


class TensorVariance(Rule[TensorVarianceParams, State]):
    """Fires when ``m2 / finite > max_threshold`` or ``< min_threshold``, the population variance of the finite elements.

    This is SageMaker's TensorVariance. As there, an omitted bound is not tested, because no bound fits all tensors. A tensor without finite
    elements has no variance, and that of a single element is meaningless; both are not judged.
    """

    name = "tensor_variance"
    summary = "a tensor's variance is outside the configured bounds"
    needs = Needs(collections=("weights", "gradients", "activations", "custom"))
    merge = "watermark"
    usual_causes = (
        "Activations grow or shrink from layer to layer: the initialization does not fit the activation function.",
        "The learning rate is so high that weights diverge.",
        "Inputs are not normalized.",
    )
    what_to_try = (
        "Use the initialization for the activation (He for rectifiers, Glorot for tanh), or normalization layers.",
        "Lower the learning rate, or warm it up.",
        "Scale inputs to mean 0 and variance 1.",
    )

    def conclusive(self, params: TensorVarianceParams, block: Block) -> NDArray[np.bool_]:
        """Rows with a variance."""
        return block.statistics.finite > 1

    def evaluate(
        self, params: TensorVarianceParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Judge each row by itself."""
        variances = np.where(block.statistics.finite > 1, variance(block.statistics), np.nan)
        high = np.inf if params.max_threshold is None else params.max_threshold
        low = -np.inf if params.min_threshold is None else params.min_threshold
        findings = []
        for row in map(int, np.flatnonzero((variances > high) | (variances < low))):
            value = float(variances[row])
            limit, side = (high, "above") if value > high else (low, "below")
            message = f"the variance of {block.info(row).name} is {value:.4g}, {side} {limit:.4g}"
            findings.append(
                finding_at(self.name, block, row, value=value, threshold=float(limit), message=message)
            )
        return state, findings
