"""Colours of heatmaps, and their encoding as a small PNG without any library for pictures."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from watchstep.format.statistics import Floats
from watchstep.plots.binned import is_logarithmic

VIRIDIS = [
    "440154",
    "48186a",
    "472d7b",
    "424086",
    "3b528b",
    "33638d",
    "2c728e",
    "26828e",
    "21918c",
    "1fa088",
    "28ae80",
    "3fbc73",
    "5ec962",
    "84d44b",
    "addc30",
    "d8e219",
    "fde725",
]
"""Every sixteenth colour of matplotlib's viridis; colours between them are interpolated."""

NONFINITE = "d55e00"
"""Colour of cells with NaN or infinite elements; no colour of viridis is similar."""

OUTLIERS = 0.005
"""Share of the cells at either end whose colour is that of the end of the scale."""

_MISSING, _NONFINITE, _FIRST, _LAST = 0, 1, 2, 255


@dataclass(frozen=True)
class HeatScale:
    """The range of a heatmap.

    Attributes:
        low: value of the first colour.
        high: value of the last colour.
        is_log: whether colours are even in the logarithm.
    """

    low: float
    high: float
    is_log: bool

    def positions(self, values: Floats) -> Floats:
        """Return positions of values on the scale, 0 to 1; NaN remains."""
        low, high = self.low, self.high
        if self.is_log:
            values = np.log10(np.maximum(values, low))
            low, high = float(np.log10(low)), float(np.log10(high))
        width = high - low
        return (
            np.clip((values - low) / width, 0.0, 1.0)
            if width > 0
            else np.where(np.isnan(values), np.nan, 0.5)
        )


def scale_of(values: Floats, outliers: float = 0.0) -> HeatScale:
    """Return the scale of a heatmap: logarithmic if its values are positive and span more than a factor of 30.

    Args:
        values: values of any shape.
        outliers: share of the values at either end that may be outside of the scale, so that a few extreme cells do not hide all others.
    """
    finite = values[np.isfinite(values)]
    if not len(finite):
        return HeatScale(0.0, 0.0, is_log=False)
    is_log = is_logarithmic(finite)
    shown = finite[finite > 0] if is_log else finite
    low, high = np.quantile(shown, (outliers, 1 - outliers), method="nearest")
    return HeatScale(float(low), float(high), is_log=is_log)


def heat_png(values: Floats, scale: HeatScale, nonfinite: NDArray[np.bool_] | None = None) -> bytes:
    """Encode cells as a PNG of one pixel each, transparent where a value is NaN.

    Args:
        values: shape (m, n).
        scale: range of the colours.
        nonfinite: cells with NaN or infinite elements, shape (m, n).
    """
    positions = scale.positions(values)
    steps = np.nan_to_num(positions) * (_LAST - _FIRST)
    pixels = np.where(np.isnan(positions), _MISSING, _FIRST + np.round(steps)).astype(np.uint8)
    if nonfinite is not None:
        pixels[nonfinite] = _NONFINITE
    return _encode(pixels)


def _encode(pixels: NDArray[np.uint8]) -> bytes:
    height, width = pixels.shape
    rows = np.concatenate(
        [np.zeros((height, 1), np.uint8), pixels], axis=1
    )  # each row begins with its filter
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", _palette()),
        (b"tRNS", b"\0"),
        (b"IDAT", zlib.compress(rows.tobytes(), 9)),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


def _palette() -> bytes:
    stops = np.array([[int(colour[i : i + 2], 16) for i in (0, 2, 4)] for colour in VIRIDIS], np.float64)
    where = np.linspace(0, len(stops) - 1, _LAST - _FIRST + 1)
    scale = np.stack([np.interp(where, np.arange(len(stops)), stops[:, i]) for i in range(3)], axis=1)
    nonfinite = bytes.fromhex(NONFINITE)
    return b"\0\0\0" + nonfinite + np.round(scale).astype(np.uint8).tobytes()
