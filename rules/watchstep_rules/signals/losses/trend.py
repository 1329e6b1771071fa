"""Whether a series falls over all of its past, with how much confidence: what tells slow progress from none."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from watchstep.format.block import Block
from watchstep.format.tensors import TensorInfo
from watchstep_rules.signals.losses.loss_series import kind_of, loss_series
from watchstep_rules.signals.tensor_selection import rows_where

_LEAST = 10
_IMPROVES = 3.0
"""Standard errors by which a metric must have improved: one series in 700 does so by chance."""
_LEAST_SHARE = 0.05
"""Share of its first value by which it must have improved: an evaluation has so little noise that any step shows in it."""
_RISES_WHEN_BETTER = ("acc", "auc", "bleu", "f1", "margin", "reward", "return", "rouge", "score", "success")
"""Beginnings of words in the names of metrics of which more is better."""


class Trend(NamedTuple):
    """A straight line through all finite values so far, by least squares, against the scatter from value to value.

    Attributes:
        seen: finite values so far.
        first: the first one; sums are of distances from it.
        last: the last one.
        total: sum of the values.
        weighted: sum of ``i * value``, i from 0.
        rough: sum of squared differences of neighbours.
    """

    seen: int = 0
    first: float = 0.0
    last: float = 0.0
    total: float = 0.0
    weighted: float = 0.0
    rough: float = 0.0

    def after(self, value: float) -> Trend:
        """With one more value; one that is not finite is left out."""
        if not math.isfinite(value):
            return self
        if self.seen == 0:
            return Trend(1, value, value)
        apart, step = value - self.first, value - self.last
        return Trend(
            self.seen + 1,
            self.first,
            value,
            self.total + apart,
            self.weighted + self.seen * apart,
            self.rough + step * step,
        )

    @property
    def noise(self) -> float:
        """Standard deviation from value to value: ``rms(difference) / sqrt(2)`` (von Neumann, 1941)."""
        return math.sqrt(self.rough / (2 * max(1, self.seen - 1)))

    @property
    def fall(self) -> float:
        """By how much the line falls from the first value to the last; 0 of fewer than ten."""
        if self.seen < _LEAST:
            return 0.0
        middle = (self.seen - 1) / 2
        slope = (self.weighted - middle * self.total) / (self.seen * (self.seen**2 - 1) / 12)
        return -slope * self.seen

    @property
    def error(self) -> float:
        """Standard error of `fall`, were values independent; infinite of fewer than ten."""
        return self.noise * math.sqrt(12 / self.seen) if self.seen >= _LEAST else math.inf

    @property
    def confidence(self) -> float:
        """`fall` in standard errors; 0 where nothing moves."""
        fall, error = self.fall, self.error
        if error == 0:
            return math.copysign(math.inf, fall) if fall else 0.0
        return fall / error


def improvement(
    kept: dict[str, Trend], since: int | None, context: Block, block: Block
) -> tuple[dict[str, Trend], int | None]:
    """Follow what else a program records of its progress: metrics of which more is better, and validation losses.

    Args:
        kept: of each series, as the last call returned it.
        since: as the last call returned it, None at first.
        context: earlier rows.
        block: rows to follow.

    Returns:
        What is to be kept; and the first step at which some series had improved over all of its past, by three standard errors and
        by a twentieth of its first value.
    """
    trends = dict(kept)
    for key, at, values in [*better_high(block), *_validation(context, block)]:
        trend = trends.get(key, Trend())
        for step, value in zip(at, values, strict=True):
            trend = trend.after(value)
            if trend.confidence >= _IMPROVES and trend.fall >= _LEAST_SHARE * abs(trend.first):
                since = step if since is None else min(since, step)
        trends[key] = trend
    return trends, since


def better_high(block: Block, *, validation: bool = False) -> list[tuple[str, list[int], list[float]]]:
    """Metrics of which more is better, with the sign turned around.

    Args:
        block: rows to look through.
        validation: those of validation only.

    Returns:
        Of each its ``name/mode``, its steps and its values there, at each step of the lowest worker that has any.
    """
    chosen = np.flatnonzero(rows_where(block, _is_better_high) & (block.statistics.finite > 0))
    if validation:
        evaluated = [kind_of(block.info(row).name, block.mode_name(row)) == "eval" for row in chosen.tolist()]
        chosen = chosen[np.array(evaluated, np.bool_)]
    if not len(chosen):
        return []
    chosen = chosen[np.lexsort((block.worker[chosen], block.step[chosen]))]
    by_key: dict[str, tuple[list[int], list[float]]] = {}
    for row in chosen.tolist():
        key = f"{block.info(row).name}/{block.mode_name(row)}"
        steps, values = by_key.setdefault(key, ([], []))
        if not steps or steps[-1] != int(block.step[row]):
            steps.append(int(block.step[row]))
            values.append(-float(block.statistics.mean[row]))
    return [(key, *by_key[key]) for key in sorted(by_key)]


def _validation(context: Block, block: Block) -> list[tuple[str, list[int], list[float]]]:
    return [
        (series.key, series.steps.tolist(), series.values.tolist())
        for series in loss_series(context, block, "eval")
    ]


def _is_better_high(info: TensorInfo) -> bool:
    words = info.name.lower().replace("/", "_").replace(".", "_").replace("-", "_").split("_")
    return info.role == "metric" and any(word.startswith(_RISES_WHEN_BETTER) for word in words)


def as_flags(since: int | None, steps: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each of some steps is at or after one; false where there is none."""
    return np.zeros(len(steps), np.bool_) if since is None else steps >= since
