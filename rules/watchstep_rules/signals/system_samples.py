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
    """Count the samples that are certainly below a limit.

    Args:
        batch: n rows.
        limit: positive limit; one for all rows, or one for each row.
    """
    bins = batch.histogram.bins
    low = is_negative_bin(bins) | (_powers(bins, 1) <= _of_bins(batch, limit))
    some = np.maximum(_counted(batch, low) + batch.zero, 1)
    with np.errstate(invalid="ignore"):
        all_below, none_below = batch.max < limit, ~(batch.min < limit)
    return np.where(all_below, batch.finite, np.where(none_below, 0, some)).astype(np.int64)


def surely_above(batch: StatisticsBatch, limit: float | Floats) -> Counts:
    """Count the samples that are certainly at or above a limit.

    Args:
        batch: n rows.
        limit: positive limit; one for all rows, or one for each row. No sample is above NaN.
    """
    bins = batch.histogram.bins
    high = ~is_negative_bin(bins) & (_powers(bins, 0) >= _of_bins(batch, limit))
    some = np.maximum(_counted(batch, high), 1)
    with np.errstate(invalid="ignore"):
        all_above, none_above = batch.min >= limit, ~(batch.max >= limit)
    return np.where(all_above, batch.finite, np.where(none_above, 0, some)).astype(np.int64)


def _powers(bins: NDArray[np.int16], offset: int) -> Floats:
    """Return two to the power of each bin plus ``offset``."""
    with np.errstate(over="ignore"):
        powers: Floats = np.ldexp(1.0, exponent_of_bin(bins).astype(np.int64) + offset)
    return powers


def _of_bins(batch: StatisticsBatch, limit: float | Floats) -> Floats:
    limits = np.broadcast_to(np.asarray(limit, np.float64), (len(batch),))
    return np.repeat(limits, np.diff(batch.histogram.offsets))


def _counted(batch: StatisticsBatch, chosen: NDArray[np.bool_]) -> Counts:
    owner = np.repeat(np.arange(len(batch)), np.diff(batch.histogram.offsets))
    counted = np.zeros(len(batch), np.int64)
    np.add.at(counted, owner[chosen], batch.histogram.counts[chosen])
    return counted


class Recent(NamedTuple):
    """An exponentially weighted mean of samples.

    Attributes:
        seen: number of samples so far.
        total: weighted sum of the samples.
        weight: sum of the weights.
    """

    seen: int = 0
    total: float = 0.0
    weight: float = 0.0

    @property
    def mean(self) -> float:
        """Mean of the recent samples; NaN before the first."""
        return self.total / self.weight if self.weight else math.nan

    def after(self, total: float, samples: int, window: float) -> Recent:
        """Add samples.

        Args:
            total: sum of their values; for a share, the number of samples that fulfil the condition.
            samples: number of samples.
            window: number of samples after which a weight has decayed by a factor of e.
        """
        decay = math.exp(-samples / window)
        return Recent(
            self.seen + samples,
            round(self.total * decay + total, _DIGITS),
            round(self.weight * decay + samples, _DIGITS),
        )


def by_step(block: Block) -> Iterator[list[int]]:
    """Yield the rows of each step, worker and mode, in order: samples of the same time."""
    key = np.stack([block.step, block.worker, block.mode])
    cuts = np.flatnonzero((np.diff(key, axis=1) != 0).any(axis=0)) + 1
    for part in np.split(np.arange(len(block)), cuts):
        if len(part):
            yield part.tolist()


def series_name(block: Block, row: int) -> str:
    """Return the name of a row's series: ``figure@worker/mode``."""
    return f"{block.info(row).name}@{block.worker[row]}/{block.mode_name(row)}"


def means(block: Block) -> Floats:
    """Return the mean of each row; NaN if a sample is not finite."""
    return np.where(block.statistics.nonfinite == 0, block.statistics.mean, np.nan)
