"""Small trainings to test rules: healthy unusual ones, and faulty ones of published kinds.

Data are made here, from the seed. ``CASES`` has the form that ``python -m benchmarks.detection --cases`` reads.
"""

from __future__ import annotations

from tests.rules.trainings import faulty, healthy
from tests.rules.trainings.parts import CASES, Training

__all__ = ["CASES", "Training", "faulty", "healthy"]
