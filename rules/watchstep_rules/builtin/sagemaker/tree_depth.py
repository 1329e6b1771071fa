"""Trees whose largest node has a high number."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block
from watchstep_rules.builtin.data.tree_depth import TreeDepth
from watchstep_rules.builtin.sagemaker.amazon import AmazonParams
from watchstep_rules.rule import Finding, Needs, Rule, State, finding_at
from watchstep_rules.signals.nonfinite import has_probe
from watchstep_rules.signals.series import probe


class SagemakerTreeDepthParams(AmazonParams):
    """Parameters of `SagemakerTreeDepth`."""

    amazon: ClassVar[str] = "TreeDepth"
    depth: float = Field(4.0, ge=0, description="How deep the trees of a round may be.")


class SagemakerTreeDepthState(State):
    """Nothing."""


class SagemakerTreeDepth(Rule[SagemakerTreeDepthParams, SagemakerTreeDepthState]):
    """Fires when ``log2(largest node id) > depth`` in a boosting round: SageMaker's TreeDepth, with its limit.

    Nodes are numbered from 0 in the order of XGBoost's dump, so of a complete tree of depth d the last is ``2^(d + 1) - 2``: the
    logarithm is nearly ``d + 1``. `tree_depth` judges the depth itself.
    """

    name = "sagemaker_tree_depth"
    summary = "a boosted tree has many nodes, as SageMaker tests its depth"
    needs = Needs(collections=("custom",), roles=("tree_depth",))
    merge = "per_worker"
    usual_causes = TreeDepth.usual_causes
    what_to_try = TreeDepth.what_to_try
    params_type = SagemakerTreeDepthParams
    state_type = SagemakerTreeDepthState

    def conclusive(self, params: SagemakerTreeDepthParams, block: Block) -> NDArray[np.bool_]:  # noqa: ARG002 - the contract's
        """Rows with the largest node."""
        return has_probe(block, "largest_node")

    def evaluate(
        self,
        params: SagemakerTreeDepthParams,
        state: SagemakerTreeDepthState,
        context: Block,  # noqa: ARG002 - the contract's
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[SagemakerTreeDepthState, list[Finding]]:
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
