"""Healthy programs that are difficult to judge: ``PROGRAMS``."""

from benchmarks.detection.difficult import (
    actors_and_critics,
    alike_outputs,
    designs,
    frameworks,
    further_tasks,
    games,
    gated_and_frozen,
    generative,
    low_signal,
    odd_numbers,
    pairs,
    schedules,
    structured,
    tuned_further,
    updates,
)
from benchmarks.detection.witnessed import DIFFICULT as PROGRAMS

__all__ = [
    "PROGRAMS",
    "actors_and_critics",
    "alike_outputs",
    "designs",
    "frameworks",
    "further_tasks",
    "games",
    "gated_and_frozen",
    "generative",
    "low_signal",
    "odd_numbers",
    "pairs",
    "schedules",
    "structured",
    "tuned_further",
    "updates",
]
