"""Trees that grow deep."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from watchstep.format.block import Block
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at


class TreeDepthParams(Params):
    """Parameters of `TreeDepth`."""

    depth: int = Field(4, ge=0, description="How deep the trees of a round may be.")


class TreeDepthState(State):
    """Nothing."""


class TreeDepth(Rule[TreeDepthParams, TreeDepthState]):
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
    params_type = TreeDepthParams
    state_type = TreeDepthState

    def evaluate(
        self,
        params: TreeDepthParams,
        state: TreeDepthState,
        context: Block,  # noqa: ARG002 - the contract's
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[TreeDepthState, list[Finding]]:
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
