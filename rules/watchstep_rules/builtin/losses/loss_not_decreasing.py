"""A training loss that makes no progress from its first values."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format import tensors
from watchstep.format.block import Block
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals import constant_prediction
from watchstep_rules.signals.constant_prediction import (
    CROSS_ENTROPIES,
    AgainstLabels,
    LabelState,
    against_labels,
)
from watchstep_rules.signals.loss_progress import Beginning, LossProgressColumns, lookback, progress
from watchstep_rules.signals.loss_series import (
    LossSeries,
    Trend,
    as_flags,
    falls,
    first_steps,
    improvement,
    is_whole,
    loss_series,
)

_MOST_NOISE = 0.4
_ROUNDING = 1e-9
_KNOWN_MEAN = 0.02
_NEAR_GUESS = 0.01
_BATCH_AND_CLASSES, _OF_IMAGES = 2, 4
_UNSURE = 0.5  # standard errors by which a flat loss may have fallen


class LossNotDecreasingParams(Params):
    """Parameters of `LossNotDecreasing`."""

    patience: int = Field(100, ge=4, le=10_000, description="Number of losses without progress.")
    warmup: int = Field(10, ge=1, le=1000, description="Number of first losses; their median is the start.")
    min_fall: float = Field(
        0.05, gt=0, lt=1, description="Share of the start by which the loss of a learning model falls."
    )
    growth: float = Field(
        2.0,
        gt=1,
        description="Ratio to the start of a loss that still rises, or that exploded.",
    )
    far: float = Field(
        10.0,
        gt=1,
        description="The same ratio if labels do not show that the loss is worse than that of a constant prediction.",
    )
    certainty: float = Field(
        5.0,
        gt=0,
        description="Standard errors of the trend that a fall by min_fall must be if no labels are recorded.",
    )


class LossNotDecreasingState(State):
    """State of `LossNotDecreasing`.

    Attributes:
        series: the beginning of each series, by ``name/mode``.
        names: the step of each loss's first row.
        labels: the labels so far.
        others: the trends of metrics and validation losses.
        improved: the step since which one of these has improved.
        classes: the number of outputs of the model for each example; 0 before it is known, and -1 if models differ.
    """

    series: dict[str, Beginning] = Field(default_factory=dict)
    names: dict[str, int] = Field(default_factory=dict)
    labels: LabelState = LabelState()
    others: dict[str, Trend] = Field(default_factory=dict)
    improved: int | None = None
    classes: int = 0


class LossNotDecreasing(Rule[LossNotDecreasingParams, LossNotDecreasingState]):
    """Fires when a training loss has stayed at its first values for ``patience`` losses.

    With ``level`` the mean of the last half of the patience, ``earlier`` that of the half before, ``start`` the median of the first losses,
    and ``u`` the standard error of a difference of such means, from differences of neighbors::

        |level - earlier| <= 2 u                       it does not move
        level >= (1 - min_fall) * start                nor has it moved

    If labels are recorded, an alternative to the second condition is: the mean of the whole patience is the loss of the best constant
    prediction (at most 3 % above, and no more than its standard error below, which is at most 2 % of it), and at least half of ``start``. The rule also fires if the
    loss keeps rising: ``level - earlier > 3 u``, and ``level`` is at least ``growth * start`` and above the loss of a constant prediction,
    or at least ``far * start`` without labels. A loss that jumped and falls since does not rise: in the newest fifth of the patience, the
    mean of the second half is below that of the first by two standard errors.

    Without labels, the loss of a guess is ``log C`` for a cross-entropy of ``C`` outputs (from the shape of the model's output). A mean of the whole patience within 1 % of it,
    with a standard error of at most 1 %, is a constant prediction, if the line through the losses has fallen by at most half of a standard error, and no metric has improved.

    The loss of a constant prediction depends on the loss function, which is recorded: cross-entropy or squared error. If the function is
    not known, class labels are assumed to be learned by cross-entropy.

    *Little progress is progress.* A line is fitted through all losses since the first ones. If it ever fell by four standard errors, the
    loss learns, however little. If labels do not show the loss of a constant prediction, and the loss has noise, it counts as flat only
    after twice the patience, once a fall by ``min_fall`` would be ``certainty`` standard errors of that line, and while it has fallen by at
    most half of a standard error: noise of 2 % of the loss takes 200 losses, noise of 5 % about 300 and noise of 8 % 800. In this case an
    accuracy, a reward or another metric for which higher is better, or a validation loss, that has improved by three standard errors and a
    twentieth also counts as progress. With labels, a mean more than one standard error below the best constant prediction does.

    First losses with a median of ten times the first loss, and a maximum of ten times that median, contain an explosion; ``start`` is then
    the first loss. Such a loss has not recovered if it does not fall and the median of the patience is ``growth * start``, if it is worse
    than any constant prediction, or ``far * start`` without labels.

    Not reported are: a loss that fell a lot and is flat (converged); one that falls slightly but steadily (slow); one that was clearly
    lower before (two sides of a game); one that was ever below zero (a policy's gain, a log-likelihood); one that is better than a constant
    prediction (a pretrained model); one with labels of a single class; and one of several losses, unless its name is that of a total loss.
    The start is not used for an attempt that resumes a run (with a first loss at a later step), or if it is below 1e-6. A loss with noise
    of four tenths of it or more is not judged.

    SageMaker's LossNotDecreasing requires 0.1 % in 10 steps, which noise alone determines. 5 % is half of the difference between a network
    that only shifts its output bias and one that uses its input (labels of 10 classes: entropy 2.30, at random initialization 2.3 to 2.5).
    A patience of 100 is longer than the initial plateaus of small networks; increase it with the warm-up of the learning rate.
    """

    name = "loss_not_decreasing"
    version = 3
    summary = "the training loss makes no progress from its first values"
    needs = Needs(
        collections=("losses", "labels", "metrics"),
        roles=("loss", "label", "metric"),
        probes=("class_counts",),
        about=("loss",),
        evidence=(tensors.OUTPUTS,),
        evidence_rows=0,
    )
    merge = "watermark"
    usual_causes = (
        "The learning rate is much too high or much too low.",
        "Optimizer steps do not reach the model: zero_grad, backward and step are not all called, in this order.",
        "Labels do not match their inputs, or the loss does not match the output.",
        "No signal passes through the network: units are dead or saturated, or the initialization is poor.",
    )
    what_to_try = (
        "Try to overfit one small batch: if that fails, the fault is in the program, not in the data.",
        "Try learning rates ten times larger and smaller.",
        "Check labels, their order after shuffling, and what the loss expects: logits or probabilities, classes or one-hot.",
        "Look at alerts about layers of the same run.",
    )
    cannot_distinguish = (
        "An initial plateau without a slope that is longer than the patience, from a model that does not learn.",
        "A task that cannot be learned, from a fault.",
        "A loss that training does not minimize, such as a value error in reinforcement learning, if no metric improves and no policy loss is logged.",
        "Recorded labels that do not belong to the loss.",
    )

    def lookback(self, params: LossNotDecreasingParams) -> int:
        """Return the number of losses for the means."""
        return lookback(params.warmup, params.patience)

    def evaluate(
        self,
        params: LossNotDecreasingParams,
        state: LossNotDecreasingState,
        context: Block,
        block: Block,
        now: int,
    ) -> tuple[LossNotDecreasingState, list[Finding]]:
        """Evaluate each training loss independently."""
        losses = loss_series(context, block, "train")
        labels, baselines = constant_prediction.follow_labels(state.labels, block)
        names = first_steps(state.names, losses)
        others, improved = improvement(state.others, state.improved, context, block)
        classes = _classes(state.classes, block)
        beginnings, findings = dict(state.series), {}
        for series in losses:
            columns, beginnings[series.key] = progress(
                series, beginnings.get(series.key, Beginning()), params.warmup, params.patience
            )
            labels_verdict = against_labels(
                columns.mean,
                columns.mean_error,
                constant_prediction.at(baselines, series.steps),
                constant_prediction.least_at(baselines, series.steps),
                series.function,
            )
            has_improved = as_flags(improved, series.steps)
            guesses = _guesses(columns, labels_verdict, has_improved, classes, series.function)
            stays, rises = _verdict(params, columns, labels_verdict, has_improved, guesses)
            rises &= series.trailing(max(2, params.patience // 5), falls) != 1
            is_total = is_whole(series, names)
            for index in np.flatnonzero((stays | rises) & is_total):
                findings[int(series.rows[index])] = self._finding(
                    block, params, series, columns, int(index), rises=bool(rises[index])
                )
        state = LossNotDecreasingState(
            series=beginnings, names=names, labels=labels, others=others, improved=improved, classes=classes
        )
        return state, [findings[row] for row in sorted(findings)]

    def _finding(
        self,
        block: Block,
        params: LossNotDecreasingParams,
        series: LossSeries,
        seen: LossProgressColumns,
        place: int,
        *,
        rises: bool,
    ) -> Finding:
        level, start = float(seen.level[place]), float(seen.start[place])
        trend = "and still rises" if rises else f"and has not moved for {params.patience} steps"
        if seen.peak[place] > 0 and level >= params.growth * start:
            trend = f"rose to {seen.peak[place]:.4g} within the first {params.warmup}, and has not recovered"
        message = f"{series.name} is {level:.4g} on average, it began at {start:.4g}, {trend}"
        return finding_at(
            self.name, block, int(series.rows[place]), value=level, threshold=start, message=message
        )


def _classes(known: int, block: Block) -> int:
    """Return the number of outputs of the model for each example, by the shapes of its outputs: ``(N, C, H, W)``, or ``(…, C)``."""
    for info in block.catalogue:
        if (
            info.role != "output"
            or tensors.OUTPUTS not in info.collections
            or len(info.shape) < _BATCH_AND_CLASSES
        ):
            continue
        number = info.shape[1] if len(info.shape) >= _OF_IMAGES else info.shape[-1]
        if known not in {0, number}:
            return -1
        known = number
    return known


def _guesses(
    seen: LossProgressColumns,
    labels: AgainstLabels,
    improved: NDArray[np.bool_],
    classes: int,
    function: str,
) -> NDArray[np.bool_]:
    """Return the rows at which a loss is that of a guess between the outputs of a model, though labels do not show it."""
    if classes <= 1 or function not in CROSS_ENTROPIES:
        return np.zeros(len(seen.level), np.bool_)
    guess = math.log(classes)
    is_near: NDArray[np.bool_] = np.abs(seen.mean - guess) <= _NEAR_GUESS * guess
    is_near &= (seen.mean_error <= _NEAR_GUESS * guess) & (seen.confidence <= _UNSURE)
    return is_near & np.isnan(labels.own) & ~seen.fell & ~improved


def _verdict(
    params: LossNotDecreasingParams,
    seen: LossProgressColumns,
    labels: AgainstLabels,
    improved: NDArray[np.bool_],
    guesses: NDArray[np.bool_],
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return the rows at which a loss stays at its start, and the rows at which it rises far above."""
    level, start, unsure = seen.level, seen.start, seen.uncertainty
    unknown = np.isnan(labels.own)
    is_measurable = ~seen.signed & (start > 0) & (level > 0) & ~(unknown & improved)
    flat = np.abs(level - seen.earlier) <= 2 * unsure + _ROUNDING * level
    was_lower = level - seen.lowest > 4 * seen.noise / np.sqrt(20) + params.min_fall * level
    settled = (params.certainty * seen.error <= params.min_fall * level) & (seen.confidence <= _UNSURE)
    settled &= (seen.seen >= params.warmup + 2 * params.patience) | (seen.noise <= _ROUNDING * level)
    noise_fall = 2 * seen.noise * math.sqrt(1 / params.warmup + 1 / seen.half)
    fallen = start - level
    at_start = (fallen <= params.min_fall * start) & settled & unknown
    at_start |= (fallen <= np.maximum(params.min_fall * start, noise_fall)) & labels.above
    better = seen.mean + seen.mean_error < labels.least
    is_known = seen.mean_error <= _KNOWN_MEAN * level
    guessed = (labels.constant | guesses) & is_known & (level >= start / 2)
    stuck = (at_start & ~seen.fell & ~better) | guessed
    clear = seen.noise <= _MOST_NOISE * level
    stays = is_measurable & labels.told & clear & flat & stuck & ~was_lower
    required_ratio = np.where(labels.above, params.growth, params.far)
    rises = is_measurable & (level >= required_ratio * start) & (level - seen.earlier > 3 * unsure)
    high = (seen.middle >= params.growth * start) & labels.above
    high |= (seen.middle >= params.far * start) & clear
    lost = is_measurable & (seen.peak > 0) & high & (seen.earlier - level <= 2 * unsure)
    return stays | lost, rises
