"""A measurement that several readers collect."""

from __future__ import annotations

import threading

from watchstep.kernels.interface import Measurement
from watchstep.statistics import StatisticsBatch


class Once:
    """Collects a measurement when it is first asked for, and keeps the statistics."""

    def __init__(self, measurement: Measurement) -> None:
        self._measurement = measurement
        self._lock = threading.Lock()
        self._held: StatisticsBatch | None = None

    @property
    def nonfinite(self) -> bool | None:
        """Whether some element is NaN or infinite; None while that is not known without waiting."""
        return self._measurement.nonfinite

    def collect(self) -> StatisticsBatch:
        """The statistics."""
        with self._lock:
            if self._held is None:
                self._held = self._measurement.collect()
            return self._held
