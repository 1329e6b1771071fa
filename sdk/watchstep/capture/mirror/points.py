"""Mirrored points: the selected figures of one step, computed from the rows that are recorded.

The name of a value is ``watchstep/<mode>/<name>`` for losses and metrics, and ``watchstep/<mode>/<collection>/<figure>`` for a figure over the tensors of a
collection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from watchstep.capture.mirror.mirrored_run import PREFIX, MirroredPoint
from watchstep.capture.steps.record import merge_repeats
from watchstep.format.block import STAGES, Block, concatenate
from watchstep.format.statistics import DERIVED, Floats, StatisticsBatch, merge_rows
from watchstep.format.tensors import LOSSES, METRICS, MODES, SAVED
from watchstep.reading.queries import loss_values

_REDUCED = STAGES.index("reduced")


class PointSource:
    """Selects rows, and turns complete steps into points.

    The newest step is returned once rows of a later one arrive, because a step may be handed over in parts.
    """

    def __init__(self, series: Sequence[str]) -> None:
        """Create it without rows.

        Args:
            series: as in `watchstep.Mirror`.
        """
        self._scalars = frozenset(name for name in series if name in {LOSSES, METRICS})
        pairs = [name.rpartition("/")[::2] for name in series if name not in self._scalars]
        self._figures = {
            collection: [figure for other, figure in pairs if other == collection] for collection, _ in pairs
        }
        self._waiting = Block.empty()
        self.has_shards = False
        """Whether rows of a collection were left out because this worker has only shards of their tensors."""

    def select(self, block: Block) -> Block:
        """Return the rows of the selected series, without histograms."""
        chosen = self._scalars | self._figures.keys()
        tensors = [
            SAVED not in info.collections and not chosen.isdisjoint(info.collections)
            for info in block.catalogue
        ]
        block = block.without_histograms()
        return replace(block.where(block.mask_of_tensors(tensors)), probes={})

    def add(self, blocks: Sequence[Block]) -> list[MirroredPoint]:
        """Add selected rows. Returns the points of the steps before the newest one."""
        rows = merge_repeats(concatenate([self._waiting, *blocks]))
        if not len(rows):
            return []
        is_newest = rows.step == rows.step.max()
        self._waiting = rows.where(is_newest)
        return self._points(rows.where(~is_newest))

    def finish(self) -> list[MirroredPoint]:
        """Return the points of the newest step."""
        rows, self._waiting = self._waiting, Block.empty()
        return self._points(rows)

    def _points(self, rows: Block) -> list[MirroredPoint]:
        values: dict[int, dict[str, float]] = {int(step): {} for step in np.unique(rows.step)}
        times = {step: int(rows.time_ns[rows.step == step].max()) for step in values}
        self._add_scalars(rows, values)
        for collection, figures in self._figures.items():
            self._add_figures(rows, collection, figures, values)
        return [MirroredPoint(step, times[step], named) for step, named in values.items() if named]

    def _add_scalars(self, rows: Block, values: dict[int, dict[str, float]]) -> None:
        tensors = [not self._scalars.isdisjoint(info.collections) for info in rows.catalogue]
        chosen = rows.where(rows.mask_of_tensors(tensors))
        columns = {
            name: getattr(chosen.statistics, name) for name in ("count", "nan", "pos_inf", "neg_inf", "mean")
        }
        for row, value in enumerate(loss_values(columns).tolist()):
            name = f"{PREFIX}/{chosen.mode_name(row)}/{chosen.info(row).name}"
            values[int(chosen.step[row])][name] = value

    def _add_figures(
        self, rows: Block, collection: str, figures: Sequence[str], values: dict[int, dict[str, float]]
    ) -> None:
        tensors = [collection in info.collections for info in rows.catalogue]
        chosen = rows.where(rows.mask_of_tensors(tensors))
        is_whole = chosen.places.shard_count == 1
        self.has_shards |= not bool(is_whole.all())
        chosen = chosen.where(is_whole)
        if not len(chosen):
            return
        keys, group = np.unique(
            np.stack([chosen.step, chosen.mode.astype(np.int64)], axis=1), axis=0, return_inverse=True
        )
        group = group.reshape(-1)
        # Of tensors that are measured before and after a reduction, the reduced values count.
        reduced = np.zeros(len(keys), np.bool_)
        is_reduced = chosen.places.stage == _REDUCED
        reduced[group[is_reduced]] = True
        counts = is_reduced | ~reduced[group]
        merged = merge_rows(chosen.statistics.take(np.flatnonzero(counts)), group[counts], len(keys))
        for figure in figures:
            for (step, mode), value in zip(keys.tolist(), _figure(merged, figure).tolist(), strict=True):
                if not np.isnan(value):
                    values[step][f"{PREFIX}/{MODES[mode]}/{collection}/{figure}"] = value


def _figure(statistics: StatisticsBatch, name: str) -> Floats:
    with np.errstate(all="ignore"):
        column: NDArray[np.float64] = (
            DERIVED[name](statistics) if name in DERIVED else getattr(statistics, name).astype(np.float64)
        )
    return column
