"""Losses of a constant prediction (the same output for every example), computed from the recorded labels."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from watchstep.format.block import Block
from watchstep.format.statistics import Floats
from watchstep_rules.rule import State
from watchstep_rules.signals.tensor_selection import has_role, rows_where

_ENOUGH = 32
_NEAR = 0.03
_BATCHES = 8
_EXAMPLES = 8
_WITHIN = 0.2


class Baselines(NamedTuple):
    """Losses of the best constant prediction, for the usual kinds of loss.

    Attributes:
        step: first step at which they apply.
        losses: losses in ascending order, the cross-entropy last; empty if all labels are equal and so cannot be the target.
        in_order: whether batches are sorted by label.
        least: lower bound of each loss, because the shares of some classes are unknown.
    """

    step: int
    losses: tuple[float, ...]
    in_order: bool = False
    least: tuple[float, ...] = ()


class LabelState(State):
    """Labels so far: count, mean, sum of squared deviations, and the last baselines.

    Also the number of batches, and the squared deviations of labels from the means of their batches.
    """

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0
    names: tuple[str, ...] = ()
    last: tuple[float, ...] | None = None
    least: tuple[float, ...] = ()
    batches: int = 0
    within: float = 0.0

    @property
    def in_order(self) -> bool:
        """Whether labels differ between batches, but hardly within a batch.

        For shuffled labels, the share of deviations within batches of n is ``1 - 1/n``, however rare a class is.
        """
        enough = self.batches >= _BATCHES and self.count >= _EXAMPLES * self.batches
        return enough and self.m2 > 0 and self.within <= _WITHIN * self.m2


def follow_labels(state: LabelState, block: Block) -> tuple[LabelState, list[Baselines]]:
    """Follow the labels of a block, at each step those of the first worker with labels.

    For k classes with shares p: cross-entropy ``-sum p log p``, and squared error against one-hot labels, summed or averaged
    over classes. For continuous targets: their variance, the squared error. No baseline if several tensors are recorded as
    labels, or for integers that were not counted, such as tokens. The shares of the largest and the smallest class are
    known. The others are assumed equal; ``least`` assumes the most unequal shares possible.

    Returns:
        The state afterwards, and the baselines of each step with labels, ascending, starting with those of ``state``.
    """
    baselines = [] if state.last is None else [Baselines(-1, state.last, state.in_order, state.least)]
    rows = np.flatnonzero(rows_where(block, has_role, "label"))
    last_step = -1
    for row in map(int, rows[np.argsort(block.step[rows], kind="stable")]):
        step = int(block.step[row])
        if block.mode_name(row) not in ("train", "global") or step == last_step:
            continue
        last_step = step
        state = _with(state, block, row)
        if state.last is not None:
            baselines.append(Baselines(step, state.last, state.in_order, state.least))
    return state, baselines


def at(found: list[Baselines], steps: NDArray[np.int64]) -> list[tuple[float, ...] | None]:
    """Return the baselines at each step; None if labels are unknown."""
    return [found[place].losses if place >= 0 else None for place in _places(found, steps)]


def least_at(found: list[Baselines], steps: NDArray[np.int64]) -> list[tuple[float, ...]]:
    """Return the lower bounds of the baselines of `at`; empty if labels are unknown."""
    return [found[place].least if place >= 0 else () for place in _places(found, steps)]


def in_order_at(found: list[Baselines], steps: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether batches are sorted by label, as known at each step."""
    return np.array([place >= 0 and found[place].in_order for place in _places(found, steps)], np.bool_)


def _places(found: list[Baselines], steps: NDArray[np.int64]) -> list[int]:
    places: list[int] = (
        np.searchsorted([baselines.step for baselines in found], steps, side="right") - 1
    ).tolist()
    return places


def _with(state: LabelState, block: Block, row: int) -> LabelState:
    names = tuple(sorted({*state.names, block.info(row).name}))
    statistics = block.statistics
    count = int(statistics.finite[row])
    if len(names) > 1 or not count:
        return LabelState(names=names) if len(names) > 1 else state
    total = state.count + count
    difference = float(statistics.mean[row]) - state.mean
    mean = state.mean + difference * count / total
    m2 = state.m2 + float(statistics.m2[row]) + difference * difference * state.count * count / total
    classes = _of_classes(block, row)
    variance = None if "int" in block.info(row).dtype else (m2 / total,) if m2 > 0 else ()
    last, least = (variance, variance or ()) if classes is None else classes
    complete = total >= _ENOUGH and last is not None
    return LabelState(
        count=total,
        mean=mean,
        m2=m2,
        names=names,
        last=last if complete else state.last,
        least=least if complete else state.least,
        batches=state.batches + 1,
        within=state.within + float(statistics.m2[row]),
    )


def _of_classes(block: Block, row: int) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Return the losses of a constant prediction, ascending, and their lower bounds."""
    figures = [
        float(block.probes[name][row]) if name in block.probes else np.nan
        for name in ("labels_counted", "classes", "largest_class", "smallest_class")
    ]
    if not np.isfinite(figures).all() or figures[0] <= 0:
        return None
    return _of_counts(figures[0], figures[1], figures[2], figures[3])


@functools.lru_cache(maxsize=1024)
def _of_counts(
    counted: float, classes: float, largest: float, smallest: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """`_of_classes` of finite counts. Several rules follow the same labels."""
    if classes < 2:
        return (), ()
    largest_share, smallest_share, others = largest / counted, smallest / counted, int(classes) - 2
    rest = max(0.0, counted - largest - smallest) / counted
    equal = np.full(others, rest / max(1, others))
    unequal = np.full(others, smallest_share)
    if largest_share > smallest_share:
        number = min(others, int(max(0.0, rest - others * smallest_share) / (largest_share - smallest_share)))
        unequal[:number] = largest_share
        if number < others:
            unequal[number] = max(smallest_share, rest - unequal.sum() + unequal[number])
    known_shares = [largest_share, smallest_share]
    return _guessed(np.array([*known_shares, *equal])), _guessed(np.array([*known_shares, *unequal]))


def _guessed(shares: Floats) -> tuple[float, ...]:
    """Return squared error averaged over classes, squared error, cross-entropy. They are ascending, since ``-log p >= 1 - p``."""
    classes, shares = len(shares), shares[shares > 0]
    squared = float(1 - (shares**2).sum())
    return squared / classes, squared, float(-(shares * np.log(shares)).sum())


CROSS_ENTROPIES = ("NllLoss", "NllLoss2D", "CrossEntropyLoss")
_OF_TWO_CLASSES = ("BinaryCrossEntropy", "BinaryCrossEntropyWithLogits")
_SQUARED = "MseLoss"
CLASSIFIES = (*CROSS_ENTROPIES, *_OF_TWO_CLASSES)
"""Loss functions of class labels."""


def own_baseline(losses: tuple[float, ...] | None, function: str) -> int | None:
    """Return the index of a loss's baseline, by the function that computes the loss; None if no baseline applies.

    Args:
        losses: baselines from `at`.
        function: loss function, as in `TensorInfo.module_type`; empty if unknown. Class labels are then assumed to be
            learned by cross-entropy, as they nearly always are.
    """
    if not losses:
        return None
    if len(losses) == 1:
        return 0 if function in (_SQUARED, "") else None
    if function in _OF_TWO_CLASSES:
        return 2 if round(losses[1] / losses[0]) == 2 else None
    if function == _SQUARED:
        return 0
    return 2 if function in (*CROSS_ENTROPIES, "") else None


def own_baselines(known: list[tuple[float, ...] | None], function: str) -> Floats:
    """Return the baseline of a loss at each step, by the function that computes the loss; NaN if no baseline applies.

    Args:
        known: baselines from `at`.
        function: as in `own_baseline`.
    """
    places = [own_baseline(losses, function) for losses in known]
    return _picked(known, places)


def _picked(losses_by_step: Sequence[tuple[float, ...] | None], places: list[int | None]) -> Floats:
    pairs = zip(losses_by_step, places, strict=True)
    return np.array([losses[place] if losses and place is not None else np.nan for losses, place in pairs])


@dataclass(frozen=True)
class AgainstLabels:
    """Levels of a loss compared with the losses of constant predictions, columns of shape (n,).

    Attributes:
        own: loss of a constant prediction, by the loss function; NaN if labels are unknown or do not determine it.
        least: lower bound of ``own``, by what is known of the labels.
        constant: the level is that of a constant prediction (of any candidate, if the function is unknown): within 3 %,
            and at most one standard error below.
        above: the level is at least the highest candidate; false if labels are unknown.
        told: labels are unknown, or differ.
    """

    own: Floats
    least: Floats
    constant: NDArray[np.bool_]
    above: NDArray[np.bool_]
    told: NDArray[np.bool_]


def against_labels(
    level: Floats,
    error: Floats,
    known: list[tuple[float, ...] | None],
    least: list[tuple[float, ...]],
    function: str,
) -> AgainstLabels:
    """Compare levels of a loss with the losses of constant predictions, one tuple for each level.

    Args:
        level: levels of the loss, shape (n,).
        error: standard errors of the levels, shape (n,).
        known: baselines from `at`.
        least: lower bounds from `least_at`.
        function: function that computes the loss, as in `TensorInfo.module_type`.
    """
    places = [own_baseline(losses, function) for losses in known]
    own, lowest = _picked(known, places), _picked(least, places)
    candidates = [
        range(len(losses or ())) if not function else () if place is None else (place,)
        for losses, place in zip(known, places, strict=True)
    ]
    highest = np.array(
        [
            (losses or ())[chosen[-1]] if chosen else np.inf
            for losses, chosen in zip(known, candidates, strict=True)
        ]
    )
    is_near = np.zeros(len(level), np.bool_)
    for row, (losses, lows, chosen) in enumerate(zip(known, least, candidates, strict=True)):
        value, deviation = float(level[row]), float(error[row])
        is_near[row] = any(
            max((1 - _NEAR) * lows[place], lows[place] - deviation) <= value <= (1 + _NEAR) * losses[place]
            for place in chosen
            if losses
        )
    informative = [losses is None or bool(losses) for losses in known]
    return AgainstLabels(
        own, lowest, is_near, level >= (1 - _NEAR) * highest, np.array(informative, np.bool_)
    )
