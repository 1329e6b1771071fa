"""Probes of arrays in host memory: class counts of labels, channel sums of images, and comparison with the previous record."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from watchstep.capture.config import CHANNEL_SUM, MAX_CHANNELS, UNCHANGED, of_kind
from watchstep.capture.steps.record import Probe
from watchstep.format.statistics import Floats
from watchstep.format.tensors import Mode, TensorInfo

MAX_CLASSES = 1000

_IMAGE_DIMENSIONS = 4
_SAMPLE = 16_384
_CLASS_COLUMNS = ("labels_counted", "classes", "largest_class", "smallest_class", "rarest_class")


@dataclass(frozen=True)
class _Columns:
    """One row with known values."""

    values: dict[str, float]

    def collect(self) -> dict[str, Floats]:
        return {name: np.array([value]) for name, value in self.values.items()}


class ArrayProbes:
    """Measures the probes that apply to given arrays, and keeps what they need of earlier records."""

    def __init__(self, probes: Sequence[str]) -> None:
        self._counts_classes = "class_counts" in probes
        self._axes = {probe.name: int(probe.arguments[0]) for probe in of_kind(probes, CHANNEL_SUM)}
        self._unchanged = of_kind(probes, UNCHANGED)
        self._classes: dict[tuple[str, Mode], NDArray[np.int64]] = {}
        self._before: dict[tuple[str, Mode], NDArray[Any]] = {}

    def measure(self, info: TensorInfo, array: NDArray[Any], mode: Mode) -> tuple[Probe, ...]:
        """Return the probes of an array."""
        columns: dict[str, float] = {}
        if info.role == "label" and self._counts_classes:
            columns.update(self._class_counts((info.name, mode), array))
        if info.role == "input" and self._axes:
            columns.update(self._channel_sums(array))
        if self._unchanged and array.dtype.kind not in "bc":
            columns.update(self._comparison((info.name, mode), array))
        return (_Columns(columns),) if columns else ()

    def _class_counts(self, key: tuple[str, Mode], labels: NDArray[Any]) -> dict[str, float]:
        """Class counts over all batches so far, of labels of shape (examples,) or (examples, 1); empty for other labels."""
        is_integer = labels.dtype.kind in "iu"
        if not (is_integer or labels.dtype.kind == "f") or not labels.ndim or labels.size != labels.shape[0]:
            return {}
        flat, classes = labels.reshape(-1), MAX_CLASSES if is_integer else 2
        is_class = (flat >= 0) & (flat < classes)
        is_class[is_class] &= flat[is_class] == np.floor(flat[is_class])
        others = len(flat) - int(is_class.sum()) - (int((flat < 0).sum()) if is_integer else 0)
        counts = np.bincount(flat[is_class].astype(np.int64), minlength=MAX_CLASSES + 1)
        counts[MAX_CLASSES] = others
        self._classes[key] = counts = counts + self._classes.get(key, 0)
        by_class, others = counts[:-1], int(counts[-1])
        present = np.flatnonzero(by_class)
        if others or not len(present):
            return dict.fromkeys(_CLASS_COLUMNS, math.nan)
        rarest = present[by_class[present].argmin()]
        figures = (by_class.sum(), len(present), by_class.max(), by_class[rarest], rarest)
        return dict(zip(_CLASS_COLUMNS, map(float, figures), strict=True))

    def _channel_sums(self, images: NDArray[Any]) -> dict[str, float]:
        """Sums of the channels of floating-point images; empty for other arrays, or with more than four channels."""
        if images.ndim != _IMAGE_DIMENSIONS or images.dtype.kind in "biuc" or not images.size:
            return {}
        columns: dict[str, float] = {}
        for name, axis in self._axes.items():
            if not -_IMAGE_DIMENSIONS <= axis < _IMAGE_DIMENSIONS or images.shape[axis] > MAX_CHANNELS:
                continue
            others = tuple(place for place in range(_IMAGE_DIMENSIONS) if place != axis % _IMAGE_DIMENSIONS)
            sums = images.astype(np.float64, copy=False).sum(others).tolist()
            for channel in range(MAX_CHANNELS):
                columns[f"{name}:{channel}"] = sums[channel] if channel < len(sums) else math.nan
        return columns

    def _comparison(self, key: tuple[str, Mode], array: NDArray[Any]) -> dict[str, float]:
        """Whether the array is close to its previous record, on a sample; a first record, or one of another shape, is not."""
        now, before = _sample(array), self._before.get(key)
        self._before[key] = now
        if before is None or before.shape != now.shape:
            return {probe.name: 0.0 for probe in self._unchanged}
        with np.errstate(invalid="ignore", over="ignore"):
            return {
                probe.name: float(
                    np.allclose(
                        now,
                        before,
                        rtol=float(probe.arguments[0]),
                        atol=float(probe.arguments[1]),
                        equal_nan=bool(probe.arguments[2]),
                    )
                )
                for probe in self._unchanged
            }


def _sample(array: NDArray[Any]) -> NDArray[Any]:
    """Return a copy of evenly spaced elements, all of a small array. The same elements are chosen each time."""
    flat = array.reshape(-1)
    if flat.size > _SAMPLE:
        stride = -(-flat.size // _SAMPLE)
        while math.gcd(stride, max(1, array.shape[-1])) > 1:  # else only some columns would be sampled
            stride += 1
        flat = flat[::stride]
    return flat.astype(np.float64) if flat.dtype.kind in "fV" else flat.copy()
