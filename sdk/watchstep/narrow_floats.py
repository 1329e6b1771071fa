"""Floating-point formats that numpy lacks: their bits in unsigned integers, and their values in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

NARROW_FLOATS: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype("<u2"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E5M2": np.dtype("u1"),
    "F8_E8M0": np.dtype("u1"),
}
"""What holds the bits of each format, by safetensors' names."""


def widened(bits: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The numbers that some bits stand for, as float32, which holds every one of them exactly.

    Args:
        bits: of any shape.
        dtype: a name of `NARROW_FLOATS`; for any other, the array comes back as it is.
    """
    if dtype not in NARROW_FLOATS:
        return bits
    if dtype == "BF16":
        return np.asarray(bits.astype(np.uint32) << 16).view(np.float32)
    every = np.arange(256, dtype=np.uint16)
    table = {"F8_E4M3": _e4m3, "F8_E5M2": _e5m2, "F8_E8M0": _e8m0}[dtype](every)
    values: NDArray[Any] = table[bits]
    return values


def _e4m3(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """OCP FP8 E4M3: 4 exponent bits with bias 7, no infinity, NaN where all bits but the sign are set."""
    exponent, fraction = ((bits >> 3) & 15).astype(np.int32), (bits & 7).astype(np.float32)
    size = np.where(exponent == 0, np.ldexp(fraction, -9), np.ldexp(8 + fraction, exponent - 10))
    size = np.where(bits & 127 == 127, np.float32(np.nan), size)
    return np.where(bits >= 128, -size, size).astype(np.float32)


def _e5m2(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """OCP FP8 E5M2: the upper byte of IEEE half precision."""
    return (bits << 8).view(np.float16).astype(np.float32)


def _e8m0(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """OCP MX scale: a power of two with bias 127; 255 is NaN."""
    power = np.where(bits == 255, 0, bits.astype(np.int32) - 127)
    size = np.ldexp(np.float32(1), power).astype(np.float32)
    values: NDArray[np.float32] = np.where(bits == 255, np.float32(np.nan), size)
    return values
