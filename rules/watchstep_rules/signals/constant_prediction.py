"""What a loss is worth that does no better than to say the same for every example, from the labels that were recorded."""

from __future__ import annotations

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
        step: from which on these hold.
        losses: ascending, the cross-entropy last; empty where labels are all alike, so that they cannot be what is learnt.
        in_order: whether batches come sorted by label.
        least: the lowest that each can be, where the shares of some classes are not known.
    """

    step: int
    losses: tuple[float, ...]
    in_order: bool = False
    least: tuple[float, ...] = ()


class LabelState(State):
    """Labels so far: how many measured ones, their mean and sum of squared deviations; and the last figures made of any.

    Also how many batches these came in, and their squared deviations from the means of their batches.
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
        """Whether labels differ between batches, and within them hardly do.

        Of labels that were shuffled the share of deviations within batches of n is ``1 - 1/n``, however rare a class is.
        """
        enough = self.batches >= _BATCHES and self.count >= _EXAMPLES * self.batches
        return enough and self.m2 > 0 and self.within <= _WITHIN * self.m2


def follow_labels(state: LabelState, block: Block) -> tuple[LabelState, list[Baselines]]:
    """Follow the labels of a block, those of the first worker that has any at each step.

    Of k classes with shares p: cross-entropy ``-sum p log p``, and squared error against one-hot labels, summed or averaged
    over classes. Of measured targets: their variance, the squared error. Nothing where several tensors are recorded as
    labels, or whole numbers that were not counted, as tokens are. The shares of the largest and the smallest class are known, the others are taken as
    alike; ``least`` takes them as far apart as they can be.

    Returns:
        The state afterwards, and the baselines of each step with labels, ascending; first what the state had.
    """
    found = [] if state.last is None else [Baselines(-1, state.last, state.in_order, state.least)]
    rows = np.flatnonzero(rows_where(block, has_role, "label"))
    done = -1
    for row in map(int, rows[np.argsort(block.step[rows], kind="stable")]):
        step = int(block.step[row])
        if block.mode_name(row) not in ("train", "global") or step == done:
            continue
        done = step
        state = _with(state, block, row)
        if state.last is not None:
            found.append(Baselines(step, state.last, state.in_order, state.least))
    return state, found


def at(found: list[Baselines], steps: NDArray[np.int64]) -> list[tuple[float, ...] | None]:
    """The baselines that hold at each of some steps; None where labels are not known."""
    return [found[place].losses if place >= 0 else None for place in _places(found, steps)]


def least_at(found: list[Baselines], steps: NDArray[np.int64]) -> list[tuple[float, ...]]:
    """The lowest that the baselines of `at` can be; empty where labels are not known."""
    return [found[place].least if place >= 0 else () for place in _places(found, steps)]


def in_order_at(found: list[Baselines], steps: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether batches come sorted by label, as far as is known at each of some steps."""
    return np.array([place >= 0 and found[place].in_order for place in _places(found, steps)], np.bool_)


def _places(found: list[Baselines], steps: NDArray[np.int64]) -> list[int]:
    places: list[int] = (np.searchsorted([each.step for each in found], steps, side="right") - 1).tolist()
    return places


def _with(state: LabelState, block: Block, row: int) -> LabelState:
    names = tuple(sorted({*state.names, block.info(row).name}))
    statistics = block.statistics
    count = int(statistics.finite[row])
    if len(names) > 1 or not count:
        return LabelState(names=names) if len(names) > 1 else state
    total = state.count + count
    apart = float(statistics.mean[row]) - state.mean
    mean = state.mean + apart * count / total
    m2 = state.m2 + float(statistics.m2[row]) + apart * apart * state.count * count / total
    classes = _of_classes(block, row)
    measured = None if "int" in block.info(row).dtype else (m2 / total,) if m2 > 0 else ()
    last, least = (measured, measured or ()) if classes is None else classes
    enough = total >= _ENOUGH and last is not None
    return LabelState(
        count=total,
        mean=mean,
        m2=m2,
        names=names,
        last=last if enough else state.last,
        least=least if enough else state.least,
        batches=state.batches + 1,
        within=state.within + float(statistics.m2[row]),
    )


def _of_classes(block: Block, row: int) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """The losses of a constant prediction, ascending, and the lowest that each can be."""
    known = [
        float(block.probes[name][row]) if name in block.probes else np.nan
        for name in ("labels_counted", "classes", "largest_class", "smallest_class")
    ]
    if not np.isfinite(known).all() or known[0] <= 0:
        return None
    counted, classes, largest, smallest = known
    if classes < 2:
        return (), ()
    most, fewest, others = largest / counted, smallest / counted, int(classes) - 2
    rest = max(0.0, counted - largest - smallest) / counted
    alike = np.full(others, rest / max(1, others))
    apart = np.full(others, fewest)
    if most > fewest:
        many = min(others, int(max(0.0, rest - others * fewest) / (most - fewest)))
        apart[:many] = most
        if many < others:
            apart[many] = max(fewest, rest - apart.sum() + apart[many])
    ends = [most, fewest]
    return _guessed(np.array([*ends, *alike])), _guessed(np.array([*ends, *apart]))


def _guessed(shares: Floats) -> tuple[float, ...]:
    """Squared error as a mean over classes, squared error, cross-entropy: ascending, since ``-log p >= 1 - p``."""
    classes, shares = len(shares), shares[shares > 0]
    squared = float(1 - (shares**2).sum())
    return squared / classes, squared, float(-(shares * np.log(shares)).sum())


_CROSS_ENTROPIES = ("NllLoss", "NllLoss2D", "CrossEntropyLoss")
_OF_TWO_CLASSES = ("BinaryCrossEntropy", "BinaryCrossEntropyWithLogits")
_SQUARED = "MseLoss"


def own_baseline(losses: tuple[float, ...] | None, function: str) -> int | None:
    """Which of the baselines is that of a loss, by the function that computes it; None where none is.

    Args:
        losses: as `at` gives them.
        function: as `TensorInfo.module_type` has it; empty where it is not known. Then labels that are classes are taken to
            be learnt by cross-entropy, as they nearly always are.
    """
    if not losses:
        return None
    if len(losses) == 1:
        return 0 if function in (_SQUARED, "") else None
    if function in _OF_TWO_CLASSES:
        return 2 if round(losses[1] / losses[0]) == 2 else None
    if function == _SQUARED:
        return 0
    return 2 if function in (*_CROSS_ENTROPIES, "") else None


def own_baselines(known: list[tuple[float, ...] | None], function: str) -> Floats:
    """The baseline of a loss at each of some steps, by the function that computes it; NaN where there is none.

    Args:
        known: as `at` gives them.
        function: as of `own_baseline`.
    """
    places = [own_baseline(losses, function) for losses in known]
    return _picked(known, places)


def _picked(held: Sequence[tuple[float, ...] | None], places: list[int | None]) -> Floats:
    pairs = zip(held, places, strict=True)
    return np.array([each[place] if each and place is not None else np.nan for each, place in pairs])


@dataclass(frozen=True)
class AgainstLabels:
    """Levels of a loss held against what labels say of it, columns of shape (n,).

    Attributes:
        own: the loss of a constant prediction, by the function that the loss is; NaN where labels are not known, or do not tell.
        least: the lowest that it can be, by what is known of the labels.
        constant: the level is that, or where the function is not known one that it may be: within 3 %, and no more than a
            standard error below.
        above: the level is at least the highest of them; false where labels are not known.
        told: labels are not known, or differ.
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
    """Hold levels of a loss against the losses of constant predictions, one tuple for each.

    Args:
        level: of the loss, shape (n,).
        error: their standard errors, shape (n,).
        known: as `at` gives them.
        least: as `least_at` gives them.
        function: that computes the loss, as `TensorInfo.module_type` has it.
    """
    places = [own_baseline(losses, function) for losses in known]
    own, lowest = _picked(known, places), _picked(least, places)
    may_be = [
        range(len(losses or ())) if not function else () if place is None else (place,)
        for losses, place in zip(known, places, strict=True)
    ]
    highest = np.array(
        [
            (losses or ())[chosen[-1]] if chosen else np.inf
            for losses, chosen in zip(known, may_be, strict=True)
        ]
    )
    is_near = np.zeros(len(level), np.bool_)
    for row, (losses, lows, chosen) in enumerate(zip(known, least, may_be, strict=True)):
        one, off = float(level[row]), float(error[row])
        is_near[row] = any(
            max((1 - _NEAR) * lows[place], lows[place] - off) <= one <= (1 + _NEAR) * losses[place]
            for place in chosen
            if losses
        )
    told = [losses is None or bool(losses) for losses in known]
    return AgainstLabels(own, lowest, is_near, level >= (1 - _NEAR) * highest, np.array(told, np.bool_))
