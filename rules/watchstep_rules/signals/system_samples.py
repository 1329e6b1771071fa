"""System samples: how many samples of a row are certainly beyond a limit, and which resource is the bottleneck.

A row has the extremes of its samples and a histogram over powers of two. For some samples it is unknown on which side of a limit they
are. Rules count only the samples whose side is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from watchstep.format.block import Block
from watchstep.format.statistics import Counts, Floats, StatisticsBatch, exponent_of_bin, is_negative_bin

_DIGITS = 9


def surely_below(batch: StatisticsBatch, limit: float | Floats) -> Counts:
    """How many samples are surely below a limit.

    Args:
        batch: n rows.
        limit: above zero; one for all rows, or one for each.
    """
    bins = batch.histogram.bins
    low = is_negative_bin(bins) | (_powers(bins, 1) <= _of_bins(batch, limit))
    some = np.maximum(_counted(batch, low) + batch.zero, 1)
    with np.errstate(invalid="ignore"):
        whole, none = batch.max < limit, ~(batch.min < limit)
    return np.where(whole, batch.finite, np.where(none, 0, some)).astype(np.int64)


def surely_above(batch: StatisticsBatch, limit: float | Floats) -> Counts:
    """How many samples are surely at or above a limit.

    Args:
        batch: n rows.
        limit: above zero; one for all rows, or one for each. None is above one that is NaN.
    """
    bins = batch.histogram.bins
    high = ~is_negative_bin(bins) & (_powers(bins, 0) >= _of_bins(batch, limit))
    some = np.maximum(_counted(batch, high), 1)
    with np.errstate(invalid="ignore"):
        whole, none = batch.min >= limit, ~(batch.max >= limit)
    return np.where(whole, batch.finite, np.where(none, 0, some)).astype(np.int64)


def _powers(bins: NDArray[np.int16], above: int) -> Floats:
    """Two to the power of each bin, or of the one above it."""
    with np.errstate(over="ignore"):
        powers: Floats = np.ldexp(1.0, exponent_of_bin(bins).astype(np.int64) + above)
    return powers


def _of_bins(batch: StatisticsBatch, limit: float | Floats) -> Floats:
    limits = np.broadcast_to(np.asarray(limit, np.float64), (len(batch),))
    return np.repeat(limits, np.diff(batch.histogram.offsets))


def _counted(batch: StatisticsBatch, chosen: NDArray[np.bool_]) -> Counts:
    owner = np.repeat(np.arange(len(batch)), np.diff(batch.histogram.offsets))
    found = np.zeros(len(batch), np.int64)
    np.add.at(found, owner[chosen], batch.histogram.counts[chosen])
    return found


class Recent(NamedTuple):
    """A weighted mean of samples, of which older ones count for less and less.

    Attributes:
        seen: samples so far, all of them.
        total: of the samples' figures, weighted.
        weight: of the samples.
    """

    seen: int = 0
    total: float = 0.0
    weight: float = 0.0

    @property
    def mean(self) -> float:
        """Of the last samples; NaN before the first."""
        return self.total / self.weight if self.weight else math.nan

    def after(self, total: float, samples: int, window: float) -> Recent:
        """With samples more.

        Args:
            total: of their figures; where it is counted how many are so, how many.
            samples: how many they are.
            window: after so many more their weight is down by a factor of e.
        """
        kept = math.exp(-samples / window)
        return Recent(
            self.seen + samples,
            round(self.total * kept + total, _DIGITS),
            round(self.weight * kept + samples, _DIGITS),
        )


def by_step(block: Block) -> Iterator[list[int]]:
    """Rows of each step of each worker in each mode: what was sampled at the same time. In their order."""
    key = np.stack([block.step, block.worker, block.mode])
    cuts = np.flatnonzero((np.diff(key, axis=1) != 0).any(axis=0)) + 1
    for part in np.split(np.arange(len(block)), cuts):
        if len(part):
            yield part.tolist()


def series_name(block: Block, row: int) -> str:
    """The figure of one worker, or in another mode: ``figure@worker/mode``."""
    return f"{block.info(row).name}@{block.worker[row]}/{block.mode_name(row)}"


def means(block: Block) -> Floats:
    """The mean of each row; NaN where a sample is no number."""
    return np.where(block.statistics.nonfinite == 0, block.statistics.mean, np.nan)
