"""Loss curves, and runs with such a loss: with evaluations, labels and updates if a rule reads these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.rules.runs import Outcome, Rows, Watermark, follow
from tests.sdk.format.blocks import Row, block_of, tensor
from watchstep.format.block import Block
from watchstep_rules.config.rule_config import RuleConfig

Curve = NDArray[np.floating[Any]]
LOSS = tensor("loss", "losses", shape=())
LABELS = tensor("labels", "labels", shape=(16,))
UPDATE = tensor("first.weight:update", "updates", order=1)
BIAS_UPDATE = tensor("first.bias:update", "updates", order=1, shape=(8,))
EVERY = 10


def noisy(curve: Sequence[float] | Curve, share: float, seed: int = 1) -> Curve:
    """A curve with normal noise of a share of its height."""
    values = np.asarray(curve, np.float64)
    scattered: Curve = values * (1 + share * np.random.default_rng(seed).normal(size=len(values)))
    return scattered


def falling(start: float, end: float, steps: int, pace: float) -> Curve:
    """From a start towards an end, by a factor of e every ``pace`` steps."""
    curve: Curve = end + (start - end) * np.exp(-np.arange(steps) / pace)
    return curve


def chi_squared(scale: Sequence[float] | Curve, examples: int, seed: int = 0) -> Curve:
    """Squared errors of a normal variable, averaged over a batch: the noise of a regression."""
    scales = np.asarray(scale, np.float64)
    values: Curve = scales * np.random.default_rng(seed).chisquare(examples, len(scales)) / examples
    return values


def classes(counts: Sequence[int]) -> dict[str, float]:
    """Values of the label probe for so many examples of each class."""
    return {
        "labels_counted": float(sum(counts)),
        "classes": float(len(counts)),
        "largest_class": float(max(counts)),
        "smallest_class": float(min(counts)),
        "rarest_class": float(np.argmin(counts)),
    }


def run_of(
    losses: Sequence[float] | Curve,
    *,
    evaluations: Sequence[float] | Curve = (),
    labels: Sequence[int] | Curve | None = None,
    update: float | Sequence[float] | None = None,
    worker: int = 0,
    metrics: Mapping[str, Curve] | None = None,
    function: str = "",
    first_step: int = 0,
) -> Block:
    """A run: a loss a step; an evaluation every ten; labels and updates every five.

    Args:
        losses: of training.
        evaluations: validation losses.
        labels: examples of each class, or measured targets, of which each batch has all.
        update: relative update of the one weight, or one for each record.
        worker: of all rows.
        metrics: by name, one value a step.
        function: that computes the loss.
        first_step: of the run's rows.
    """
    rows: list[Row] = []
    info = replace(LOSS, module_type=function)
    for step, loss in enumerate(losses):
        rows.append(Row(step, info, [loss], worker=worker))
        rows += [
            Row(step, tensor(name, "metrics", shape=()), [values[step]], worker=worker)
            for name, values in (metrics or {}).items()
            if step < len(values)
        ]
        if step % EVERY == 0 and step // EVERY < len(evaluations):
            rows.append(Row(step, LOSS, [evaluations[step // EVERY]], "eval", worker))
        if labels is not None and step % 5 == 0:
            rows.append(_labels(step, labels, worker))
        if update is not None and step % 5 == 0:
            ratio = update if isinstance(update, float) else update[step // 5]
            rows.append(Row(step, UPDATE, [ratio], worker=worker, probes={"update_ratio": ratio}))
            rows.append(Row(step, BIAS_UPDATE, [1.0], worker=worker, probes={"update_ratio": 1.0}))
    return block_of([replace(row, step=row.step + first_step) for row in rows])


def _labels(step: int, labels: Sequence[int] | Curve, worker: int) -> Row:
    if isinstance(labels, np.ndarray):
        return Row(step, LABELS, labels.tolist(), worker=worker)
    return Row(step, LABELS, [0.0, 1.0] * 20, worker=worker, probes=classes(labels))


def in_pieces(config: RuleConfig, block: Block, cuts: Sequence[int]) -> Outcome:
    """Judge a run in pieces that end before these steps."""
    edges = [0, *sorted(cuts), int(block.step.max()) + 1]
    return follow(
        config,
        [
            [Rows(block.where((block.step >= first) & (block.step < end))), Watermark(end - 1)]
            for first, end in pairwise(edges)
            if first < end
        ],
    )
