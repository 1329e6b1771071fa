"""A tensor whose variance is above one bound or below another."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from watchstep.format.block import Block
from watchstep.format.statistics import variance
from watchstep_rules.builtin.sagemaker.amazon import ScopedParams
from watchstep_rules.builtin.tensors.tensor_variance import TensorVariance
from watchstep_rules.rule import Finding, Needs, Rule, State, finding_at


class SagemakerTensorVarianceParams(ScopedParams):
    """Parameters of `SagemakerTensorVariance`; it judges nothing until a bound is given."""

    amazon: ClassVar[str] = "TensorVariance"
    max_threshold: float | None = Field(None, ge=0, description="Variance above which a tensor is found.")
    min_threshold: float | None = Field(None, ge=0, description="Variance below which a tensor is found.")


class SagemakerTensorVarianceState(State):
    """Nothing."""


class SagemakerTensorVariance(Rule[SagemakerTensorVarianceParams, SagemakerTensorVarianceState]):
    """Fires when ``var(t) > max_threshold`` or ``var(t) < min_threshold``, the population variance: SageMaker's TensorVariance.

    A tensor that holds NaN or infinity has no variance, and a single element one of 0. Amazon demands ``collection_names`` or
    ``tensor_regex``. Where neither is given, weights, gradients and activations are judged here.
    """

    name = "sagemaker_tensor_variance"
    summary = "a tensor's variance is above or below given bounds, as SageMaker tests it"
    needs = Needs(("weights", "gradients", "activations"), ("weight", "gradient", "output"))
    merge = "sealed"
    usual_causes = TensorVariance.usual_causes
    what_to_try = TensorVariance.what_to_try
    params_type = SagemakerTensorVarianceParams
    state_type = SagemakerTensorVarianceState

    def needed(self, params: SagemakerTensorVarianceParams) -> Needs:
        """The tensors that are named."""
        return params.needs_of(self.needs)

    def evaluate(
        self,
        params: SagemakerTensorVarianceParams,
        state: SagemakerTensorVarianceState,
        context: Block,  # noqa: ARG002 - the contract's
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[SagemakerTensorVarianceState, list[Finding]]:
        """Judge each row by itself."""
        judged = params.rows(block) & (block.statistics.nonfinite == 0)
        spread = np.where(judged, variance(block.statistics), np.nan)
        high = np.inf if params.max_threshold is None else params.max_threshold
        low = -np.inf if params.min_threshold is None else params.min_threshold
        findings = []
        for row in np.flatnonzero((spread > high) | (spread < low)).tolist():
            limit, word = (high, "above") if spread[row] > high else (low, "below")
            message = f"the variance of {block.info(row).name} is {spread[row]:.4g}, {word} {limit:.4g}"
            findings.append(
                finding_at(
                    self.name, block, row, value=float(spread[row]), threshold=float(limit), message=message
                )
            )
        return state, findings
