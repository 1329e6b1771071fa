"""What a loss is worth that does no better than to say the same for every example, from the labels that were recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from watchstep.block import Block
from watchstep.statistics import Floats
from watchstep_rules.contract import State
from watchstep_rules.figures.chosen_tensors import has_role, rows_where

_ENOUGH = 32
_NEAR = 0.03
_BATCHES = 8
_EXAMPLES = 8
_WITHIN = 0.2


class Baselines(NamedTuple):
    """Losses of the best constant prediction, for the usual kinds of loss.

    Attributes:
        step: from which on these hold.
        losses: ascending; empty where labels are all alike, so that they cannot be what is learnt.
        in_order: whether batches come sorted by label.
    """

    step: int
    losses: tuple[float, ...]
    in_order: bool = False


class LabelState(State):
    """Labels so far: how many measured ones, their mean and sum of squared deviations; and the last figures made of any.

    Also how many batches these came in, and their squared deviations from the means of their batches.
    """

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0
    names: tuple[str, ...] = ()
    last: tuple[float, ...] | None = None
    batches: int = 0
    within: float = 0.0

    @property
    def in_order(self) -> bool:
        """Whether labels differ between batches, and within them hardly do.

        Of labels that were shuffled the share of deviations within batches of n is ``1 - 1/n``, however rare a class is.
        """
        enough = self.batches >= _BATCHES and self.count >= _EXAMPLES * self.batches
        return enough and self.m2 > 0 and self.within <= _WITHIN * self.m2


def follow(state: LabelState, block: Block) -> tuple[LabelState, list[Baselines]]:
    """Follow the labels of a block, those of the first worker that has any at each step.

    Of k classes with shares p: cross-entropy ``-sum p log p``, and squared error against one-hot labels, summed or averaged
    over classes. Of measured targets: their variance, the squared error. Nothing where several tensors are recorded as
    labels, or whole numbers that were not counted, as tokens are. The shares of the largest and the smallest class are known, the others are taken as alike.

    Returns:
        The state afterwards, and the baselines of each step with labels, ascending; first what the state had.
    """
    found = [] if state.last is None else [Baselines(-1, state.last, state.in_order)]
    rows = np.flatnonzero(rows_where(block, has_role, "label"))
    done = -1
    for row in map(int, rows[np.argsort(block.step[rows], kind="stable")]):
        step = int(block.step[row])
        if block.mode_name(row) not in ("train", "global") or step == done:
            continue
        done = step
        state = _with(state, block, row)
        if state.last is not None:
            found.append(Baselines(step, state.last, state.in_order))
    return state, found


def at(found: list[Baselines], steps: NDArray[np.int64]) -> list[tuple[float, ...] | None]:
    """The baselines that hold at each of some steps; None where labels are not known."""
    return [found[place].losses if place >= 0 else None for place in _places(found, steps)]


def in_order_at(found: list[Baselines], steps: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether batches come sorted by label, as far as is known at each of some steps."""
    return np.array([place >= 0 and found[place].in_order for place in _places(found, steps)], np.bool_)


def _places(found: list[Baselines], steps: NDArray[np.int64]) -> list[int]:
    places: list[int] = (np.searchsorted([each.step for each in found], steps, side="right") - 1).tolist()
    return places


def _with(state: LabelState, block: Block, row: int) -> LabelState:
    names = tuple(sorted({*state.names, block.info(row).name}))
    held = block.statistics
    count = int(held.finite[row])
    if len(names) > 1 or not count:
        return LabelState(names=names) if len(names) > 1 else state
    total = state.count + count
    apart = float(held.mean[row]) - state.mean
    mean = state.mean + apart * count / total
    m2 = state.m2 + float(held.m2[row]) + apart * apart * state.count * count / total
    classes = _of_classes(block, row)
    measured = None if "int" in block.info(row).dtype else (m2 / total,) if m2 > 0 else ()
    last = measured if classes is None else classes
    return LabelState(
        count=total,
        mean=mean,
        m2=m2,
        names=names,
        last=last if total >= _ENOUGH and last is not None else state.last,
        batches=state.batches + 1,
        within=state.within + float(held.m2[row]),
    )


def _of_classes(block: Block, row: int) -> tuple[float, ...] | None:
    known = [
        float(block.probes[name][row]) if name in block.probes else np.nan
        for name in ("labels_counted", "classes", "largest_class", "smallest_class")
    ]
    if not np.isfinite(known).all() or known[0] <= 0:
        return None
    counted, classes, largest, smallest = known
    if classes < 2:
        return ()
    shares = np.array([largest, smallest]) / counted
    if classes > 2:
        rest = max(0.0, counted - largest - smallest) / counted / (classes - 2)
        shares = np.concatenate([shares, np.full(int(classes) - 2, rest)])
    shares = shares[shares > 0]
    squared = float(1 - (shares**2).sum())
    return tuple(sorted((float(-(shares * np.log(shares)).sum()), squared, squared / classes)))


@dataclass(frozen=True)
class AgainstLabels:
    """Levels of a loss held against what labels say of it, columns of shape (n,).

    Attributes:
        lowest: the lowest loss of a constant prediction, zero where labels are not known.
        constant: the level is one of these losses.
        above: the level is at least the highest of them; false where labels are not known.
        told: labels are not known, or differ.
    """

    lowest: Floats
    constant: NDArray[np.bool_]
    above: NDArray[np.bool_]
    told: NDArray[np.bool_]


def against_labels(level: Floats, known: list[tuple[float, ...] | None]) -> AgainstLabels:
    """Hold levels against the losses of constant predictions, one tuple for each."""
    lowest = np.array([losses[0] if losses else 0.0 for losses in known])
    highest = np.array([losses[-1] if losses else np.inf for losses in known])
    pairs = zip(level.tolist(), known, strict=True)
    near = [any(abs(one - loss) <= _NEAR * loss for loss in losses or ()) for one, losses in pairs]
    told = [losses is None or bool(losses) for losses in known]
    return AgainstLabels(
        lowest, np.array(near, np.bool_), level >= (1 - _NEAR) * highest, np.array(told, np.bool_)
    )
