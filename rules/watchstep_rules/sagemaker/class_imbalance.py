"""The largest class so many times the smallest, once there are enough labels."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from watchstep.block import Block
from watchstep_rules.class_imbalance import ClassImbalance
from watchstep_rules.contract import Needs, Params, Rule, State
from watchstep_rules.finding import Finding, finding_at

_COLUMNS = ("labels_counted", "classes", "largest_class", "smallest_class", "rarest_class")


class SagemakerClassImbalanceParams(Params):
    """Parameters of `SagemakerClassImbalance`."""

    threshold_imbalance: float = Field(
        10.0, gt=1, description="How many times the smallest class the largest may be."
    )
    samples: int = Field(500, ge=1, description="Labels that there must have been.")


class SagemakerClassImbalanceState(State):
    """Nothing."""


class SagemakerClassImbalance(Rule[SagemakerClassImbalanceParams, SagemakerClassImbalanceState]):
    """Fires when ``largest class / smallest class > threshold_imbalance`` among ``samples`` labels or more.

    The first half of SageMaker's ClassImbalance, with its defaults; the second, mispredictions by class, is a parameter of
    `class_imbalance`. Counts run over all batches looked at so far. With 500 labels chance alone makes ratios above
    ten where a class is rare: `class_imbalance` rules chance out.
    """

    name = "sagemaker_class_imbalance"
    summary = "the largest class is many times the smallest, as SageMaker tests it"
    needs = Needs(collections=("labels",), roles=("label",), probes=("class_counts",))
    merge = "per_worker"
    usual_causes = ClassImbalance.usual_causes
    what_to_try = ClassImbalance.what_to_try
    params_type = SagemakerClassImbalanceParams
    state_type = SagemakerClassImbalanceState

    def evaluate(
        self,
        params: SagemakerClassImbalanceParams,
        state: SagemakerClassImbalanceState,
        context: Block,  # noqa: ARG002 - the contract's
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[SagemakerClassImbalanceState, list[Finding]]:
        """Judge the counts so far, row by row."""
        none = np.full(len(block), np.nan)
        labels, classes, largest, smallest, rarest = (block.probes.get(name, none) for name in _COLUMNS)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = largest / smallest
        found = (classes > 1) & (labels >= params.samples) & (ratio > params.threshold_imbalance)
        return state, [
            finding_at(
                self.name,
                block,
                int(row),
                value=float(ratio[row]),
                threshold=params.threshold_imbalance,
                message=(
                    f"of {labels[row]:.0f} {block.info(int(row)).name} so far {smallest[row]:.0f} are class "
                    f"{rarest[row]:.0f}, and {largest[row]:.0f} are of the largest class"
                ),
            )
            for row in np.flatnonzero(found)
        ]
