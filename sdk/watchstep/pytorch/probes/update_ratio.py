"""How large an update is beside the weight that it changes.

    update_ratio = rms(after - before) / rms(before)

Healthy trainings of networks with normalised layers are said to lie near 1e-3 (Karpathy 2015, CS231n, "Ratio of
weights:updates").
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from watchstep.format.statistics import Floats, StatisticsBatch
from watchstep.kernels.measurement import Measurement


@dataclass(frozen=True)
class UpdateRatio:
    """The column ``update_ratio``; NaN where the weight was all zero.

    Attributes:
        update: statistics of the updates.
        before: of the weights before them, over the same elements.
    """

    update: Measurement
    before: Measurement

    def collect(self) -> dict[str, Floats]:
        """The column."""
        weight = _rms(self.before.collect())
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(weight > 0, _rms(self.update.collect()) / weight, np.nan)
        return {"update_ratio": ratio}


def _rms(batch: StatisticsBatch) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.sqrt(batch.square_sum / batch.finite))
