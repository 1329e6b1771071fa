"""Losses as series by name: statistics over the last values, and the trend with its confidence."""

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
from watchstep.format.tensors import OF_PROBABILITIES, TensorInfo
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
"""Words in the names of policy losses. Their sum with a value loss does not measure progress: value errors grow with the returns."""
_ROWS_AT_ONCE = 4096
NOTHING = 1e-6
"""A first loss below this sets no threshold. It is about the rounding error of float32 for a loss of 1, so growth from it is growth from zero."""
_KEPT_NUMBERS = 1 << 16
"""Maximum number of window elements that are cached for the next statistic of the same width, as in a live run."""


@dataclass(frozen=True)
class LossSeries:
    """A loss, at each step from the lowest worker that recorded it.

    Attributes:
        key: ``name/mode``.
        name: name of the loss.
        function: function that computes it, as in `TensorInfo.module_type`; empty if unknown. One with ``-`` is negated.
        of_probabilities: whether the function expects logits or logarithms, and its input was the result of softmax or sigmoid.
        derived: whether it was found at ``backward()`` and named by its position among those found: the first is ``loss``.
        rows: its rows in the block, int64 of shape (n,).
        steps: steps of the rows, int64 of shape (n,).
        values: losses of the rows, float64 of shape (n,); NaN if any element was not finite.
        before: losses in the context, oldest first.
    """

    key: str
    name: str
    function: str
    of_probabilities: bool
    derived: bool
    rows: NDArray[np.intp]
    steps: NDArray[np.int64]
    values: Floats
    before: Floats
    _windows: dict[int, Floats] = field(default_factory=dict, repr=False, compare=False)

    def trailing(self, width: int, figure: Callable[[Floats], Floats]) -> Floats:
        """Compute a statistic of the last ``width`` losses at each row, including the row itself; NaN if there are fewer.

        Args:
            width: number of losses. The rule's lookback must be at least ``width - 1``.
            figure: maps a matrix of shape (rows, width) to one number for each row.
        """
        with np.errstate(all="ignore"):
            if len(self.values) * width <= _KEPT_NUMBERS:
                if width not in self._windows:
                    self._windows[width] = next(self._parts(width))
                return figure(self._windows[width])
            return np.concatenate([figure(windows) for windows in self._parts(width)])

    def _parts(self, width: int) -> Iterator[Floats]:
        """Yield the windows, some rows at a time. Do not modify them."""
        lacking = max(0, width - 1 - len(self.before))
        padded = np.concatenate(
            [np.full(lacking, np.nan), self.before[len(self.before) + lacking - width + 1 :], self.values]
        )
        # Copied, so that sums have the same order for any number of rows: findings must not depend on the split.
        for first in range(0, len(self.values), _ROWS_AT_ONCE):
            starts = np.arange(first, min(first + _ROWS_AT_ONCE, len(self.values)))
            yield padded[starts[:, None] + np.arange(width)]


def loss_series(context: Block, block: Block, kind: Kind) -> list[LossSeries]:
    """Return the losses in a block, by key.

    Args:
        context: earlier rows.
        block: rows to evaluate.
        kind: ``train``: losses in the modes train and global. ``eval``: losses in mode eval, and in any mode if a word of
            the name marks a validation loss (``val_loss``, ``loss/validation``, ``testLoss``, but not ``value_loss``).
    """
    past = _by_key(context, kind)
    return [
        LossSeries(
            key=key,
            name=block.info(int(rows[0])).name,
            function=block.info(int(rows[0])).module_type.removesuffix(OF_PROBABILITIES),
            of_probabilities=block.info(int(rows[0])).module_type.endswith(OF_PROBABILITIES),
            derived=block.info(int(rows[0])).derived and block.mode_name(int(rows[0])) == "train",
            rows=rows,
            steps=block.step[rows],
            values=_losses(block, key, rows),
            before=_losses(context, key, past[key]) if key in past else np.empty(0),
        )
        for key, rows in sorted(_by_key(block, kind).items())
    ]


class _LossesOfBlock:
    """Losses of a block, computed for the first rule that needs them. Arrays are read-only, because rules share them."""

    def __init__(self) -> None:
        self.rows: dict[Kind, dict[str, NDArray[np.intp]]] = {}
        self.values: dict[str, Floats] = {}


def _of_block(block: Block) -> _LossesOfBlock:
    """The losses that were computed of a block. They are stored at the block, and are freed with it."""
    attributes = vars(block)
    if _ATTRIBUTE not in attributes:
        attributes[_ATTRIBUTE] = _LossesOfBlock()
    found: _LossesOfBlock = attributes[_ATTRIBUTE]
    return found


_ATTRIBUTE = "_loss_series"


def _losses(block: Block, key: str, rows: NDArray[np.intp]) -> Floats:
    """The values of a loss, read-only."""
    cached = _of_block(block).values
    if key not in cached:
        cached[key] = _read_losses(block, rows)
        cached[key].flags.writeable = False
    return cached[key]


def _read_losses(block: Block, rows: NDArray[np.intp]) -> Floats:
    statistics = block.statistics
    nonfinite = statistics.nan[rows] + statistics.pos_inf[rows] + statistics.neg_inf[rows]
    is_finite = (statistics.count[rows] > nonfinite) & (nonfinite == 0)
    return np.where(is_finite, statistics.mean[rows], np.nan)


def _by_key(block: Block, kind: Kind) -> dict[str, NDArray[np.intp]]:
    cached = _of_block(block).rows
    if kind not in cached:
        cached[kind] = _rows_by_key(block, kind)
    return cached[kind]


def _rows_by_key(block: Block, kind: Kind) -> dict[str, NDArray[np.intp]]:
    chosen = np.flatnonzero(rows_where(block, has_role, "loss"))
    if not len(chosen):
        return {}
    series = (block.tensor[chosen].astype(np.int64) << 32) | block.mode[chosen]
    rows_by_key = {}
    for number in sorted(set(series.tolist())):
        rows = chosen[series == number]
        name, mode = block.info(int(rows[0])).name, block.mode_name(int(rows[0]))
        if kind_of(name, mode) == kind:
            rows_by_key[f"{name}/{mode}"] = _first_of_each_step(block, rows)
    return rows_by_key


def _first_of_each_step(block: Block, rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the row of the lowest worker at each step, by step."""
    step = block.step[rows]
    if bool((step[1:] > step[:-1]).all()):
        return rows
    rows = rows[np.lexsort((block.worker[rows], step))]
    return rows[np.unique(block.step[rows], return_index=True)[1]]


@functools.lru_cache(maxsize=4096)
def kind_of(name: str, mode: str) -> Kind | None:
    """Return whether a loss or metric belongs to training or validation, by mode and words of its name; None for predictions."""
    if mode == "predict":
        return None
    words = (word.lower() for word in _WORD.findall(name))
    return "eval" if mode == "eval" or any(map(_VALIDATION.fullmatch, words)) else "train"


def first_steps(known: Mapping[str, int], series: list[LossSeries]) -> dict[str, int]:
    """Return the first step of each loss by name, including earlier blocks."""
    steps = dict(known)
    for loss in series:
        steps[loss.name] = min(steps.get(loss.name, int(loss.steps[0])), int(loss.steps[0]))
    return steps


def is_whole(series: LossSeries, known: Mapping[str, int]) -> NDArray[np.bool_]:
    """Return at which rows a loss is the total loss that the program minimizes.

    Of several losses, it is the one with a corresponding name: the parts of a sum, and the two sides of a game (GAN), need
    not fall. A loss that was found at ``backward()`` and named ``loss`` as the first of several was not named by the user. A sum
    that includes a policy loss (``policy_loss``, ``actor_loss``, ``pg_loss``) does not count either: the minimum depends on returns.

    Args:
        series: the loss.
        known: first steps from `first_steps`.
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
    """Return whether a loss has the name of a policy loss: ``policy_loss``, ``losses/pg_loss``, ``actorLoss``.

    Such a program does reinforcement learning, where losses do not measure the quality of the model.
    """
    return any(word.lower() in _POLICY for word in _WORD.findall(name))


def noise(windows: Floats) -> Floats:
    """Return the standard deviation from loss to loss, without slow changes: ``rms(difference) / sqrt(2)`` (von Neumann, 1941).

    Args:
        windows: shape (rows, width), width at least 2.
    """
    spread: Floats = np.sqrt(np.mean(np.diff(windows, axis=1) ** 2, axis=1) / 2)
    return spread


def falls(windows: Floats) -> Floats:
    """Return 1 if the mean of the second half is below that of the first by over two standard errors (from differences of neighbours), else 0.

    Args:
        windows: shape (rows, width), width at least 2.
    """
    half = windows.shape[1] // 2
    fall = windows[:, :half].mean(axis=1) - windows[:, half:].mean(axis=1)
    return np.where(fall > 2 * noise(windows) * np.sqrt(2 / half), 1.0, 0.0)


_LEAST = 10
_IMPROVES = 3.0
"""Standard errors by which a metric must improve: one series in 700 does so by chance."""
_LEAST_SHARE = 0.05
"""Share of its first value by which a metric must improve: an evaluation has so little noise that any step is significant."""
_RISES_WHEN_BETTER = ("acc", "auc", "bleu", "f1", "margin", "reward", "return", "rouge", "score", "success")
"""Prefixes of words in the names of metrics for which higher is better."""


class Trend(NamedTuple):
    """A least-squares line through all finite values so far, and the noise from value to value.

    Attributes:
        seen: number of finite values so far.
        first: first value; sums are of distances from it.
        last: last value.
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
        """Add a value. Nonfinite values are ignored."""
        if not math.isfinite(value):
            return self
        if self.seen == 0:
            return Trend(1, value, value)
        distance, step = value - self.first, value - self.last
        return Trend(
            self.seen + 1,
            self.first,
            value,
            self.total + distance,
            self.weighted + self.seen * distance,
            self.rough + step * step,
        )

    @property
    def noise(self) -> float:
        """Standard deviation from value to value: ``rms(difference) / sqrt(2)`` (von Neumann, 1941)."""
        return math.sqrt(self.rough / (2 * max(1, self.seen - 1)))

    @property
    def fall(self) -> float:
        """Fall of the line from the first value to the last; 0 for fewer than ten values."""
        if self.seen < _LEAST:
            return 0.0
        middle = (self.seen - 1) / 2
        slope = (self.weighted - middle * self.total) / (self.seen * (self.seen**2 - 1) / 12)
        return -slope * self.seen

    @property
    def error(self) -> float:
        """Standard error of `fall` for independent values; infinite for fewer than ten values."""
        return self.noise * math.sqrt(12 / self.seen) if self.seen >= _LEAST else math.inf

    @property
    def confidence(self) -> float:
        """`fall` in standard errors; 0 for constant values."""
        fall, error = self.fall, self.error
        if error == 0:
            return math.copysign(math.inf, fall) if fall else 0.0
        return fall / error


def improvement(
    kept: dict[str, Trend], since: int | None, context: Block, block: Block
) -> tuple[dict[str, Trend], int | None]:
    """Follow other measures of progress: metrics for which higher is better, and validation losses.

    Args:
        kept: trend of each series, from the last call.
        since: step from the last call, None at first.
        context: earlier rows.
        block: rows to follow.

    Returns:
        The trends for the next call; and the first step at which some series had improved over its whole past, by three standard
        errors and by a twentieth of its first value.
    """
    trends = dict(kept)
    for key, steps, values in [*better_high(block), *_validation(context, block)]:
        trend = trends.get(key, Trend())
        for step, value in zip(steps, values, strict=True):
            trend = trend.after(value)
            if trend.confidence >= _IMPROVES and trend.fall >= _LEAST_SHARE * abs(trend.first):
                since = step if since is None else min(since, step)
        trends[key] = trend
    return trends, since


def better_high(block: Block, *, validation: bool = False) -> list[tuple[str, list[int], list[float]]]:
    """Return metrics for which higher is better, with the opposite sign.

    Args:
        block: rows to search.
        validation: whether to return only validation metrics.

    Returns:
        ``name/mode``, steps and values of each metric, at each step from the lowest worker that has it.
    """
    chosen = np.flatnonzero(rows_where(block, is_better_high) & (block.statistics.finite > 0))
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


def is_better_high(info: TensorInfo) -> bool:
    """Return whether a tensor is a metric for which higher is better, by the words of its name."""
    words = info.name.lower().replace("/", "_").replace(".", "_").replace("-", "_").split("_")
    return info.role == "metric" and any(word.startswith(_RISES_WHEN_BETTER) for word in words)


def as_flags(since: int | None, steps: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether each step is at or after ``since``; false if it is None."""
    return np.zeros(len(steps), np.bool_) if since is None else steps >= since
