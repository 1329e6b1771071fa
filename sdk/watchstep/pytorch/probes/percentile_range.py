"""How wide the middle nine tenths of a gradient are, in its first steps.

    percentile_range = 95th percentile - 5th percentile, interpolated between elements as `numpy.percentile` does

Of large gradients evenly spaced elements are taken, see `watchstep.pytorch.probes.staging`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from watchstep.capture.config import PERCENTILE_RANGE, of_kind
from watchstep.format.statistics import Floats
from watchstep.pytorch.probes.staging import OnTheWay, elements_of_each, views


@dataclass(frozen=True)
class _Ranges:
    """One value for each gradient; NaN where its first steps are over."""

    columns: tuple[str, ...]
    is_early: list[list[bool]]
    ranges: OnTheWay

    def collect(self) -> dict[str, Floats]:
        values = self.ranges.numbers()
        return {
            name: np.where(early, values, np.nan)
            for name, early in zip(self.columns, self.is_early, strict=True)
        }


class PercentileRange:
    """Looks at gradients for so many steps from the first record of each."""

    def __init__(self, probes: Sequence[str]) -> None:
        self._probes = of_kind(probes, PERCENTILE_RANGE)
        self._steps = [int(probe.arguments[0]) for probe in self._probes]
        self._first: dict[Hashable, int] = {}

    @property
    def applies(self) -> bool:
        """Whether any such probe is wanted."""
        return bool(self._probes)

    @torch.no_grad()
    def look(
        self, owners: Sequence[Hashable], gradients: Sequence[Tensor], among: int, step: int
    ) -> _Ranges | None:
        """Measure gradients that are in their first steps.

        Args:
            owners: whose they are, in the same order.
            gradients: strided.
            among: how many there are altogether.
            step: of the run.

        Returns:
            None where none is, or one has no dense elements.
        """
        if any(gradient.layout is not torch.strided or not gradient.numel() for gradient in gradients):
            return None
        ages = [step - self._first.setdefault(owner, step) for owner in owners]
        early = [[age < steps for age in ages] for steps in self._steps]
        if not any(map(any, early)):
            return None
        wide = [view.float() for view in views(gradients, elements_of_each(among))]
        ranges = [_range(view).to(wide[0].device, non_blocking=True) for view in wide]
        return _Ranges(tuple(probe.name for probe in self._probes), early, OnTheWay(torch.stack(ranges)))


def _range(elements: Tensor) -> Tensor:
    """By one sort, with places that are known on the host: nothing waits for a device. NaN where an element is."""
    ordered = elements.sort().values
    wide: Tensor = _percentile(ordered, 0.95) - _percentile(ordered, 0.05)
    return torch.where(ordered[-1].isnan(), torch.nan, wide)  # NaN sorts last


def _percentile(ordered: Tensor, share: float) -> Tensor:
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    between: Tensor = ordered[below] + (place - below) * (ordered[above] - ordered[below])
    return between
