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

    depth: int = Field(4, ge=0, description="How deep the trees of a round may be.")


class TreeDepth(Rule[TreeDepthParams, State]):
    """Fires when the deepest tree of a boosting round is deeper than ``depth``: ``max(tree_depth) > depth``.

    A tree of one leaf has depth 0. That is SageMaker's TreeDepth with its limit of 4, but for the depth itself: Amazon takes
    the logarithm of the largest node's number, which is a depth only where trees are complete. XGBoost lets trees grow
    to 6 unless told otherwise, so with this limit most trainings have deeper ones, and the rule is off by default.
    """

    name = "tree_depth"
    summary = "a boosted tree is deeper than it may be"
    needs = Needs(collections=("custom",), roles=("tree_depth",))
    merge = "per_worker"
    usual_causes = (
        "max_depth is larger than the data need; XGBoost's default is 6.",
        "grow_policy is lossguide, which bounds leaves and not depth.",
    )
    what_to_try = (
        "Lower max_depth, or set max_leaves; compare the validation loss.",
        "Raise min_child_weight or gamma, so that splits have to be worth it.",
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
        0.8, gt=0, le=1, description="Share of all importance that the first features may have."
    )
    features: Literal[1, 2, 3, 5, 10] = Field(3, description="How many features that is.")
    kind: Literal["weight", "gain", "cover", "total_gain", "total_cover"] = Field(
        "weight", description="Which importance, as XGBoost defines them."
    )


class FeatureImportance(Rule[FeatureImportanceParams, State]):
    """Fires when the ``features`` most important features have more than ``share`` of all importance, and there are others.

    ``sum of the n largest |importance_i| / sum_i |importance_i| > share``. That is SageMaker's FeatureImportanceOverweight, with
    its 0.8, its three features, and its importance by weight: how many splits use a feature. A model of no more
    features than that has all of its importance in them, and is not judged. The first rounds use few features
    whatever the data; ask for some in a row with ``for``. Off by default: one feature may really explain it all.
    """

    name = "feature_importance"
    summary = "a few features have nearly all importance"
    needs = Needs(collections=("custom",), roles=("feature_importance",))
    merge = "per_worker"
    usual_causes = (
        "A feature tells the target: it was computed from it, or is known only afterwards.",
        "An identifier or a row's place in the file is among the features.",
        "The other features are constant, or mostly missing.",
    )
    what_to_try = (
        "Train without the first feature, and look whether the result is still as good.",
        "Look how the first features are made, and whether they are there when the model is used.",
        "Set colsample_bytree below 1, so that trees have to use others.",
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
        held = judged & (block.statistics.count > params.features) & (share > params.share)
        return state, [
            finding_at(
                self.name,
                block,
                int(row),
                value=float(share[row]),
                threshold=params.share,
                message=(
                    f"{block.info(int(row)).name}: {params.features} of {block.statistics.count[row]} features have "
                    f"{share[row]:.0%} of all importance, more than {params.share:.0%}"
                ),
            )
            for row in np.flatnonzero(held)
        ]
