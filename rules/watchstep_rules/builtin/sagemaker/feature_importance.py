"""A few features that have more than a share of all importance."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from watchstep.format.block import Block
from watchstep_rules.builtin.data.feature_importance import FeatureImportance
from watchstep_rules.builtin.sagemaker.amazon import AmazonParams, Patterns, is_matched
from watchstep_rules.rule import Finding, Needs, Rule, State, finding_at
from watchstep_rules.signals.nonfinite import has_probe
from watchstep_rules.signals.series import probe
from watchstep_rules.signals.tensor_selection import rows_where

MOST_FEATURES = 10
"""Of up to so many features the recorder tells the share."""


class SagemakerFeatureImportanceOverweightParams(AmazonParams):
    """Parameters of `SagemakerFeatureImportanceOverweight`."""

    amazon: ClassVar[str] = "FeatureImportanceOverweight"
    threshold: float = Field(0.8, ge=0, description="Share of all importance that they may have.")
    nfeatures: int = Field(3, ge=1, description="How many features that is, up to 10.")
    tensor_regex: Patterns = Field((".*feature_importance/weight",), description="Importances by name.")

    @field_validator("nfeatures")
    @classmethod
    def _is_recorded(cls, value: int) -> int:
        if value > MOST_FEATURES:
            raise ValueError(f"{value}: shares are recorded of the {MOST_FEATURES} largest features at most")
        return value


class SagemakerFeatureImportanceOverweightState(State):
    """Nothing."""


class SagemakerFeatureImportanceOverweight(
    Rule[SagemakerFeatureImportanceOverweightParams, SagemakerFeatureImportanceOverweightState]
):
    """Fires when the ``nfeatures`` largest importances are more than ``threshold`` of their sum: SageMaker's FeatureImportanceOverweight.

    A model of no more features than that fires always: `feature_importance` leaves it alone.
    """

    name = "sagemaker_feature_importance_overweight"
    summary = "a few features have nearly all importance, as SageMaker tests it"
    needs = Needs(collections=("custom",), roles=("feature_importance",))
    merge = "per_worker"
    usual_causes = FeatureImportance.usual_causes
    what_to_try = FeatureImportance.what_to_try
    params_type = SagemakerFeatureImportanceOverweightParams
    state_type = SagemakerFeatureImportanceOverweightState

    def conclusive(
        self, params: SagemakerFeatureImportanceOverweightParams, block: Block
    ) -> NDArray[np.bool_]:
        """Rows with the share of the largest features."""
        return has_probe(block, f"top_share_{params.nfeatures}")

    def evaluate(
        self,
        params: SagemakerFeatureImportanceOverweightParams,
        state: SagemakerFeatureImportanceOverweightState,
        context: Block,  # noqa: ARG002 - the contract's
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[SagemakerFeatureImportanceOverweightState, list[Finding]]:
        """Judge each record by itself."""
        share = probe(block, f"top_share_{params.nfeatures}")
        found = (share > params.threshold) & rows_where(block, is_matched, params.tensor_regex)
        return state, [
            finding_at(
                self.name,
                block,
                int(row),
                value=float(share[row]),
                threshold=params.threshold,
                message=(
                    f"{block.info(int(row)).name}: the {params.nfeatures} largest of {block.statistics.count[row]} features have "
                    f"{share[row]:.0%} of all importance, more than {params.threshold:.0%}"
                ),
            )
            for row in np.flatnonzero(found)
        ]
