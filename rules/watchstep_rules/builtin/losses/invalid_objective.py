"""A training loss that cannot be what the program should minimize."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block
from watchstep.format.statistics import Floats
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.constant_prediction import CLASSIFIES
from watchstep_rules.signals.loss_series import LossSeries, first_steps, is_whole, loss_series, noise

_HALF = 20
_FIRST = 10
_SIGNIFICANT = 3.0
_GROWTH = 1.5
_PARTS = 4
_NEVER_LOWER = 0.8
_GUESS = math.log(2)
"""Cross-entropy of a guess between two classes: a classifier below it is not wrong."""


class InvalidObjectiveParams(Params):
    """Parameters of `InvalidObjective`."""

    fall: float = Field(
        2.0, gt=1, description="Ratio to its first magnitude of a negated loss that goes on falling."
    )
    rise: float = Field(
        3.0, gt=1, description="Ratio to its first values of a classifier's loss that has only risen."
    )
    endless: float = Field(
        1000.0, gt=1, description="Ratio to its first magnitude of a negative loss that falls exponentially."
    )


class Objective(NamedTuple):
    """What a loss has been so far: the number of finite values, the mean magnitude of the first ten, and the lowest mean of ten; None before there are ten."""

    seen: int = 0
    first: float = 0.0
    lowest: float | None = None


class InvalidObjectiveState(State):
    """State of `InvalidObjective`.

    Attributes:
        series: the beginning of each series, by ``name/mode``.
        names: the step of each loss's first row.
    """

    series: dict[str, Objective] = Field(default_factory=dict)
    names: dict[str, int] = Field(default_factory=dict)


class InvalidObjective(Rule[InvalidObjectiveParams, InvalidObjectiveState]):
    """Fires when a training loss is not one that a model should minimize.

    With ``level`` the mean of the last 20 losses, ``earlier`` that of the 20 before, ``u`` the standard error of their difference from
    differences of neighbors, and ``first`` the mean magnitude of the first ten losses, any of::

        the loss is a cross-entropy of probabilities       its input has been through softmax or sigmoid already
        the loss is a negated loss function, level < earlier - 3 u, and -level >= fall * first
        level <= 1.5 * earlier < 0, and -level >= endless * first        it falls exponentially, without an end
        the loss is a cross-entropy that has only risen: level >= rise * first, by 3 u, the means of the last four tens ascend,
        no mean of ten was ever below 0.8 * first; and level > log 2

    The recorder states the function and its sign from the graph of the loss at ``backward()``.

    A cross-entropy is never below zero, so a program that minimizes its negative teaches the model to be wrong: it should maximize what it
    minimizes, as by ``maximize=True``. Such a program does not fire, because its loss rises towards zero. Neither do losses that are negative
    for good reasons: gains of policies, log-likelihoods of densities, and critics, which do not grow exponentially; the inner maximization of
    adversarial training, whose loss rises as the model learns; and gradient reversal, which does not change the loss. Losses of several
    parts are judged by their names only if they are total losses.
    """

    name = "invalid_objective"
    summary = "the training loss is not one to minimize: negated, of probabilities, rising from the start, or without an end"
    needs = Needs(collections=("losses",), roles=("loss",))
    merge = "watermark"
    usual_causes = (
        "The loss has the wrong sign, or the optimizer was created with maximize=True.",
        "The model ends in softmax or sigmoid, and the loss function applies it again.",
        "The objective has no lower bound: a term is subtracted without a limit, or a critic without a constraint.",
    )
    what_to_try = (
        "Pass logits to cross_entropy and binary_cross_entropy_with_logits, without softmax or sigmoid before.",
        "Compute the loss for one batch by hand, and compare it after one update: it must be smaller.",
        "Look for a minus sign, a reversed difference, and maximize=True.",
    )
    cannot_distinguish = (
        "A program that unlearns examples on purpose, from a loss with the wrong sign.",
        "A model that is meant to end in softmax before cross_entropy, from one by mistake.",
        "The sign of an objective of the program's own that has a lower bound.",
    )

    def lookback(self, params: InvalidObjectiveParams) -> int:
        """Return the number of losses for the means."""
        return 2 * _HALF

    def evaluate(
        self,
        params: InvalidObjectiveParams,
        state: InvalidObjectiveState,
        context: Block,
        block: Block,
        now: int,
    ) -> tuple[InvalidObjectiveState, list[Finding]]:
        """Evaluate each training loss independently."""
        losses = loss_series(context, block, "train")
        names = first_steps(state.names, losses)
        beginnings = dict(state.series)
        findings: dict[int, Finding] = {}
        for series in losses:
            course = _Course(series, beginnings.get(series.key, Objective()))
            beginnings[series.key] = course.after
            for fires, text in _verdicts(params, course, is_whole(series, names)):
                for index in np.flatnonzero(fires).tolist():
                    findings.setdefault(
                        int(series.rows[index]),
                        finding_at(
                            self.name,
                            block,
                            int(series.rows[index]),
                            value=float(series.values[index]),
                            threshold=float(course.first[index]),
                            message=f"{series.name} {text.format(**course.words(index))}",
                        ),
                    )
        return InvalidObjectiveState(series=beginnings, names=names), [
            findings[row] for row in sorted(findings)
        ]


class _Course:
    """Columns over the rows of a series, of shape (n,); NaN before there are enough losses."""

    def __init__(self, series: LossSeries, past: Objective) -> None:
        self.series = series
        is_finite = np.isfinite(series.values)
        self.seen = past.seen + np.cumsum(is_finite)
        new = np.where(is_finite & (self.seen <= _FIRST), np.abs(series.values), 0.0)
        counts = np.maximum(np.minimum(self.seen, _FIRST), 1)
        self.first = (past.first * min(past.seen, _FIRST) + np.cumsum(new)) / counts
        tens = series.trailing(_FIRST, _mean)
        tens[~np.isfinite(tens)] = np.nan
        lowest = np.nan if past.lowest is None else past.lowest
        self.lowest = np.fmin.accumulate(np.concatenate([[lowest], tens]))[1:]
        known = None if np.isnan(self.lowest[-1]) else float(self.lowest[-1])
        self.after = Objective(int(self.seen[-1]), float(self.first[-1]), known)
        self.level = series.trailing(_HALF, _mean)
        self.earlier = series.trailing(2 * _HALF, lambda windows: _mean(windows[:, :_HALF]))
        self.highest = series.trailing(2 * _HALF, lambda windows: windows.max(axis=1))
        self.unsure = series.trailing(2 * _HALF, noise) * math.sqrt(2 / _HALF)
        self.ascends = series.trailing(2 * _HALF, _ascends) == 1

    def words(self, index: int) -> dict[str, str]:
        """Figures of a row for a message."""
        return {
            "first": f"{self.first[index]:.4g}",
            "earlier": f"{self.earlier[index]:.4g}",
            "level": f"{self.level[index]:.4g}",
            "function": self.series.function.lstrip("-"),
        }


def _verdicts(
    params: InvalidObjectiveParams, seen: _Course, is_total: NDArray[np.bool_]
) -> list[tuple[NDArray[np.bool_], str]]:
    """Return the rows at which a loss is of each kind, and the message."""
    series, level, earlier = seen.series, seen.level, seen.earlier
    falls = (level < 0) & (earlier - level > _SIGNIFICANT * seen.unsure)
    negated = falls & (-level >= params.fall * seen.first)
    endless = (seen.highest < 0) & (level <= _GROWTH * earlier) & (-level >= params.endless * seen.first)
    rises = is_total & (level >= params.rise * seen.first) & (seen.lowest >= _NEVER_LOWER * seen.first)
    rises &= (level - earlier > _SIGNIFICANT * seen.unsure) & seen.ascends
    rises &= level > _GUESS
    of_probabilities = np.full(len(level), series.of_probabilities) & (seen.seen >= _FIRST)
    return [
        (
            of_probabilities,
            "is {function} of probabilities: its input has been through softmax or sigmoid already, and the function applies it again or expects logarithms",
        ),
        (
            negated & series.function.startswith("-"),
            "is the negative of {function}, which is never below zero, and falls: {level} on average, {earlier} before, it began at -{first}",
        ),
        (
            endless,
            "falls exponentially: {level} on average of the last 20, {earlier} of the 20 before, its first magnitude was {first}",
        ),
        (
            rises
            & (
                series.function.lstrip("-") in CLASSIFIES
            ),  # a program may log the loss and minimize its negative
            "has only risen: {level} on average of the last 20, {earlier} of the 20 before, it began at {first}; the updates go up the gradient",
        ),
    ]


def _mean(windows: Floats) -> Floats:
    means: Floats = windows.mean(axis=1)
    return means


def _ascends(windows: Floats) -> Floats:
    parts = windows.reshape(len(windows), _PARTS, -1).mean(axis=2)
    return np.asarray((np.diff(parts, axis=1) > 0).all(axis=1), np.float64)
