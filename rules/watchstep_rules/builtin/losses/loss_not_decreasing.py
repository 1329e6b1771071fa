"""A training loss that makes no progress from where it began."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals import constant_prediction
from watchstep_rules.signals.constant_prediction import AgainstLabels, LabelState, against_labels
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
_UNSURE = 0.5  # standard errors by which a loss may have fallen, and still be said to stay


class LossNotDecreasingParams(Params):
    """Parameters of `LossNotDecreasing`."""

    patience: int = Field(100, ge=4, le=10_000, description="Losses over which there must be no progress.")
    warmup: int = Field(10, ge=1, le=1000, description="First losses, whose median is where it began.")
    min_fall: float = Field(
        0.05, gt=0, lt=1, description="Share of its beginning by which a loss that learns falls."
    )
    growth: float = Field(
        2.0,
        gt=1,
        description="How many times its beginning a loss that still rises, or that exploded, has reached.",
    )
    far: float = Field(
        10.0,
        gt=1,
        description="The same of one that exploded, where labels do not tell that it is worse than a constant.",
    )
    certainty: float = Field(
        5.0,
        gt=0,
        description="Standard errors of its trend that a fall by min_fall must be, where labels do not tell what a loss is worth.",
    )


class LossNotDecreasingState(State):
    """The beginning of each series, by ``name/mode``; the step of each loss's first row; the labels so far.

    Also the trends of metrics and validation losses, and since which step one of them has improved.
    """

    series: dict[str, Beginning] = Field(default_factory=dict)
    names: dict[str, int] = Field(default_factory=dict)
    labels: LabelState = LabelState()
    others: dict[str, Trend] = Field(default_factory=dict)
    improved: int | None = None


class LossNotDecreasing(Rule[LossNotDecreasingParams, LossNotDecreasingState]):
    """Fires when a training loss has stayed where it began for ``patience`` losses.

    With ``level`` the mean of the last half of the patience, ``earlier`` that of the half before, ``start`` the median of
    the first losses, and ``u`` the standard error of a difference of such means, from differences of neighbours::

        |level - earlier| <= 2 u                       it does not move
        level >= (1 - min_fall) * start                nor has it moved

    or, instead of the second, where labels are recorded: the mean of the whole patience is what the best constant prediction
    gives (at most 3 % above, and no more than its standard error below), and at least half of ``start``. Or it rises and goes
    on: ``level - earlier > 3 u``, and ``level`` is ``growth * start`` and more than what a constant gives, or ``far * start``
    where labels do not tell. A loss that jumped and falls since does not rise: of the newest fifth of the patience, the
    mean of the second half is below that of the first by two standard errors.

    What a constant gives depends on the function that computes the loss, which is recorded: cross-entropy or squared error. Where
    the function is not known, labels that are classes are taken to be learnt by cross-entropy.

    *Little progress is progress.* A line through all losses since the first ones is fitted. If it ever fell by four
    standard errors the loss learns, however little. Where labels do not tell what the loss is worth, and it has any noise, it is
    said to stay only after twice the patience, once a fall by ``min_fall`` would be ``certainty`` standard errors of that line, and while it
    has fallen by half of one at most: noise of 2 % of the loss takes 200 losses, noise of 5 % some 300 and noise of 8 % 800. There an accuracy, a reward or another metric of which more is
    better, or a validation loss, that has improved by three standard errors and a twentieth is progress as well. Where labels do
    tell, a mean more than one standard error below the best constant prediction is.

    First losses whose median is ten times the first one, and whose highest is ten times that median, hold an explosion: then
    ``start`` is the first. Such a loss has not come back where it does not fall and the median of the patience is
    ``growth * start``, if it is worse than any constant prediction; where labels are not recorded, ``far * start``.

    A loss that fell by much and is flat has converged, and one that falls by little but steadily is slow: both are left
    alone. So is one that has been clearly lower before (two sides of a game), that was ever below zero (a policy's
    gain, a log-likelihood), that is better than a constant prediction (a model that begins trained), that has labels
    of one kind only, and one of several losses, unless its name says that it is the sum. An attempt that resumes a run (its
    first loss is of a later step) began elsewhere, and a start below 1e-6 is none: of both the start is not used. A loss whose
    noise is four tenths of it or more is not judged at all.

    SageMaker's LossNotDecreasing asks for 0.1 % in 10 steps, which noise alone decides; 5 % is half of what separates a
    network that only shifts its output's bias from one that uses its input (labels of 10 classes: entropy 2.30, at
    random initialisation 2.3 to 2.5). Patience 100 is longer than the plateaus of small networks before they take off;
    lengthen it with your warm-up.
    """

    name = "loss_not_decreasing"
    version = 2
    summary = "the training loss makes no progress from where it began"
    needs = Needs(
        collections=("losses", "labels", "metrics"),
        roles=("loss", "label", "metric"),
        probes=("class_counts",),
        about=("loss",),
        evidence_rows=0,
    )
    merge = "sealed"
    usual_causes = (
        "The learning rate is much too high or much too low.",
        "The optimizer's steps do not reach the model: zero_grad, backward and step are not all there, in that order.",
        "Labels do not belong to their inputs, or the loss does not suit the output.",
        "Nothing passes through the network: units are dead or saturated, or it began badly.",
    )
    what_to_try = (
        "Try to overfit one small batch: if that fails, the fault is in the program, not in the data.",
        "Try learning rates ten times larger and smaller.",
        "Check labels, their order after shuffling, and what the loss expects: logits or probabilities, classes or one-hot.",
        "Look at alerts about layers of the same run.",
    )
    cannot_distinguish = (
        "A plateau before a network takes off, if it is longer than the patience and has no slope, from a model that does not learn.",
        "A task that cannot be learnt, from a fault.",
        "A loss that is not the one that training lowers, such as a value's error in reinforcement learning, where no metric beside it improves and no loss of a policy is logged.",
        "Labels that are recorded but are not what the loss is about.",
    )

    def lookback(self, params: LossNotDecreasingParams) -> int:
        """What the means reach over."""
        return lookback(params.warmup, params.patience)

    def evaluate(
        self,
        params: LossNotDecreasingParams,
        state: LossNotDecreasingState,
        context: Block,
        block: Block,
        now: int,
    ) -> tuple[LossNotDecreasingState, list[Finding]]:
        """Judge each training loss by itself."""
        losses = loss_series(context, block, "train")
        labels, baselines = constant_prediction.follow_labels(state.labels, block)
        names = first_steps(state.names, losses)
        others, improved = improvement(state.others, state.improved, context, block)
        kept, findings = dict(state.series), {}
        for series in losses:
            seen, kept[series.key] = progress(
                series, kept.get(series.key, Beginning()), params.warmup, params.patience
            )
            said = against_labels(
                seen.mean,
                seen.mean_error,
                constant_prediction.at(baselines, series.steps),
                constant_prediction.least_at(baselines, series.steps),
                series.function,
            )
            stays, rises = _verdict(params, seen, said, as_flags(improved, series.steps))
            rises &= series.trailing(max(2, params.patience // 5), falls) != 1
            whole = is_whole(series, names)
            for place in np.flatnonzero((stays | rises) & whole):
                findings[int(series.rows[place])] = self._finding(
                    block, params, series, seen, int(place), rises=bool(rises[place])
                )
        state = LossNotDecreasingState(
            series=kept, names=names, labels=labels, others=others, improved=improved
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
        what = "and still rises" if rises else f"and has not moved for {params.patience} steps"
        if seen.peak[place] > 0 and level >= params.growth * start:
            what = f"rose to {seen.peak[place]:.4g} within the first {params.warmup}, and has not come back"
        message = f"{series.name} is {level:.4g} on average, it began at {start:.4g}, {what}"
        return finding_at(
            self.name, block, int(series.rows[place]), value=level, threshold=start, message=message
        )


def _verdict(
    params: LossNotDecreasingParams,
    seen: LossProgressColumns,
    said: AgainstLabels,
    improved: NDArray[np.bool_],
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """At which rows a loss stays where it began, and at which it rises far above."""
    level, start, unsure = seen.level, seen.start, seen.uncertainty
    unknown = np.isnan(said.own)
    measure = ~seen.signed & (start > 0) & (level > 0) & ~(unknown & improved)
    flat = np.abs(level - seen.earlier) <= 2 * unsure + _ROUNDING * level
    was_lower = level - seen.lowest > 4 * seen.noise / np.sqrt(20) + params.min_fall * level
    settled = (params.certainty * seen.error <= params.min_fall * level) & (seen.confidence <= _UNSURE)
    settled &= (seen.seen >= params.warmup + 2 * params.patience) | (seen.noise <= _ROUNDING * level)
    of_noise = 2 * seen.noise * math.sqrt(1 / params.warmup + 1 / seen.half)
    fallen = start - level
    as_began = (fallen <= params.min_fall * start) & settled & unknown
    as_began |= (fallen <= np.maximum(params.min_fall * start, of_noise)) & said.above
    better = seen.mean + seen.mean_error < said.least
    stuck = (as_began & ~seen.fell & ~better) | (said.constant & (level >= start / 2))
    plain = seen.noise <= _MOST_NOISE * level
    stays = measure & said.told & plain & flat & stuck & ~was_lower
    bar = np.where(said.above, params.growth, params.far)
    rises = measure & (level >= bar * start) & (level - seen.earlier > 3 * unsure)
    high = (seen.middle >= params.growth * start) & said.above
    high |= (seen.middle >= params.far * start) & plain
    lost = measure & (seen.peak > 0) & high & (seen.earlier - level <= 2 * unsure)
    return stays | lost, rises
