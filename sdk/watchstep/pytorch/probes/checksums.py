"""Checksums of weights as rows: each is one number, exact in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from watchstep.pytorch.checksum import checksums
from watchstep.pytorch.probes.on_the_way import OnTheWay
from watchstep.statistics import StatisticsBatch, scalars


@dataclass(frozen=True)
class Checksums:
    """A measurement whose rows hold checksums."""

    figures: OnTheWay
    nonfinite: bool | None = False

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Checksums:
        """The checksums of what this worker holds of each tensor."""
        return cls(OnTheWay(checksums(tensors)))

    def collect(self) -> StatisticsBatch:
        """One row each."""
        return scalars(self.figures.numbers().tolist())
