"""Whether the units of a layer, which began alike, ever part.

Units are what a weight's first dimension counts: outputs of a linear layer, channels of a convolution. Units that begin
alike, where nothing tells them apart, get the same gradient and stay alike, but for rounding. Few weights begin so; all
are looked at once, and again only those whose units have not parted.

    unit_spread = max |w_i - w_0|, unit_movement = max |w_0 - w_0 of the first look|
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from watchstep.format.statistics import Floats
from watchstep.pytorch.probes.staging import OnTheWay, stacked

_ELEMENTS = 64  # of each unit, at most
_PARTED = 0.1  # of the movement


@dataclass(frozen=True)
class _Spreads:
    """One value for each weight; NaN where its units are not followed."""

    weights: int
    places: list[int]
    owners: list[int]
    figures: OnTheWay
    parted: set[int]

    def collect(self) -> dict[str, Floats]:
        spread, movement = np.full(self.weights, np.nan), np.full(self.weights, np.nan)
        spread[self.places], movement[self.places] = self.figures.numbers()
        self.parted.update(
            owner
            for owner, place in zip(self.owners, self.places, strict=True)
            if not spread[place]
            <= _PARTED * movement[place]  # also at the first look: some are apart from the start
        )
        return {"unit_spread": spread, "unit_movement": movement}


class UnitSpread:
    """Follows weights for as long as all units of each are alike."""

    def __init__(self) -> None:
        self._parted: set[int] = set()
        self._first: dict[int, Tensor] = {}
        self._last: _Spreads | None = None

    @torch.no_grad()
    def look(self, weights: Sequence[Tensor]) -> _Spreads | None:
        """Look at weights.

        Args:
            weights: parameters; those with fewer than two dimensions, or two units, have no units to compare.

        Returns:
            None where none is followed.
        """
        # Here as well as in the writer's thread, so that what is followed does not depend on when that came to it.
        if self._last is not None and self._last.figures.is_here:
            self._last.collect()
        places, spreads, movements = [], [], []
        for place, weight in enumerate(weights):
            if id(weight) in self._parted:
                self._first.pop(id(weight), None)
                continue
            sample = _sample(weight)
            if sample is None:
                self._parted.add(id(weight))
                continue
            first = self._first.get(id(weight))
            if first is None or first.shape != sample[0].shape:
                first = self._first[id(weight)] = sample[0].clone()
            places.append(place)
            spreads.append((sample - sample[:1]).abs().amax())
            movements.append((sample[0] - first).abs().amax())
        if not places:
            return None
        owners = [id(weights[place]) for place in places]
        figures = stacked([*spreads, *movements]).reshape(2, -1)
        self._last = _Spreads(len(weights), places, owners, OnTheWay(figures), self._parted)
        return self._last

    def forget(self) -> None:
        """The parameters are others now."""
        self._parted, self._first, self._last = set(), {}, None


def _sample(weight: Tensor) -> Tensor | None:
    """Evenly spaced elements of each unit in float32, of shape (units, elements); None where there is nothing to compare."""
    if weight.dim() < 2 or weight.layout is not torch.strided or not weight.is_floating_point():
        return None
    held = weight.detach()
    if hasattr(held, "to_local"):
        held = held.to_local()
    if held.shape[0] < 2 or held.numel() == 0:
        return None
    flat = held.flatten(1)
    return flat[:, :: -(-flat.shape[1] // _ELEMENTS)].float()
