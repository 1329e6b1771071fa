"""A validation loss that rises from its minimum while the training loss continues to fall."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from pydantic import Field

from watchstep.format.block import Block
from watchstep.format.statistics import Floats
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.loss_series import LossSeries, better_high, loss_series


class OverfitParams(Params):
    """Parameters of `Overfit`."""

    patience: int = Field(5, ge=1, le=1000, description="Consecutive evaluations above the minimum.")
    rise: float = Field(
        0.2, gt=0, description="Rise of the validation loss above its minimum, as a share of the minimum."
    )
    of_first: float = Field(
        0.15, ge=0, description="Rise of the validation loss as a share of the first evaluation's loss."
    )
    train_fall: float = Field(
        0.2, ge=0, lt=1, description="Share by which the training loss has fallen since the minimum."
    )
    window: int = Field(
        20, ge=1, le=1000, description="Number of training losses; their mean is the training loss."
    )


class ValidationMinimum(NamedTuple):
    """The minimum of a validation loss.

    Attributes:
        first: the loss of the first evaluation.
        loss: the lowest loss.
        step: the step of the lowest loss.
        train: the training loss at that step.
        last: the newest loss.
        worse: number of last consecutive evaluations above the minimum by half of the required rise.
        after: number of evaluations since the minimum.
        total: sum of their losses.
        squares: sum of the squares of their successive changes.
        metrics: the best value of each metric up to that step, by ``name/mode``.
    """

    first: float
    loss: float
    step: int
    train: float | None
    last: float
    worse: int = 0
    after: int = 0
    total: float = 0.0
    squares: float = 0.0
    metrics: dict[str, float] = {}  # noqa: RUF012 - never changed in place


class Metric(NamedTuple):
    """A validation metric for which higher is better, negated.

    Attributes:
        best: the lowest value.
        newest: the last values, as many as the patience, oldest first.
    """

    best: float
    newest: tuple[float, ...]


class OverfitState(State):
    """State of `Overfit`: validation losses and metrics by ``name/mode``, and the newest mean of each training loss by name."""

    best: dict[str, ValidationMinimum] = Field(default_factory=dict)
    train: dict[str, float] = Field(default_factory=dict)
    metrics: dict[str, Metric] = Field(default_factory=dict)


class Overfit(Rule[OverfitParams, OverfitState]):
    """Fires when a validation loss has risen from its minimum, and the training loss continues to fall.

    With ``best`` the lowest validation loss, ``first`` the first one, ``loss`` the newest, ``train`` the mean of the last ``window``
    training losses, and ``train_then`` the same at the minimum, all conditions must be true::

        loss - best >= rise * |best|  and  >= of_first * |first|    it has risen
        loss - best >= half of that, for patience evaluations       and stays up
        loss - best >= 2 * rms(changes since the best)              beyond its own noise
        loss >= mean(losses since the best)                         and does not recover
        train <= train_then - train_fall * |train_then|             while the training loss falls
        loss - train >= rise * |loss|                               and is far below it

    SageMaker's Overfit only compares the two losses, with a ratio of 0.1, so it reports every model that generalizes slightly worse than it
    fits. A rising validation loss with a falling training loss is the textbook criterion (Goodfellow et al., Deep Learning, 2016, section
    7.8), and patience is due to Prechelt ("Early stopping, but when?", 1998). The share of the first evaluation excludes losses close to
    zero, which a few doubtful examples can double.

    The training loss is the one with the same name, or the only one.

    A model is not reported if it improves by a validation metric for which higher is better (accuracy, F1, AUC, reward, …): the last
    ``patience`` values of the metric are all better than any up to the minimum of the validation loss. Cross-entropy rises if a few wrong
    answers become more confident, or if validation has classes that training reaches later, while the number of correct answers grows (Guo
    et al., "On Calibration of Modern Neural Networks", ICML 2017, section 3). ``patience`` values above the earlier best exclude noise.
    """

    name = "overfit"
    summary = "the validation loss rises from its minimum while the training loss falls"
    needs = Needs(
        collections=("losses", "metrics"), roles=("loss", "metric"), about=("loss",), evidence_rows=0
    )
    merge = "watermark"
    usual_causes = (
        "The training is too long for the amount of data.",
        "The model is large for the data.",
        "There is little regularization or augmentation.",
        "Validation data differ from training data.",
    )
    what_to_try = (
        "Stop early, and use the weights of the best validation.",
        "Add weight decay, dropout or augmentation, or use a smaller model.",
        "Use more data, or start from pretrained weights.",
        "Check how the validation data were split and preprocessed.",
    )
    cannot_distinguish = (
        "A validation loss that rises because a few wrong predictions become more confident while accuracy still grows, from a model that degrades, if no validation metric is recorded.",
        "A validation set that is changed on purpose, from overfitting.",
    )

    def lookback(self, params: OverfitParams) -> int:
        """Return the length of the window."""
        return params.window

    def evaluate(
        self, params: OverfitParams, state: OverfitState, context: Block, block: Block, now: int
    ) -> tuple[OverfitState, list[Finding]]:
        """Evaluate each validation loss together with its training loss."""
        means = {key: ([-1], [mean]) for key, mean in state.train.items()}
        for series in loss_series(context, block, "train"):
            course = series.trailing(params.window, _mean_of_finite)
            is_finite = np.isfinite(course)
            steps, values = means.setdefault(series.name, ([], []))
            steps.extend(series.steps[is_finite].tolist())
            values.extend(course[is_finite].tolist())
        metrics = {key: _Course.after(metric) for key, metric in state.metrics.items()}
        for key, metric_steps, measured in better_high(block, validation=True):
            metrics.setdefault(key, _Course()).extend(metric_steps, measured)
        minimums, findings = dict(state.best), {}
        for series in loss_series(context, block, "eval"):
            for row, step, loss in zip(
                series.rows.tolist(), series.steps.tolist(), series.values.tolist(), strict=True
            ):
                if not np.isfinite(loss):
                    continue
                train = _train_at(means, series, step)
                metrics_at_step = {key: course.at(step, params.patience) for key, course in metrics.items()}
                best = minimums[series.key] = _follow(
                    params, minimums.get(series.key), step, loss, train, metrics_at_step
                )
                better = any(_is_better(params, best, key, metric) for key, metric in metrics_at_step.items())
                if train is not None and not better and _overfits(params, best, train):
                    message = (
                        f"validation {series.name} is {loss:.4g}, its minimum was {best.loss:.4g} at step {best.step}; "
                        f"the training loss has fallen from {best.train:.4g} to {train:.4g} since"
                    )
                    findings[row] = finding_at(
                        self.name, block, row, value=loss, threshold=best.loss, message=message
                    )
        courses = {key: values[-1] for key, (_, values) in means.items() if values}
        newest = {key: course.at(None, params.patience) for key, course in metrics.items()}
        state = OverfitState(
            best=minimums,
            train=courses,
            metrics={key: metric for key, metric in newest.items() if metric.newest},
        )
        return state, [findings[row] for row in sorted(findings)]


def _mean_of_finite(windows: Floats) -> Floats:
    is_finite = np.isfinite(windows)
    mean: Floats = np.where(is_finite, windows, 0).sum(axis=1) / is_finite.sum(axis=1)
    return mean


def _train_at(means: dict[str, tuple[list[int], list[float]]], series: LossSeries, step: int) -> float | None:
    """Return the mean training loss at a step, of the series that belongs to a validation loss."""
    train_losses = {}
    for key, (steps, values) in means.items():
        index = bisect_right(steps, step) - 1
        if index >= 0:
            train_losses[key] = values[index]
    return train_losses.get(
        series.name, next(iter(train_losses.values())) if len(train_losses) == 1 else None
    )


@dataclass
class _Course:
    """Values of a metric: relevant values of earlier blocks (at step -1), and values of this block."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    bests: list[float] = field(default_factory=list)

    @classmethod
    def after(cls, past: Metric) -> _Course:
        """Create a course that continues from the state."""
        count = len(past.newest)
        return cls([-1] * count, list(past.newest), [past.best] * count)

    def extend(self, steps: list[int], values: list[float]) -> None:
        """Add values of a block."""
        lowest = self.bests[-1:] or [math.inf]
        self.steps += steps
        self.values += values
        self.bests += list(accumulate(values, min, initial=lowest[0]))[1:]

    def at(self, step: int | None, patience: int) -> Metric:
        """Return the metric as of a step, or at the end for None."""
        end = len(self.steps) if step is None else bisect_right(self.steps, step)
        best = self.bests[end - 1] if end else math.inf
        return Metric(best, tuple(self.values[max(0, end - patience) : end]))


def _is_better(params: OverfitParams, best: ValidationMinimum, key: str, metric: Metric) -> bool:
    """Return whether a metric has been better since the best validation loss than ever before it."""
    before = best.metrics.get(key)
    return before is not None and len(metric.newest) == params.patience and max(metric.newest) < before


def _follow(
    params: OverfitParams,
    best: ValidationMinimum | None,
    step: int,
    loss: float,
    train: float | None,
    reached: dict[str, Metric],
) -> ValidationMinimum:
    """Return the minimum after another evaluation."""
    if best is None or loss < best.loss:
        metrics = {key: metric.best for key, metric in reached.items() if metric.newest}
        return ValidationMinimum(
            loss if best is None else best.first, loss, step, train, loss, metrics=metrics
        )
    is_worse = loss - best.loss >= _rise(params, best) / 2
    return best._replace(
        last=loss,
        worse=best.worse + 1 if is_worse else 0,
        after=best.after + 1,
        total=best.total + loss,
        squares=best.squares + (loss - best.last) ** 2,
    )


def _rise(params: OverfitParams, best: ValidationMinimum) -> float:
    return max(params.rise * abs(best.loss), params.of_first * abs(best.first))


def _overfits(params: OverfitParams, best: ValidationMinimum, train: float) -> bool:
    if best.train is None or best.worse < params.patience:
        return False
    risen = best.last - best.loss
    return (
        risen >= _rise(params, best)
        and risen >= 2 * math.sqrt(best.squares / best.after)
        and best.last >= best.total / best.after
        and train <= best.train - params.train_fall * abs(best.train)
        and best.last - train >= params.rise * abs(best.last)
    )
