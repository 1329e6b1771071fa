"""What capture asks of a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from watchstep.statistics import StatisticsBatch


class Measurement(Protocol):
    """Statistics that may still be on their way from a device."""

    @property
    def nonfinite(self) -> bool | None:
        """Whether some element is NaN or infinite; None while that is not known without waiting."""
        ...

    def collect(self) -> StatisticsBatch:
        """The statistics, one row a tensor; waits for the device. Called off the training thread."""
        ...


class Kernel(Protocol):
    """Measures tensors. It never changes them, and never synchronises the training stream."""

    def measure(self, tensors: Sequence[Any]) -> Measurement:
        """Start to measure; the tensors may change as soon as this returns (on a device: in stream order).

        Args:
            tensors: of any shape, dtype and layout that the framework has.
        """
        ...
