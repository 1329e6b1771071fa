"""Healthy trainings of some thousand steps that look odd: ``PROGRAMS``."""

from benchmarks.detection.healthy import (
    precision_and_steps,
    sequences,
    supervised,
    transfer,
    without_labels,
)
from benchmarks.detection.healthy.trainings import HEALTHY as PROGRAMS

__all__ = [
    "PROGRAMS",
    "precision_and_steps",
    "sequences",
    "supervised",
    "transfer",
    "without_labels",
]
