"""What every training of this benchmark offers to its process, and how it is recorded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from watchstep import CaptureConfig, Hook, open_run

RECORDED = frozenset({"defaults", "every_step"})
"""Variants with a hook."""


class FrameworkTraining(Protocol):
    """A training in a process of its own, one variant of it."""

    def run(self, steps: int) -> None:
        """Train so many steps, and wait for the last."""

    def losses(self) -> list[str]:
        """Losses so far, exactly, as hexadecimal numbers: of each step or epoch."""

    def weights(self) -> str:
        """A digest of all weights, bit by bit."""

    def close(self) -> dict[str, int]:
        """End recording; returns at how many steps each role was measured, nothing without a recording."""


@dataclass(frozen=True)
class Recorder:
    """The hook of a recorded variant.

    Attributes:
        hook: an open one.
    """

    hook: Hook

    def close(self) -> dict[str, int]:
        """End recording; returns at how many steps each role was measured.

        Raises:
            RuntimeError: the recorder had faults, or recorded nothing.
        """
        self.hook.close()
        if faults := self.hook.health["faults"]:
            raise RuntimeError(f"the recorder had faults: {faults}")
        run = open_run(self.hook.run_url)
        measured: dict[str, int] = {}
        for info in run.catalogue:
            if info.role in {"weight", "gradient"} and info.role not in measured:
                measured[info.role] = run.tensor(info.name).statistics().num_rows
        if "gradient" not in measured:
            raise RuntimeError("no gradient was recorded")
        return measured


def open_recorder(variant: str, folder: Path) -> Recorder | None:
    """A hook for a variant that is recorded; None for the others."""
    configs = {"defaults": CaptureConfig(), "every_step": CaptureConfig(overhead_budget=None)}
    config = configs.get(variant)
    return None if config is None else Recorder(Hook(folder, config=config))


def digest(arrays: Mapping[str, Any] | list[Any]) -> str:
    """A digest of arrays, bit by bit."""
    values = arrays.values() if isinstance(arrays, Mapping) else arrays
    found = hashlib.sha256()
    for value in values:
        found.update(np.ascontiguousarray(value).tobytes())
    return found.hexdigest()


def numpy_row(array: NDArray[Any]) -> tuple[float, ...]:
    """The columns of a row of statistics, without the histogram, as a program computes them with NumPy."""
    finite = np.isfinite(array)
    count = int(finite.sum())
    values = array if count == array.size else array[finite]
    magnitudes = np.abs(values)
    nonzero = magnitudes[magnitudes > 0]
    mean = float(values.mean(dtype=np.float64)) if count else 0.0
    return (
        count,
        int(np.isnan(array).sum()),
        int(np.isposinf(array).sum()),
        int(np.isneginf(array).sum()),
        int((values == 0).sum()),
        int((values < 0).sum()),
        float(values.min(initial=np.inf)),
        float(values.max(initial=-np.inf)),
        float(nonzero.min(initial=np.inf)),
        mean,
        float(((values - mean) ** 2).sum(dtype=np.float64)),
        float(magnitudes.sum(dtype=np.float64)),
        float((values**2).sum(dtype=np.float64)),
    )


Start = Callable[[str, Path], FrameworkTraining]
"""Starts a training: variant, and an empty folder."""
