"""Updates that are very large or very small relative to their weights."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.nonfinite import has_probe


class WeightUpdateRatioParams(Params):
    """Parameters of `WeightUpdateRatio`."""

    large_threshold: float = Field(10.0, gt=0, description="Ratio above which an update is too large.")
    small_threshold: float = Field(1e-8, ge=0, description="Ratio below which an update is too small.")
    min_dimensions: int = Field(2, ge=0, description="Fewest dimensions of the parameters to judge.")


class WeightUpdateRatio(Rule[WeightUpdateRatioParams, State]):
    """Fires when ``rms(update) / rms(weight)`` is above ``large_threshold`` or below ``small_threshold``.

    Both thresholds are those of SageMaker's WeightUpdateRatio, which uses the change since the last saved step, however long ago. Here it
    is the update of one step of the optimizer. A weight of zeros has no ratio and is not judged; SageMaker divides by an epsilon instead.

    Off by default: `weight_not_updating` distinguishes a missing update from the end of a schedule, and `learning_rate_scale` judges
    unusual ratios. For sharded parameters the shard of each worker is judged.
    """

    name = "weight_update_ratio"
    summary = "updates are far too large or too small for their weights"
    needs = Needs(collections=("updates",), roles=("update",), probes=("update_ratio",))
    merge = "per_worker"
    usual_causes = (
        "The learning rate is far too high, or far too low, for this layer.",
        "A gradient has exploded or vanished.",
        "The weights are much smaller than usual, so that any update is relatively large.",
    )
    what_to_try = (
        "Change the learning rate by factors of ten until updates are near a thousandth of the weights.",
        "Clip gradients, or look at where they vanish.",
        "Look at the weights' initialization and at weight decay.",
    )

    def conclusive(self, params: WeightUpdateRatioParams, block: Block) -> NDArray[np.bool_]:
        """Return the rows with the ratio."""
        return has_probe(block, "update_ratio")

    def evaluate(
        self, params: WeightUpdateRatioParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Evaluate each row independently."""
        chosen = block.mask_of_tensors([len(info.shape) >= params.min_dimensions for info in block.catalogue])
        ratio = np.where(chosen, block.probes.get("update_ratio", np.full(len(block), np.nan)), np.nan)
        findings = []
        for row in map(
            int, np.flatnonzero((ratio > params.large_threshold) | (ratio < params.small_threshold))
        ):
            large = ratio[row] > params.large_threshold
            limit, word = (params.large_threshold, "above") if large else (params.small_threshold, "below")
            message = f"{block.info(row).name} is {ratio[row]:.3g} of the weight, {word} {limit:.3g}"
            findings.append(
                finding_at(self.name, block, row, value=float(ratio[row]), threshold=limit, message=message)
            )
        return state, findings
