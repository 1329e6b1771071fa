"""How a healthy training is written down: one function that trains, and why it looks odd."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.detection.programs import Program, Train
from benchmarks.detection.published.pairs import seeded

HEALTHY: dict[str, Program] = {}
"""All of them by id; filled as the modules are imported."""


def healthy(name: str, why: str) -> Callable[[Train], Train]:
    """Register ``train(recorder, seed, clock)``."""

    def register(train: Train) -> Train:
        HEALTHY[name] = Program(name, seeded(train), "healthy", source=why)
        return train

    return register
