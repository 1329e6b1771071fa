"""The sum of each colour channel of a model's images: their means follow over as many batches as one likes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from watchstep.capture.element_probes import CHANNEL_SUM, MOST_CHANNELS, of_kind
from watchstep.pytorch.probes.on_the_way import OnTheWay
from watchstep.pytorch.probes.samples import wide_float
from watchstep.statistics import Floats

_IMAGES = 4


@dataclass(frozen=True)
class _Sums:
    """One row: a column for each probe and channel; NaN for channels that the images do not have."""

    sums: dict[str, OnTheWay]

    def collect(self) -> dict[str, Floats]:
        found = {}
        for name, sums in self.sums.items():
            values = sums.numbers()
            for channel in range(MOST_CHANNELS):
                value = values[channel] if channel < len(values) else np.nan
                found[f"{name}:{channel}"] = np.array([float(value)])
        return found


class ChannelSums:
    """Looks at what a model is given."""

    def __init__(self, probes: Sequence[str]) -> None:
        self._axes = {probe.name: int(probe.arguments[0]) for probe in of_kind(probes, CHANNEL_SUM)}

    @property
    def applies(self) -> bool:
        """Whether any such probe is wanted."""
        return bool(self._axes)

    @torch.no_grad()
    def look(self, images: Tensor) -> _Sums | None:
        """Add up a batch.

        Args:
            images: floats of four dimensions.

        Returns:
            None where they are no images, or have more than four channels.
        """
        if images.dim() != _IMAGES or not images.is_floating_point() or not images.numel():
            return None
        sums = {}
        for name, axis in self._axes.items():
            if -_IMAGES <= axis < _IMAGES and images.shape[axis] <= MOST_CHANNELS:
                others = [place for place in range(_IMAGES) if place != axis % _IMAGES]
                sums[name] = OnTheWay(images.detach().sum(others, dtype=wide_float(images.device)))
        return _Sums(sums) if sums else None
