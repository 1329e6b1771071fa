"""A tensor whose variance is above or below what its owner expects."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block
from watchstep.format.statistics import variance
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at


class TensorVarianceParams(Params):
    """Parameters of `TensorVariance`; it judges nothing until one is given."""

    max_threshold: float | None = Field(None, ge=0, description="Variance above which a tensor is found.")
    min_threshold: float | None = Field(None, ge=0, description="Variance below which a tensor is found.")


class TensorVariance(Rule[TensorVarianceParams, State]):
    """Fires when ``m2 / finite > max_threshold`` or ``< min_threshold``, the population variance of the finite elements.

    That is SageMaker's TensorVariance; as there, a bound that is not given is not tested, for none fits all tensors. A
    tensor without finite elements has no variance, and one of a single element has none to speak of: both are left alone.
    """

    name = "tensor_variance"
    summary = "a tensor's variance is above or below the bounds that it was given"
    needs = Needs(collections=("weights", "gradients", "activations"), roles=("weight", "gradient", "output"))
    merge = "sealed"
    usual_causes = (
        "Activations grow or shrink from layer to layer: the initialisation does not fit the activation function.",
        "The learning rate is so high that weights run away.",
        "Inputs are not normalised.",
    )
    what_to_try = (
        "Use the initialisation made for the activation (He for rectifiers, Glorot for tanh), or normalisation layers.",
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
        held = np.where(block.statistics.finite > 1, variance(block.statistics), np.nan)
        high = np.inf if params.max_threshold is None else params.max_threshold
        low = -np.inf if params.min_threshold is None else params.min_threshold
        found = []
        for row in map(int, np.flatnonzero((held > high) | (held < low))):
            limit, word = (high, "above") if held[row] > high else (low, "below")
            message = f"the variance of {block.info(row).name} is {held[row]:.4g}, {word} {limit:.4g}"
            found.append(
                finding_at(
                    self.name, block, row, value=float(held[row]), threshold=float(limit), message=message
                )
            )
        return state, found
