"""Small trainings that rules are held to: healthy ones that look odd, and faulty ones of published kinds.

Data are made here, from the seed. ``CASES`` has the form that ``python -m benchmarks.detection --cases`` reads.
"""

from __future__ import annotations

from tests.rules import faulty_trainings, healthy_trainings
from tests.rules.training_parts import CASES, Training

__all__ = ["CASES", "Training", "faulty_trainings", "healthy_trainings"]
