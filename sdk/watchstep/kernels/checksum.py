"""Checksums of the bits of tensors: equal bits give equal checksums, whatever computes them, wherever it does.

They tell whether replicas hold the same weights bit by bit, and whether a weight has changed since. -0 and +0 differ, and
NaN are told apart by their bits; only the order of the elements and their bits count, not shape or type.

Definition. Elements, in the order in which they are read, are words: the unsigned integers of their bits, of 8, 16 or 32
bits; elements of 64 bits are two words of 32, the low half first. All arithmetic is of 64 bits and wraps around. ``mixed``
is the last part of SplitMix64 (Steele, Lea, Flood 2014), ``step`` its increment:

    key(j)   = mixed((j + 1) * step) | 1                               j = 0 … 1023
    block(b) = sum of key(j) * (w ^ w >> 16), w = word 1024 * b + j    words past the end are zero
    checksum = mixed(sum of mixed(block(b) + (b + 1) * step) + words * step) >> 11

A float64 holds the 53 bits that are left.

What it is worth. Where two tensors of a size differ in one word, the sums of that block differ, as keys are odd. Where they
differ in more, sums of products with odd keys drawn at random are equal with a probability of at most ``2 ** (t - 63)``,
where ``2 ** t`` divides all differences of ``w ^ w >> 16`` in the block (Carter, Wegman 1979): at most ``2 ** -48`` for
elements of 8 or 16 bits, and for those of 32 bits but where each difference is in bits 16 and up alone, all in the same
way; never more than ``2 ** -32``. Blocks are mixed before they are added up, each with its place, so that their
differences do not cancel but by chance, with a probability of about ``2 ** -64``; of the last 64 bits 53 are kept, which adds
``2 ** -53``. Keys are fixed: this holds for what happens by accident (faults of memory, races, lost updates), and is no
protection against someone who looks for a collision.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 1024
"""Words of a block."""

STEP = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
DROPPED = 11
"""How many bits of the last 64 are left out."""

_SLICE = 64 * BLOCK


def checksum_array(array: NDArray[Any]) -> int:
    """The checksum of an array in host memory, below ``2 ** 53``.

    Args:
        array: any shape and strides, elements of 1, 2, 4 or 8 bytes, or complex.

    Raises:
        TypeError: elements are of another width, or are Python objects.
    """
    words = _words(array)
    keys = _mixed(np.arange(1, BLOCK + 1, dtype=np.uint64) * np.uint64(STEP)) | np.uint64(1)
    total = np.zeros(1, np.uint64)
    for start in range(0, len(words), _SLICE):
        part = words[start : start + _SLICE].astype(np.uint64)
        part ^= part >> np.uint64(16)
        part = np.pad(part, (0, -len(part) % BLOCK)).reshape(-1, BLOCK)
        first = start // BLOCK
        order = np.arange(first + 1, first + 1 + len(part), dtype=np.uint64) * np.uint64(STEP)
        total += _mixed((part * keys).sum(axis=1) + order).sum()
    total += np.array([len(words)], np.uint64) * np.uint64(STEP)
    return int(_mixed(total)[0] >> np.uint64(DROPPED))


def _words(array: NDArray[Any]) -> NDArray[Any]:
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.kind == "c":
        flat = flat.view(flat.real.dtype)
    if flat.dtype.hasobject or flat.dtype.itemsize not in {1, 2, 4, 8}:
        raise TypeError(
            f"elements of type {flat.dtype} have no checksum: their bits are not 1, 2, 4 or 8 bytes"
        )
    words: NDArray[Any] = flat.view(f"u{min(flat.dtype.itemsize, 4)}")
    return words


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(multiplier)
    x ^= x >> np.uint64(SHIFTS[-1])
    return x
