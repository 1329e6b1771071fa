"""How often each class has been among the labels, over all batches that were looked at so far.

Labels are whole numbers, one for each example, 0 … 999; or zeros and ones in a floating-point type, as binary losses
take them. Negative whole numbers, with which losses are told to leave an example out, do not count. Labels that are
anything else (measured targets, tokens of longer sequences, masks) are no classes, and have no counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from watchstep.format.statistics import Floats
from watchstep.pytorch.probes.staging import OnTheWay

MOST = 1000
_NO_CLASSES = (torch.bool, torch.complex64, torch.complex128)


@dataclass(frozen=True)
class _Counted:
    """One row: all labels counted so far, how many classes they are, the largest, the smallest, and which that is."""

    counts: OnTheWay

    def collect(self) -> dict[str, Floats]:
        *by_class, others = self.counts.numbers()
        held = np.array(by_class)
        seen = np.flatnonzero(held)
        if others or not len(seen):
            figures = [np.nan] * 5
        else:
            rarest = seen[held[seen].argmin()]
            figures = [held.sum(), len(seen), held.max(), held[rarest], rarest]
        names = ("labels_counted", "classes", "largest_class", "smallest_class", "rarest_class")
        return {name: np.array([float(figure)]) for name, figure in zip(names, figures, strict=True)}


class ClassCounts:
    """Counts of one stream of labels, kept where they are: nothing waits for a device."""

    def __init__(self) -> None:
        self._so_far: Tensor | None = None

    @torch.no_grad()
    def look(self, labels: Tensor) -> _Counted | None:
        """Count a batch.

        Args:
            labels: shape (examples,) or (examples, 1).

        Returns:
            None where the labels can be no classes, by shape or dtype.
        """
        if labels.dtype in _NO_CLASSES or labels.dim() == 0 or labels.numel() != labels.shape[0]:
            return None
        given = labels.detach().reshape(-1)
        classes = 2 if given.is_floating_point() else MOST
        place = given.long()
        known = (place == given) & (place >= 0) & (place < classes)
        counts = torch.zeros(MOST + 1, dtype=torch.int64, device=given.device)
        counts.scatter_add_(0, torch.where(known, place, MOST), torch.ones_like(place))
        if not given.is_floating_point():
            counts[MOST] -= (place < 0).sum()
        if self._so_far is not None and self._so_far.device == counts.device:
            counts += self._so_far
        self._so_far = counts
        return _Counted(OnTheWay(counts))
