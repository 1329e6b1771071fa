"""Evidence about optimizer updates: whether an update was applied, and which parameters no optimizer holds.

A loss or a gradient that is not finite causes no damage if its update is skipped. The message of an alert says so and names the step,
from rows of that step and worker: metrics of the gradient scaler and of the gate, gradients and weights.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from watchstep.format.block import Block, sort_key
from watchstep.format.tensors import MODES
from watchstep_rules.rule import Finding, is_metric
from watchstep_rules.signals.nonfinite import nonfinite
from watchstep_rules.signals.tensor_selection import has_role, is_weighted, rows_where

_PART = 0.25


class OptimizedWeights(NamedTuple):
    """The weights that optimizers update.

    Attributes:
        elements: of all of them together; 0 where none is known.
        first: the place of the first weighted layer among them, in the order of layers.
    """

    elements: int = 0
    first: int = -1

    def with_updates(self, block: Block, rows: list[int]) -> OptimizedWeights:
        """With the updates of a step; of several optimizers the largest step counts."""
        infos = {block.info(row).name: block.info(row) for row in rows}
        elements = sum(int(np.prod(info.shape)) for info in infos.values())
        orders = [info.order for info in infos.values() if is_weighted(info) and len(info.shape) > 1]
        first = min([*orders, *([self.first] if self.first >= 0 else [])], default=-1)
        return OptimizedWeights(max(self.elements, elements), first)


def forgotten(block: Block, rows: NDArray[np.intp], held: OptimizedWeights) -> list[int]:
    """Which of a step's parameters in no optimizer their author forgot.

    They get a gradient and have not changed since they were first looked at. Where no optimizer holds anything of the
    model, these are all. Where one does, weighted layers are forgotten that come after one that learns, and only if what
    is held is a quarter of all or more: who tunes a prompt, an adapter or a head leaves out most of a model on purpose, and
    who leaves out its beginning too.

    Args:
        block: the rows.
        rows: of one step.
        held: what optimizers hold.
    """
    changed = block.probes.get("changed")
    if changed is None:
        return []
    left = [
        row
        for row in map(int, rows)
        if block.info(row).role == "not_in_optimizer"
        and len(block.info(row).shape) > 1
        and block.statistics.abs_sum[row] > 0
        and changed[row] == 0
    ]
    if not held.elements:
        return left
    elements = sum(int(np.prod(block.info(row).shape)) for row in left)
    if held.elements < _PART * (held.elements + elements) or held.first < 0:
        return []
    return [row for row in left if is_weighted(block.info(row)) and block.info(row).order > held.first]


APPLIED = "gradients:nonfinite_applied"
"""Metric of the gate: 1 where an update applies a gradient that is not finite, 0 where the optimizer left it out."""

MISSING = "updates:missing"
"""Metric of the gate: training steps in a row without a finite update."""

SKIPPED = "gradient_scaler:skipped"
"""Metric of a gradient scaler: recorded at steps that it leaves out."""

_TRAIN = MODES.index("train")
_STATE = ("weight", "bias", "finite_check")


class UpdateEvidence:
    """The training steps of a block, by their rows of metrics, gradients, weights and biases."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self._bad = nonfinite(block)
        self._step_of = sort_key(block.step, block.worker)
        rows = np.flatnonzero(
            rows_where(block, has_role, "metric", "gradient", *_STATE) & (block.mode == _TRAIN)
        )
        self._rows = rows[np.argsort(self._step_of[rows], kind="stable")]
        self._steps = self._step_of[self._rows]
        self._known: dict[int, str] = {}
        self._is = {name: rows_where(block, is_metric, name) for name in (APPLIED, MISSING, SKIPPED)}

    def words(self, row: int) -> str:
        """What speaks against damage at the step and worker of a row; to follow a finding's message. Empty where nothing does."""
        if self._block.mode[row] != _TRAIN:
            return ""
        place = int(self._step_of[row])
        if place not in self._known:
            start, end = (np.searchsorted(self._steps, place, side=side) for side in ("left", "right"))
            self._known[place] = self._words(int(self._block.step[row]), self._rows[start:end])
        return self._known[place]

    def said_with(self, finding: Finding, row: int) -> Finding:
        """The finding about a row, with these words in its message."""
        words = self.words(row)
        return finding.model_copy(update={"message": finding.message + words}) if words else finding

    def _words(self, step: int, rows: NDArray[np.intp]) -> str:
        said = self._said(step, rows)
        state = [row for row in rows.tolist() if self._block.info(row).role in _STATE]
        if said and state and not self._bad[state].any():
            said += ", and the recorded weights are finite"
        return said

    def _said(self, step: int, rows: NDArray[np.intp]) -> str:
        applied, missing, skipped = (self._values(rows, name) for name in (APPLIED, MISSING, SKIPPED))
        gradients = [row for row in rows.tolist() if self._block.info(row).role == "gradient"]
        if any(value > 0 for value in applied):
            return ""
        if skipped:
            what = f"an update at step {step}" if gradients else f"step {step}"
            return f"; the gradient scaler skipped {what}"
        is_bad = bool(gradients) and bool(self._bad[gradients].any())
        if applied and is_bad:
            return f"; the optimizer did not apply the gradients of step {step}"
        if missing and not gradients and min(missing) > 0:
            return f"; no optimizer step was recorded at step {step}"
        if missing and gradients and not is_bad and max(missing) == 0:
            return f"; the update of step {step} was made with finite gradients"
        return ""

    def _values(self, rows: NDArray[np.intp], name: str) -> list[float]:
        chosen = rows[self._is[name][rows]]
        values: list[float] = self._block.statistics.mean[chosen].tolist()
        return values
