"""Losses as series: one for each name, with statistics over the last values, and the trend with its confidence."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from watchstep.format.block import Block
from watchstep.format.statistics import Floats
from watchstep.format.tensors import TensorInfo
from watchstep_rules.signals.tensor_selection import has_role, rows_where

Kind = Literal["train", "eval"]
_VALIDATION = re.compile(
    r"(val|vali|valid|validate|validating|validation|validator|eval|evaluate|evaluation|test|testing|dev|development)"
    r"s?(loss|losses|set|data)?"
)
"""Whole words, so that the ``value_loss`` of a critic is a training loss."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_WHOLE = ("loss", "train_loss", "total_loss", "loss_total")
_NUMBERED = re.compile(r"loss_\d+")
_POLICY = frozenset({"policy", "actor", "pg", "surrogate"})
"""Words of the name of a policy's loss. Its sum with a value's error measures no progress: errors grow as returns do."""
_ROWS_AT_ONCE = 4096
NOTHING = 1e-6
"""A first loss so small sets no threshold: of a loss of about 1 it is what float32 rounds away, and what grows from it grew from nothing."""
_KEPT_NUMBERS = 1 << 16
"""So many numbers of windows are kept for the next figure of the same width, as in a run that goes on."""


@dataclass(frozen=True)
class LossSeries:
    """One loss; at each step that of the lowest worker that recorded it.

    Attributes:
        key: ``name/mode``.
        name: the loss's.
        function: that computes it, as `TensorInfo.module_type` has it; empty where it is not known.
        derived: it was found at ``backward()``, and named by its place among those found: the first is ``loss``.
        rows: its rows in the block, int64 of shape (n,).
        steps: their steps, int64 of shape (n,).
        values: their losses, float64 of shape (n,); NaN where any element was not finite.
        before: the losses that the context holds, oldest first.
    """

    key: str
    name: str
    function: str
    derived: bool
    rows: NDArray[np.intp]
    steps: NDArray[np.int64]
    values: Floats
    before: Floats
    _windows: dict[int, Floats] = field(default_factory=dict, repr=False, compare=False)

    def trailing(self, width: int, figure: Callable[[Floats], Floats]) -> Floats:
        """A figure of the last ``width`` losses at each row, the row's own included; NaN where there are fewer.

        Args:
            width: how many losses; the rule's lookback must be at least that, less one.
            figure: of a matrix of shape (rows, width), one number for each row.
        """
        with np.errstate(all="ignore"):
            if len(self.values) * width <= _KEPT_NUMBERS:
                if width not in self._windows:
                    self._windows[width] = next(self._parts(width))
                return figure(self._windows[width])
            return np.concatenate([figure(windows) for windows in self._parts(width)])

    def _parts(self, width: int) -> Iterator[Floats]:
        """The windows of rows after rows; not to be changed."""
        lacking = max(0, width - 1 - len(self.before))
        padded = np.concatenate(
            [np.full(lacking, np.nan), self.before[len(self.before) + lacking - width + 1 :], self.values]
        )
        # Copied, so that sums run in the same order however many rows there are: findings must not depend on the split.
        for first in range(0, len(self.values), _ROWS_AT_ONCE):
            starts = np.arange(first, min(first + _ROWS_AT_ONCE, len(self.values)))
            yield padded[starts[:, None] + np.arange(width)]


def loss_series(context: Block, block: Block, kind: Kind) -> list[LossSeries]:
    """The losses in a block, by key.

    Args:
        context: earlier rows.
        block: rows to judge.
        kind: of training: those in modes train and global; or of validation: those in mode eval, and in any mode where a
            word of the name says so (``val_loss``, ``loss/validation``, ``testLoss``, but not ``value_loss``).
    """
    past = _by_key(context, kind)
    return [
        LossSeries(
            key=key,
            name=block.info(int(rows[0])).name,
            function=block.info(int(rows[0])).module_type,
            derived=block.info(int(rows[0])).derived,
            rows=rows,
            steps=block.step[rows],
            values=_losses(block, rows),
            before=_losses(context, past[key]) if key in past else np.empty(0),
        )
        for key, rows in sorted(_by_key(block, kind).items())
    ]


def _losses(block: Block, rows: NDArray[np.intp]) -> Floats:
    statistics = block.statistics
    nonfinite = statistics.nan[rows] + statistics.pos_inf[rows] + statistics.neg_inf[rows]
    whole = (statistics.count[rows] > nonfinite) & (nonfinite == 0)
    return np.where(whole, statistics.mean[rows], np.nan)


def _by_key(block: Block, kind: Kind) -> dict[str, NDArray[np.intp]]:
    chosen = np.flatnonzero(rows_where(block, has_role, "loss"))
    if not len(chosen):
        return {}
    series = (block.tensor[chosen].astype(np.int64) << 32) | block.mode[chosen]
    found = {}
    for number in sorted(set(series.tolist())):
        rows = chosen[series == number]
        name, mode = block.info(int(rows[0])).name, block.mode_name(int(rows[0]))
        if kind_of(name, mode) == kind:
            found[f"{name}/{mode}"] = _first_of_each_step(block, rows)
    return found


def _first_of_each_step(block: Block, rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """Rows by step, of each the lowest worker's."""
    step = block.step[rows]
    if bool((step[1:] > step[:-1]).all()):
        return rows
    rows = rows[np.lexsort((block.worker[rows], step))]
    return rows[np.unique(block.step[rows], return_index=True)[1]]


@functools.lru_cache(maxsize=4096)
def kind_of(name: str, mode: str) -> Kind | None:
    """Whether a loss or metric is of training or of validation, by the mode and the words of its name; None of predictions."""
    if mode == "predict":
        return None
    words = (word.lower() for word in _WORD.findall(name))
    return "eval" if mode == "eval" or any(map(_VALIDATION.fullmatch, words)) else "train"


def first_steps(known: Mapping[str, int], series: list[LossSeries]) -> dict[str, int]:
    """The step at which each loss was first seen, by name, those of earlier blocks included."""
    steps = dict(known)
    for one in series:
        steps[one.name] = min(steps.get(one.name, int(one.steps[0])), int(one.steps[0]))
    return steps


def is_whole(series: LossSeries, known: Mapping[str, int]) -> NDArray[np.bool_]:
    """At which rows a loss is what the program as a whole makes smaller.

    Of several losses that is the one whose name says so: the parts of a sum, and the two sides of a game (GAN), need not
    fall. A loss that was found at ``backward()`` and named ``loss`` as the first of several was not named by anybody. A sum of which
    a policy's loss is a part (``policy_loss``, ``actor_loss``, ``pg_loss``) is not it either: what is made smaller depends on returns.

    Args:
        series: the loss.
        known: as `first_steps` gives it.
    """
    others = [step for name, step in known.items() if name != series.name]
    if series.name.rpartition("/")[2].lower() in _WHOLE:
        others = [
            step
            for name, step in known.items()
            if is_of_a_policy(name) or (series.derived and _NUMBERED.fullmatch(name))
        ]
    return series.steps < min(others, default=np.iinfo(np.int64).max)


def is_of_a_policy(name: str) -> bool:
    """Whether a loss is named as that of a policy: ``policy_loss``, ``losses/pg_loss``, ``actorLoss``.

    A program that has one learns by reinforcement, where losses do not tell how good the model is.
    """
    return any(word.lower() in _POLICY for word in _WORD.findall(name))


def noise(windows: Floats) -> Floats:
    """Standard deviation from loss to loss, what changes slowly left out: ``rms(difference) / sqrt(2)`` (von Neumann, 1941).

    Args:
        windows: shape (rows, width), width at least 2.
    """
    spread: Floats = np.sqrt(np.mean(np.diff(windows, axis=1) ** 2, axis=1) / 2)
    return spread


def falls(windows: Floats) -> Floats:
    """1 where the mean of the second half is below that of the first by more than two standard errors, from differences of neighbours; else 0.

    Args:
        windows: shape (rows, width), width at least 2.
    """
    half = windows.shape[1] // 2
    fall = windows[:, :half].mean(axis=1) - windows[:, half:].mean(axis=1)
    return np.where(fall > 2 * noise(windows) * np.sqrt(2 / half), 1.0, 0.0)


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
