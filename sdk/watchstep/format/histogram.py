"""Signed exponent histograms: how many elements have each power-of-two magnitude.

An element ``x`` that is finite and not zero has exponent ``e = floor(log2(|x|))`` and falls into the bin
``2 * e + (x < 0)``: its exponent and sign in one small integer. float64 needs bins -2148 … 2047. Histograms are
sparse: only bins that hold something are kept, in ascending order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from watchstep.errors import ConfigError

EXPONENT_RANGE = (-1074, 1023)
"""Smallest and largest exponent of a finite float64, subnormals included."""

_SPARE, _SMALL = 8, 2**16
"""A table may have so many places for each bin that is held, and so many besides."""

BIN_RANGE = (2 * EXPONENT_RANGE[0], 2 * EXPONENT_RANGE[1] + 1)


@dataclass(frozen=True)
class Histograms:
    """Histograms of n tensors in compressed rows.

    Attributes:
        offsets: int64, shape (n + 1,); row i owns ``bins[offsets[i]:offsets[i + 1]]``.
        bins: int16, ascending within a row.
        counts: int64, same shape as bins, all positive.
    """

    offsets: NDArray[np.int64]
    bins: NDArray[np.int16]
    counts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def bytes(self) -> int:
        """Of memory."""
        return self.offsets.nbytes + self.bins.nbytes + self.counts.nbytes

    def row(self, index: int) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        """Bins and counts of one tensor."""
        part = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return self.bins[part], self.counts[part]

    def take(self, rows: NDArray[np.intp]) -> Histograms:
        """The histograms of some rows, in that order."""
        lengths = np.diff(self.offsets)[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        starts = np.repeat(self.offsets[:-1][rows] - offsets[:-1], lengths)
        index = (np.arange(offsets[-1]) + starts).astype(np.intp)
        return Histograms(offsets, self.bins[index], self.counts[index])

    @classmethod
    def concatenate(cls, parts: list[Histograms]) -> Histograms:
        """The histograms of several batches, one after the other; unread where those of any row are."""
        if any(isinstance(part, UnreadHistograms) and len(part) for part in parts):
            return UnreadHistograms(sum(len(part) for part in parts))
        parts = [part for part in parts if not isinstance(part, UnreadHistograms)]
        lengths = [np.diff(part.offsets) for part in parts]
        offsets = np.concatenate([[0], np.cumsum(np.concatenate([*lengths, np.empty(0, np.int64)]))])
        bins = np.concatenate([np.empty(0, np.int16), *(part.bins for part in parts)])
        counts = np.concatenate([np.empty(0, np.int64), *(part.counts for part in parts)])
        return cls(offsets.astype(np.int64), bins, counts)

    @classmethod
    def empty(cls, rows: int) -> Histograms:
        """Histograms with nothing in them."""
        return cls(np.zeros(rows + 1, np.int64), np.empty(0, np.int16), np.empty(0, np.int64))


class UnreadHistograms(Histograms):
    """Stands where a reader left histograms out; to look into it is a mistake, and says so."""

    def __init__(self, rows: int) -> None:
        object.__setattr__(self, "_rows", rows)

    def __len__(self) -> int:
        rows: int = vars(self)["_rows"]
        return rows

    def take(self, rows: NDArray[np.intp]) -> Histograms:
        """Of some rows; as unread as these."""
        return UnreadHistograms(len(rows))

    def __getattr__(self, name: str) -> Any:
        if name not in type(self).__dataclass_fields__:
            raise AttributeError(name)
        raise ConfigError(
            f"histogram.{name}: the histograms of these rows were not read",
            "a rule that looks into them says so: Needs(…, histograms=True)",
        )


def exponent_of_bin(bins: NDArray[np.int16]) -> NDArray[np.int16]:
    """The power of two that a bin stands for."""
    return bins >> 1


def is_negative_bin(bins: NDArray[np.int16]) -> NDArray[np.bool_]:
    """Whether a bin holds elements below zero."""
    return (bins & 1).astype(np.bool_)


def sum_rows(histograms: Histograms, group: NDArray[np.intp], groups: int) -> Histograms:
    """Add up histograms by group; of unread ones the sums are as unread.

    Args:
        histograms: n rows.
        group: int, shape (n,), the group of each row, 0 … groups - 1.
        groups: how many rows the result has.
    """
    if isinstance(histograms, UnreadHistograms):
        return UnreadHistograms(groups)
    if len(histograms.bins) == 0:
        return Histograms.empty(groups)
    low = int(histograms.bins.min())
    width = int(histograms.bins.max()) - low + 1
    owner = np.repeat(np.asarray(group, np.int64), np.diff(histograms.offsets))
    key = owner * width + (histograms.bins.astype(np.int64) - low)
    if groups * width <= _SPARE * len(key) + _SMALL:  # counted in a table of all bins that there may be
        table = np.zeros(groups * width, np.int64)
        np.add.at(table, key, histograms.counts)
        keys = np.flatnonzero(table)
        counts = table[keys]
    else:
        keys, inverse = np.unique(key, return_inverse=True)
        counts = np.zeros(len(keys), np.int64)
        np.add.at(counts, inverse, histograms.counts)
    offsets = np.searchsorted(keys, np.arange(groups + 1) * width).astype(np.int64)
    return Histograms(offsets, (keys % width + low).astype(np.int16), counts)
