"""Figures of one run that another can be held against, small enough to be parameters of a rule."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from watchstep.errors import RuleError
from watchstep.format.block import Block, sort_key
from watchstep.format.statistics import DERIVED, VALUE_COLUMNS, Floats, StatisticsBatch
from watchstep_rules.signals import name_pattern
from watchstep_rules.signals.shards import merge_shards

FIGURES = (*VALUE_COLUMNS, *DERIVED)
MOST_TENSORS = 500
MOST_POINTS = 1000

Point = tuple[int, float] | tuple[int, float, float, float]
"""A step and the figure there; where steps before it were left out, the lowest and highest figure among those too."""

Reference = dict[str, list[Point]]
"""For each tensor, points in ascending order of their steps."""


def figure_of(statistics: StatisticsBatch, figure: str) -> Floats:
    """One of `FIGURES` of each row, float64 of shape (n,)."""
    derive = DERIVED.get(figure)
    held: Floats = derive(statistics) if derive else getattr(statistics, figure)
    return held


def reference_of(rows: Block, figure: str = "rms", include: str = ".*", points: int = 100) -> Reference:
    """What ``similar_across_runs`` takes as its ``reference``.

    Args:
        rows: of the run to be held against, as `watchstep.Run.rows` gives them; those in train mode and of the mode
            global count, shards merged, at each step of the lowest worker that has the tensor.
        figure: one of `FIGURES`.
        include: only tensors whose names this regular expression, in RE2's syntax, matches from the start.
        points: the most steps of a tensor, evenly among those that were recorded.

    Raises:
        RuleError: there is no such figure, ``include`` is no regular expression, or there are more than 500
            tensors or 1000 points.
    """
    if figure not in FIGURES:
        raise RuleError(f"figure {figure!r} is not known", f"use one of {', '.join(FIGURES)}")
    if not 2 <= points <= MOST_POINTS:
        raise RuleError(f"points={points}", f"use 2 to {MOST_POINTS}")
    try:
        name_pattern.check(include)
    except ValueError as error:
        raise RuleError(f"include={include[:100]!r}: {error}", "leave it out for all tensors") from error
    chosen = merge_shards(
        rows.where(
            rows.mask_of_tensors([name_pattern.matches(include, info.name) for info in rows.catalogue])
            & is_training(rows)
        )
    )
    values = figure_of(chosen.statistics, figure)
    reference: Reference = {}
    for tensor in np.unique(chosen.tensor):
        own = np.flatnonzero((chosen.tensor == tensor) & np.isfinite(values))
        if not len(own):
            continue
        own = own[lowest_workers(chosen)[own]]
        own = own[np.unique(chosen.step[own], return_index=True)[1]]
        kept = np.unique(np.linspace(0, len(own) - 1, min(points, len(own))).astype(np.intp))
        reference[chosen.catalogue[tensor].name] = _points(chosen.step[own], values[own], kept)
    if len(reference) > MOST_TENSORS:
        raise RuleError(
            f"{len(reference)} tensors are too many for the parameters of a rule",
            f"choose at most {MOST_TENSORS} by 'include'",
        )
    return reference


def _points(steps: NDArray[np.int64], values: Floats, kept: NDArray[np.intp]) -> list[Point]:
    """Some of the steps with their figures as they are, and the range of those that are left out before each."""
    points: list[Point] = [(int(steps[0]), float(values[0]))]
    for before, at in pairwise(kept.tolist()):
        step, value, between = int(steps[at]), float(values[at]), values[before + 1 : at]
        points.append(
            (step, value, float(between.min()), float(between.max())) if len(between) else (step, value)
        )
    return points


def lowest_workers(block: Block) -> NDArray[np.bool_]:
    """Which rows are of the lowest worker that has their tensor at their step in their mode, bool of shape (n,)."""
    key = sort_key(block.step, block.mode, block.tensor)
    _, group = np.unique(key, return_inverse=True)
    lowest = np.full(int(group.max()) + 1 if len(group) else 0, np.iinfo(np.int64).max)
    np.minimum.at(lowest, group, block.worker.astype(np.int64))
    return np.asarray(block.worker == lowest[group])


def is_training(block: Block) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Rows of the modes train and global."""
    return np.asarray((block.mode == 0) | (block.mode == 3))
