"""Layers that learn at unusual rates, or at very different rates."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block
from watchstep.format.statistics import Floats
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.robust import medians
from watchstep_rules.signals.series import LaggedRows
from watchstep_rules.signals.tensor_selection import is_weighted


class LearningRateScaleParams(Params):
    """Parameters of `LearningRateScale`."""

    records: int = Field(
        5, ge=1, le=100, description="Number of updates of a layer over which the median is taken."
    )
    large: float = Field(0.1, gt=0, description="Relative update that every layer exceeds.")
    small: float = Field(1e-5, gt=0, description="Relative update that no layer reaches.")
    apart: float = Field(1e3, gt=1, description="Ratio of the largest to the smallest relative update.")


class LearningRateScale(Rule[LearningRateScaleParams, State]):
    """Fires when the relative updates of a step's layers are all large, all small, or far apart.

    With ``ratio = rms(update) / rms(weight)`` of each weight matrix of a linear, convolutional or recurrent layer, the
    median of its last ``records``, and those that are zero left out::

        min(ratio) > large    or    0 < max(ratio) < small    or    max(ratio) > apart * min(ratio)

    Working trainings have updates near 1e-3 of their weights (Karpathy, CS231n, 2015, and "A Recipe for Training Neural Networks", 2019);
    large and small are two decades from it. Optimizers that scale each layer's update by its weights (You et al., LARS, 2017; LAMB, 2020)
    were designed for networks with layers that differ by orders of magnitude; three decades are more than these papers show. Off by
    default: fine-tuning with a small rate for the body and a large one for the head, and zero-initialized branches, do this on purpose. The
    ratio of sharded parameters is not known.
    """

    name = "learning_rate_scale"
    summary = "layers take steps far too large or small for their weights, or for each other"
    needs = Needs(collections=("updates",), roles=("update",), probes=("update_ratio",))
    merge = "watermark"
    usual_causes = (
        "The learning rate is off by orders of magnitude for this optimizer.",
        "Layers' weights, or gradients, are of very different scales, and the optimizer does not adapt to it (plain SGD).",
        "Parameter groups have unsuitable learning rates.",
    )
    what_to_try = (
        "Change the learning rate by factors of ten until updates are near a thousandth of the weights.",
        "Use an optimizer that adapts to each weight (Adam) or layer (LAMB), or normalization layers.",
        "Print the rate of each parameter group.",
    )

    def lookback(self, params: LearningRateScaleParams) -> int:
        """Return the number of previous records."""
        return params.records - 1

    def evaluate(
        self, params: LearningRateScaleParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Compare the layers of each step with each other."""
        ratio = _medians(params, context, block)
        rows = np.flatnonzero(ratio > 0)
        if not len(rows):
            return state, []
        step, group = np.unique(block.step[rows], return_inverse=True)
        low, high = np.full(len(step), np.inf), np.zeros(len(step))
        np.minimum.at(low, group, ratio[rows])
        np.maximum.at(high, group, ratio[rows])
        is_unusual = (low > params.large) | (high < params.small) | (high > params.apart * low)
        return state, [
            self._finding(params, block, rows[group == index], ratio) for index in np.flatnonzero(is_unusual)
        ]

    def _finding(
        self, params: LearningRateScaleParams, block: Block, rows: NDArray[np.intp], ratio: Floats
    ) -> Finding:
        lowest, highest = (int(rows[pick(ratio[rows])]) for pick in (np.argmin, np.argmax))
        names = {row: block.info(row).name for row in (lowest, highest)}
        if ratio[lowest] > params.large:
            row, limit = lowest, params.large
            message = (
                f"{names[row]} is {ratio[row]:.2g} of the weight, and every other layer's update is more"
            )
        elif ratio[highest] < params.small:
            row, limit = highest, params.small
            message = (
                f"{names[row]} is {ratio[row]:.2g} of the weight, and every other layer's update is less"
            )
        else:
            row, limit = lowest, float(ratio[highest]) / params.apart
            message = (
                f"{names[row]} is {ratio[row]:.2g} of the weight, {names[highest]} is {ratio[highest]:.2g}: "
                f"layers learn at rates more than {params.apart:g} times apart"
            )
        return finding_at(self.name, block, row, value=float(ratio[row]), threshold=limit, message=message)


def _medians(params: LearningRateScaleParams, context: Block, block: Block) -> Floats:
    """Return the median of each layer's last ratios; NaN for other tensors, and if there are too few."""
    lagged = LaggedRows.of(context, block)
    ratio = lagged.column(lambda rows: rows.probes.get("update_ratio", np.full(len(rows), np.nan)))
    last = np.stack([lagged.lag(ratio, lag) for lag in range(params.records)], axis=1)
    is_layer = block.mask_of_tensors([len(info.shape) > 1 and is_weighted(info) for info in block.catalogue])
    is_layer &= block.mode == 0
    return np.where(is_layer, medians(last), np.nan)
