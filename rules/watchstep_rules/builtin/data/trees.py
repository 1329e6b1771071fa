"""Rules about tree ensembles: deep trees, and a few features that dominate the importance."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.nonfinite import has_probe
from watchstep_rules.signals.series import probe


class TreeDepthParams(Params):
    """Parameters of `TreeDepth`."""

    depth: int = Field(4, ge=0, description="Tolerated depth of the trees of a round.")


class TreeDepth(Rule[TreeDepthParams, State]):
    """Fires when the deepest tree of a boosting round is deeper than ``depth``: ``max(tree_depth) > depth``.

    A tree of one leaf has depth 0. This is SageMaker's TreeDepth with its limit of 4, except for the depth: Amazon uses the logarithm of
    the largest node's number, which is a depth only for complete trees. The default depth of XGBoost is 6, so most trainings have deeper
    trees than this limit, and the rule is off by default. LightGBM grows trees by leaves: of its 31 leaves by default one may be at any depth
    up to 30, so that a limit near ``log2(num_leaves)`` fires on nearly every training. Use a limit with ``max_depth`` there.
    """

    name = "tree_depth"
    summary = "a boosted tree is deeper than the limit"
    needs = Needs(collections=("custom",), roles=("tree_depth",))
    merge = "per_worker"
    usual_causes = (
        "max_depth is larger than the data require; XGBoost's default is 6.",
        "Trees grow by leaves, without a limit of the depth: LightGBM's default, and XGBoost's grow_policy lossguide.",
    )
    what_to_try = (
        "Lower max_depth, or set max_leaves (num_leaves of LightGBM); compare the validation loss.",
        "Raise min_child_weight or gamma (min_data_in_leaf or min_gain_to_split of LightGBM), so that splits must have a larger gain.",
    )

    def evaluate(
        self, params: TreeDepthParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Judge each round by itself."""
        trees = block.mask_of_tensors([info.role == "tree_depth" for info in block.catalogue])
        deepest = block.statistics.max
        return state, [
            finding_at(
                self.name,
                block,
                int(row),
                value=float(deepest[row]),
                threshold=float(params.depth),
                message=(
                    f"{block.info(int(row)).name}: the deepest of {block.statistics.count[row]} trees has depth "
                    f"{deepest[row]:.0f}, more than {params.depth}"
                ),
            )
            for row in np.flatnonzero(trees & (deepest > params.depth))
        ]


class FeatureImportanceParams(Params):
    """Parameters of `FeatureImportance`."""

    share: float = Field(
        0.8, gt=0, le=1, description="Tolerated share of all importance in the largest features."
    )
    features: Literal[1, 2, 3, 5, 10] = Field(3, description="Number of largest features.")
    kind: Literal["weight", "gain", "cover", "total_gain", "total_cover", "shap"] = Field(
        "weight",
        description="The kind of importance, as XGBoost defines it; `shap` is the mean magnitude of SHAP values.",
    )


class FeatureImportance(Rule[FeatureImportanceParams, State]):
    """Fires when the ``features`` most important features have more than ``share`` of all importance, and there are others.

    ``sum of the n largest |importance_i| / sum_i |importance_i| > share``. This is SageMaker's FeatureImportanceOverweight, with its
    threshold of 0.8, its three features, and its importance by weight: the number of splits that use a feature. A model with no more
    features is not judged. LightGBM's importance has the same names. The first rounds use few features whatever the data; require consecutive rounds with ``for``. Off by default,
    because one feature may really explain the target.
    """

    name = "feature_importance"
    summary = "a few features have nearly all importance"
    needs = Needs(collections=("custom",), roles=("feature_importance",))
    merge = "per_worker"
    usual_causes = (
        "A feature leaks the target: it was computed from it, or is known only afterwards.",
        "An identifier or the row number is among the features.",
        "The other features are constant, or mostly missing.",
    )
    what_to_try = (
        "Train without the first feature, and check whether the result is equally good.",
        "Check how the first features are computed, and whether they are available at inference.",
        "Set colsample_bytree (feature_fraction of LightGBM) below 1, so that trees must use other features.",
    )

    def conclusive(self, params: FeatureImportanceParams, block: Block) -> NDArray[np.bool_]:
        """Rows with the share of the largest features."""
        return has_probe(block, f"top_share_{params.features}")

    def evaluate(
        self, params: FeatureImportanceParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Judge each record by itself."""
        judged = block.mask_of_tensors(
            [
                info.role == "feature_importance" and info.name.endswith(f"/{params.kind}")
                for info in block.catalogue
            ]
        )
        share = probe(block, f"top_share_{params.features}")
        is_hit = judged & (block.statistics.count > params.features) & (share > params.share)
        return state, share_findings(self.name, block, is_hit, params.features, params.share)


def share_findings(
    rule: str, block: Block, is_hit: NDArray[np.bool_], features: int, threshold: float
) -> list[Finding]:
    """Findings about the share of the largest features.

    Args:
        rule: the name of the rule.
        block: the judged rows.
        is_hit: rows with a finding, bool of shape (n,).
        features: the number of largest features.
        threshold: the tolerated share.
    """
    share = probe(block, f"top_share_{features}")
    return [
        finding_at(
            rule,
            block,
            row,
            value=float(share[row]),
            threshold=threshold,
            message=(
                f"{block.info(row).name}: the {features} largest of {block.statistics.count[row]} features have "
                f"{share[row]:.0%} of all importance, more than {threshold:.0%}"
            ),
        )
        for row in np.flatnonzero(is_hit).tolist()
    ]
