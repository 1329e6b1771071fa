"""Samples of figures, until they become rows."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import numpy as np

from watchstep.capture.system.alongside import Sampled, info_of
from watchstep.statistics import merge_rows, scalars


class Samples:
    """By name, in the order in which they came."""

    def __init__(self) -> None:
        self._held: dict[str, list[float]] = {}

    def add(self, figures: Mapping[str, float]) -> None:
        """One sample of each."""
        for name, value in figures.items():
            self._held.setdefault(name, []).append(value)

    def add_all(self, name: str, values: Iterable[float]) -> None:
        """Several of one figure."""
        self._held.setdefault(name, []).extend(values)

    def as_rows(self) -> Sampled | None:
        """A row for each figure that has samples, which are forgotten; None where none has."""
        held, self._held = {name: values for name, values in self._held.items() if values}, {}
        if not held:
            return None
        group = np.repeat(np.arange(len(held)), [len(values) for values in held.values()])
        every = scalars([value for values in held.values() for value in values])
        return Sampled(tuple(map(info_of, held)), merge_rows(every, group, len(held)), time.time_ns())
