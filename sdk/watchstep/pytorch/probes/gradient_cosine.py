"""The direction of a gradient against the one that was measured before.

    gradient_cosine = <g, h> / (|g| |h|)

Near 1 the loss falls steadily along one direction, near -1 the step size makes it jump from side to side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from watchstep.format.statistics import Floats
from watchstep.pytorch.probes.staging import OnTheWay, elements_of_each, stacked, views


@dataclass(frozen=True)
class _Cosines:
    products: OnTheWay

    def collect(self) -> dict[str, Floats]:
        both, new, old = self.products.numbers()
        with np.errstate(divide="ignore", invalid="ignore"):
            cosine = both / np.sqrt(new * old)
        return {"gradient_cosine": np.where(np.isfinite(cosine), np.clip(cosine, -1.0, 1.0), np.nan)}


class GradientCosine:
    """Keeps a sample of each gradient from one measurement to the next, in float32; 16 MB at most."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def look(self, owners: Sequence[object], gradients: Sequence[Tensor], known: int) -> _Cosines | None:
        """Compare gradients with those before.

        Args:
            owners: whose gradients they are, in the same order.
            gradients: dense.
            known: how many owners there are altogether.

        Returns:
            None where one of them is sparse.
        """
        if not owners or any(gradient.layout is not torch.strided for gradient in gradients):
            return None
        rows, kept = [], {}
        for owner, view in zip(owners, views(gradients, elements_of_each(known)), strict=True):
            now = view.to(torch.float32, copy=True)
            square = torch.dot(now, now)
            old = self._before.get(id(owner))
            same = old is not None and old[0].shape == now.shape and old[0].device == now.device
            none = torch.full_like(square, torch.nan)
            rows.append([torch.dot(now, old[0]), square, old[1]] if old and same else [none, none, none])
            kept[id(owner)] = (now, square)
        self._before.update(kept)
        return _Cosines(OnTheWay(stacked([figure for row in rows for figure in row]).reshape(-1, 3).T))

    def forget(self) -> None:
        """The parameters are others now."""
        self._before.clear()
