"""SageMaker rules about XGBoost: feature importance and tree depth."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from watchstep.format.block import Block
from watchstep_rules.builtin.data.trees import FeatureImportance, TreeDepth, share_findings
from watchstep_rules.builtin.sagemaker.parameters import AmazonParams, Patterns, is_matched
from watchstep_rules.rule import Finding, Needs, Rule, State, finding_at
from watchstep_rules.signals.nonfinite import has_probe
from watchstep_rules.signals.series import probe
from watchstep_rules.signals.tensor_selection import rows_where

MOST_FEATURES = 10
"""The largest number of features for which the recorder measures the share."""


class SagemakerFeatureImportanceOverweightParams(AmazonParams):
    """Parameters of `SagemakerFeatureImportanceOverweight`."""

    amazon: ClassVar[str] = "FeatureImportanceOverweight"
    threshold: float = Field(
        0.8, ge=0, description="Tolerated share of all importance in the largest features."
    )
    nfeatures: int = Field(3, ge=1, description="Number of largest features, up to 10.")
    tensor_regex: Patterns = Field((".*feature_importance/weight",), description="Importances by name.")

    @field_validator("nfeatures")
    @classmethod
    def _is_recorded(cls, value: int) -> int:
        if value > MOST_FEATURES:
            raise ValueError(
                f"{value}: shares are recorded for up to {MOST_FEATURES} features; use a smaller number"
            )
        return value


class SagemakerFeatureImportanceOverweight(Rule[SagemakerFeatureImportanceOverweightParams, State]):
    """Fires when the ``nfeatures`` largest importances are more than ``threshold`` of their sum: SageMaker's FeatureImportanceOverweight.

    It always fires for a model with no more than ``nfeatures`` features; `feature_importance` does not judge such a model.
    """

    name = "sagemaker_feature_importance_overweight"
    summary = "a few features have nearly all importance, by SageMaker's criterion"
    needs = Needs(collections=("custom",), roles=("feature_importance",))
    merge = "per_worker"
    usual_causes = FeatureImportance.usual_causes
    what_to_try = FeatureImportance.what_to_try

    def conclusive(
        self, params: SagemakerFeatureImportanceOverweightParams, block: Block
    ) -> NDArray[np.bool_]:
        """Rows with the share of the largest features."""
        return has_probe(block, f"top_share_{params.nfeatures}")

    def evaluate(
        self,
        params: SagemakerFeatureImportanceOverweightParams,
        state: State,
        context: Block,
        block: Block,
        now: int,
    ) -> tuple[State, list[Finding]]:
        """Judge each record by itself."""
        share = probe(block, f"top_share_{params.nfeatures}")
        is_hit = (share > params.threshold) & rows_where(block, is_matched, params.tensor_regex)
        return state, share_findings(self.name, block, is_hit, params.nfeatures, params.threshold)


class SagemakerTreeDepthParams(AmazonParams):
    """Parameters of `SagemakerTreeDepth`."""

    amazon: ClassVar[str] = "TreeDepth"
    depth: float = Field(4.0, ge=0, description="Tolerated depth of the trees of a round.")


class SagemakerTreeDepth(Rule[SagemakerTreeDepthParams, State]):
    """Fires when ``log2(largest node id) > depth`` in a boosting round: SageMaker's TreeDepth, with its limit.

    Nodes are numbered from 0 in the order of XGBoost's dump. The last node of a complete tree of depth d is ``2^(d + 1) - 2``, with a
    logarithm of nearly ``d + 1``. Of LightGBM's trees, the nodes are numbered as if XGBoost had made the same splits in the same order, so
    that the largest is ``2 * leaves - 2``. `tree_depth` judges the depth itself.
    """

    name = "sagemaker_tree_depth"
    summary = "a boosted tree has many nodes, by SageMaker's criterion for its depth"
    needs = Needs(collections=("custom",), roles=("tree_depth",))
    merge = "per_worker"
    usual_causes = TreeDepth.usual_causes
    what_to_try = TreeDepth.what_to_try

    def conclusive(self, params: SagemakerTreeDepthParams, block: Block) -> NDArray[np.bool_]:
        """Rows with the number of the largest node."""
        return has_probe(block, "largest_node")

    def evaluate(
        self, params: SagemakerTreeDepthParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Judge each round by itself."""
        node = probe(block, "largest_node")
        with np.errstate(divide="ignore", invalid="ignore"):
            depth = np.log2(node)
        return state, [
            finding_at(
                self.name,
                block,
                int(row),
                value=float(depth[row]),
                threshold=params.depth,
                message=(
                    f"{block.info(int(row)).name}: the largest node of the round is {node[row]:.0f}, whose logarithm is "
                    f"{depth[row]:.3g}, more than {params.depth:g}"
                ),
            )
            for row in np.flatnonzero(depth > params.depth)
        ]
