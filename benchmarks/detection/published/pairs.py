"""How a published fault is written down: one function that builds the faulty program, or its mended twin."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from benchmarks.detection.programs import Built, Clock, Program, Recorder, Train, plain

MEASURED = Path(__file__).parent / "measured.json"
"""What the oracle saw in each program: ``python -m benchmarks.detection.oracle`` writes it."""

PAIRS: dict[str, Program] = {}
"""All programs, a faulty one before its twin, by id; filled as the modules are imported."""

FIXED = ".fixed"


def published(
    name: str, truth: set[str], source: str, fault: str, *, onset: int = 0
) -> Callable[[Callable[[int, bool], Built]], Callable[[int, bool], Built]]:
    """Register ``build(seed, faulty)``, which the plain loop trains, as a faulty program and its twin."""

    def register(build: Callable[[int, bool], Built]) -> Callable[[int, bool], Built]:
        def variant(faulty: bool) -> Train:
            return plain(lambda seed: build(seed, faulty))

        _add(name, truth, (source, fault), onset, variant)
        return build

    return register


Training = Callable[[Recorder, int, Clock, bool], None]


def published_loop(
    name: str, truth: set[str], source: str, fault: str, *, onset: int = 0
) -> Callable[[Training], Training]:
    """Register ``train(recorder, seed, clock, faulty)``, where the loop itself is at fault."""

    def register(train: Training) -> Training:
        def variant(faulty: bool) -> Train:
            return lambda recorder, seed, clock: train(recorder, seed, clock, faulty)

        _add(name, truth, (source, fault), onset, variant)
        return train

    return register


def _add(
    name: str, truth: set[str], words: tuple[str, str], onset: int, variant: Callable[[bool], Train]
) -> None:
    source, fault = words
    also = frozenset(measured().get(name, [])) - truth
    PAIRS[name] = Program(name, seeded(variant(True)), "faulty", frozenset(truth), also, onset, source, fault)
    PAIRS[name + FIXED] = Program(
        name + FIXED, seeded(variant(False)), "fixed", source=source, fault=f"mended: {fault}"
    )


@cache
def measured() -> dict[str, list[str]]:
    """Symptoms that the oracle saw in faulty programs, over all its seeds; nothing before it ran."""
    if not MEASURED.exists():
        return {}
    held = json.loads(MEASURED.read_text())
    return {name: sorted({s for seen in seeds.values() for s in seen}) for name, seeds in held.items()}


def seeded(train: Train) -> Train:
    """The same training with PyTorch's generator set by the seed."""

    def run(recorder: Recorder, seed: int, clock: Clock) -> None:
        torch.manual_seed(4000 + seed)
        train(recorder, seed, clock)

    return run
