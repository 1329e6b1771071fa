"""Figures of one run that another can be held against, small enough to be parameters of a rule."""

from __future__ import annotations

import numpy as np

from watchstep.block import Block
from watchstep.derived import DERIVED
from watchstep.errors import RuleError
from watchstep.statistics import VALUE_COLUMNS, Floats, StatisticsBatch
from watchstep_rules import name_pattern

FIGURES = (*VALUE_COLUMNS, *DERIVED)
MOST_TENSORS = 500
MOST_POINTS = 1000

Reference = dict[str, list[tuple[int, float]]]
"""For each tensor, steps in ascending order and the figure there."""


def figure_of(statistics: StatisticsBatch, figure: str) -> Floats:
    """One of `FIGURES` of each row, float64 of shape (n,)."""
    derive = DERIVED.get(figure)
    held: Floats = derive(statistics) if derive else getattr(statistics, figure)
    return held


def reference_of(rows: Block, figure: str = "rms", include: str = ".*", points: int = 100) -> Reference:
    """What ``similar_across_runs`` takes as its ``reference``.

    Args:
        rows: of the run to be held against, as `watchstep.Run.rows` gives them; those in train mode and of the mode
            global count, of the lowest worker that has the tensor.
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
    chosen = rows.where(
        rows.mask_of_tensors([name_pattern.matches(include, info.name) for info in rows.catalogue])
        & is_training(rows)
    )
    values = figure_of(chosen.statistics, figure)
    reference: Reference = {}
    for tensor in np.unique(chosen.tensor):
        own = np.flatnonzero((chosen.tensor == tensor) & np.isfinite(values))
        if not len(own):
            continue
        own = own[chosen.worker[own] == chosen.worker[own].min()]
        own = own[np.unique(chosen.step[own], return_index=True)[1]]
        kept = own[np.unique(np.linspace(0, len(own) - 1, min(points, len(own))).astype(np.intp))]
        reference[chosen.catalogue[tensor].name] = [
            (int(chosen.step[row]), float(f"{values[row]:.6g}")) for row in kept
        ]
    if len(reference) > MOST_TENSORS:
        raise RuleError(
            f"{len(reference)} tensors are too many for the parameters of a rule",
            f"choose at most {MOST_TENSORS} by 'include'",
        )
    return reference


def is_training(block: Block) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Rows of the modes train and global."""
    return np.asarray((block.mode == 0) | (block.mode == 3))
