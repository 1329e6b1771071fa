"""Healthy trainings of some thousand steps that look odd: ``PROGRAMS``."""

from benchmarks.detection.healthy import (
    odd_losses,
    partly_trained,
    precision_and_steps,
    sequences,
    supervised,
    transfer,
    without_labels,
)
from benchmarks.detection.healthy.trainings import HEALTHY as PROGRAMS

__all__ = [
    "PROGRAMS",
    "odd_losses",
    "partly_trained",
    "precision_and_steps",
    "sequences",
    "supervised",
    "transfer",
    "without_labels",
]
