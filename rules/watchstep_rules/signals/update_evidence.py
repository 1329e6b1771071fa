"""Evidence about optimizer updates: whether an update was applied, and which parameters are in no optimizer.

A loss or a gradient that is not finite causes no damage if its update is skipped. The message of an alert then states this with the
step, from rows of that step and worker: metrics of the gradient scaler and of the gate, gradients and weights.
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
        elements: total number of elements; 0 if none is known.
        first: the first weighted layer among them, by the order of layers; -1 if none is known.
    """

    elements: int = 0
    first: int = -1

    def with_updates(self, block: Block, rows: list[int]) -> OptimizedWeights:
        """Add the updates of a step. With several optimizers the step with the most elements counts."""
        infos = {block.info(row).name: block.info(row) for row in rows}
        elements = sum(int(np.prod(info.shape)) for info in infos.values())
        orders = [info.order for info in infos.values() if is_weighted(info) and len(info.shape) > 1]
        first = min([*orders, *([self.first] if self.first >= 0 else [])], default=-1)
        return OptimizedWeights(max(self.elements, elements), first)


def forgotten(block: Block, rows: NDArray[np.intp], optimized: OptimizedWeights) -> list[int]:
    """Parameters of a step that are in no optimizer by mistake.

    Candidates get a gradient and have not changed since they were first measured. If no optimizer has any parameter of the model, all
    candidates are reported. Otherwise only weighted layers after the first optimized layer are, and only if a quarter or more of the
    elements are optimized: tuning a prompt, an adapter or a head excludes most of a model on purpose, and so does freezing its first
    layers.

    Args:
        block: the rows.
        rows: the rows of one step.
        optimized: the weights that optimizers update.
    """
    changed = block.probes.get("changed")
    if changed is None:
        return []
    candidates = [
        row
        for row in map(int, rows)
        if block.info(row).role == "not_in_optimizer"
        and len(block.info(row).shape) > 1
        and block.statistics.abs_sum[row] > 0
        and changed[row] == 0
    ]
    if not optimized.elements:
        return candidates
    elements = sum(int(np.prod(block.info(row).shape)) for row in candidates)
    if optimized.elements < _PART * (optimized.elements + elements) or optimized.first < 0:
        return []
    return [
        row for row in candidates if is_weighted(block.info(row)) and block.info(row).order > optimized.first
    ]


APPLIED = "gradients:nonfinite_applied"
"""Metric of the gate: 1 if an update applies a gradient that is not finite, 0 if the optimizer skipped it."""

MISSING = "updates:missing"
"""Metric of the gate: training steps in a row without a finite update."""

SKIPPED = "gradient_scaler:skipped"
"""Metric of a gradient scaler: recorded at steps that it skips."""

_TRAIN = MODES.index("train")
_STATE = ("weight", "bias", "finite_check")


class UpdateEvidence:
    """Evidence about the updates of a block's training steps, from rows of metrics, gradients, weights and biases."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self._bad = nonfinite(block)
        self._step_of = sort_key(block.step, block.worker)
        rows = np.flatnonzero(
            rows_where(block, has_role, "metric", "gradient", *_STATE) & (block.mode == _TRAIN)
        )
        self._rows = rows[np.argsort(self._step_of[rows], kind="stable")]
        self._steps = self._step_of[self._rows]
        self._cache: dict[int, str] = {}
        self._is = {name: rows_where(block, is_metric, name) for name in (APPLIED, MISSING, SKIPPED)}

    def words(self, row: int) -> str:
        """Evidence against damage at the step and worker of a row, as a suffix of a finding's message; empty if there is none."""
        if self._block.mode[row] != _TRAIN:
            return ""
        key = int(self._step_of[row])
        if key not in self._cache:
            start, end = (np.searchsorted(self._steps, key, side=side) for side in ("left", "right"))
            self._cache[key] = self._words(int(self._block.step[row]), self._rows[start:end])
        return self._cache[key]

    def annotate(self, finding: Finding, row: int) -> Finding:
        """The finding of a row with this evidence in its message."""
        words = self.words(row)
        return finding.model_copy(update={"message": finding.message + words}) if words else finding

    def _words(self, step: int, rows: NDArray[np.intp]) -> str:
        update = self._update(step, rows)
        state = [row for row in rows.tolist() if self._block.info(row).role in _STATE]
        if update and state and not self._bad[state].any():
            update += ", and the recorded weights are finite"
        return update

    def _update(self, step: int, rows: NDArray[np.intp]) -> str:
        applied, missing, skipped = (self._values(rows, name) for name in (APPLIED, MISSING, SKIPPED))
        gradients = [row for row in rows.tolist() if self._block.info(row).role == "gradient"]
        if any(value > 0 for value in applied):
            return ""
        if skipped:
            skipped_part = f"an update at step {step}" if gradients else f"step {step}"
            return f"; the gradient scaler skipped {skipped_part}"
        is_bad = bool(gradients) and bool(self._bad[gradients].any())
        if applied and is_bad:
            return f"; the optimizer did not apply the gradients of step {step}"
        if missing and not gradients and not applied and min(missing) > 0:
            return f"; no finite update was recorded at step {step}"
        if missing and gradients and not is_bad and max(missing) == 0:
            return f"; the update of step {step} was made with finite gradients"
        return ""

    def _values(self, rows: NDArray[np.intp], name: str) -> list[float]:
        chosen = rows[self._is[name][rows]]
        values: list[float] = self._block.statistics.mean[chosen].tolist()
        return values
