"""Weights that change by far more, or far less, than they are large."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.capture.config import WEIGHT_CHANGE, element_probe
from watchstep.format.block import Block
from watchstep_rules.builtin.sagemaker.amazon import AmazonParams, ElementCoverage
from watchstep_rules.builtin.weights.weight_update_ratio import WeightUpdateRatio
from watchstep_rules.rule import Finding, Needs, Rule, finding_at
from watchstep_rules.signals.series import probe


class SagemakerWeightUpdateRatioParams(AmazonParams):
    """Parameters of `SagemakerWeightUpdateRatio`."""

    amazon: ClassVar[str] = "WeightUpdateRatio"
    num_steps: int | None = Field(
        None, ge=1, le=1_000_000, description="Steps to look back, at most; to the record before if null."
    )
    large_threshold: float = Field(10.0, ge=0, description="Ratio above which a change is too large.")
    small_threshold: float = Field(1e-8, ge=0, description="Ratio below which a change is too small.")
    epsilon: float = Field(1e-9, gt=0, description="Added to the norm of the weight.")

    @property
    def probe(self) -> str:
        """The probe that measures the change."""
        return element_probe(WEIGHT_CHANGE, self.num_steps or 0, self.epsilon)


class SagemakerWeightUpdateRatio(Rule[SagemakerWeightUpdateRatioParams, ElementCoverage]):
    """Fires when ``|w - w_before| / (|w_before| + epsilon)`` is above ``large_threshold`` or below ``small_threshold``.

    SageMaker's WeightUpdateRatio; the norm is the Euclidean one, which the developer guide does not say. ``w_before`` is the
    record before, or with ``num_steps`` the oldest one at a step of at least ``s - num_steps``. In train mode. Of weights of more
    than 16,384 elements, or where there are many, evenly spaced elements are compared. Frozen weights and schedules that
    end at zero are found: `weight_not_updating` leaves them alone.
    """

    name = "sagemaker_weight_update_ratio"
    summary = "weights change by far more or far less than they are large, as SageMaker tests it"
    needs = Needs(("weights",), ("weight",))
    merge = "per_worker"
    usual_causes = WeightUpdateRatio.usual_causes
    what_to_try = WeightUpdateRatio.what_to_try
    params_type = SagemakerWeightUpdateRatioParams
    state_type = ElementCoverage

    def needed(self, params: SagemakerWeightUpdateRatioParams) -> Needs:
        """The change of so many steps."""
        return Needs(self.needs.collections, self.needs.roles, probes=(params.probe,))

    def problem(self, state: ElementCoverage) -> str:
        """What to do where the recorder did not measure."""
        return state.problem("the change of weights")

    def conclusive(self, params: SagemakerWeightUpdateRatioParams, block: Block) -> NDArray[np.bool_]:
        """Rows with a ratio to an earlier record."""
        return probe(block, params.probe) >= 0

    def evaluate(
        self,
        params: SagemakerWeightUpdateRatioParams,
        state: ElementCoverage,
        context: Block,  # noqa: ARG002 - the contract's
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[ElementCoverage, list[Finding]]:
        """Judge each row by itself."""
        training = block.mode == 0
        ratio = np.where(training, probe(block, params.probe), np.nan)
        state = state.after(training, ratio)
        ratio = np.where(ratio >= 0, ratio, np.nan)  # -1 where there was no record before
        findings = []
        for row in np.flatnonzero(
            (ratio > params.large_threshold) | (ratio < params.small_threshold)
        ).tolist():
            large = ratio[row] > params.large_threshold
            limit, word = (params.large_threshold, "above") if large else (params.small_threshold, "below")
            message = (
                f"{block.info(row).name} has changed by {ratio[row]:.3g} of its norm, {word} {limit:.3g}"
            )
            findings.append(
                finding_at(self.name, block, row, value=float(ratio[row]), threshold=limit, message=message)
            )
        return state, findings
