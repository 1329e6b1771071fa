"""A measurement that is complete already."""

from __future__ import annotations

from dataclasses import dataclass

from watchstep.statistics import StatisticsBatch


@dataclass(frozen=True)
class Ready:
    """Statistics at hand."""

    statistics: StatisticsBatch

    @property
    def nonfinite(self) -> bool | None:
        """Whether some element is NaN or infinite."""
        return bool(self.statistics.nonfinite.any())

    @property
    def bytes(self) -> int:
        """Of the statistics."""
        return self.statistics.bytes

    def collect(self) -> StatisticsBatch:
        """The statistics."""
        return self.statistics
