"""A training loss that makes no progress from where it began."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.block import Block
from watchstep_rules.contract import Needs, Params, Rule, State
from watchstep_rules.figures import constant_prediction
from watchstep_rules.figures.constant_prediction import LabelState, against_labels
from watchstep_rules.figures.loss_progress import Beginning, Progress, lookback, progress
from watchstep_rules.figures.loss_series import LossSeries, first_steps, is_whole, loss_series
from watchstep_rules.finding import Finding, finding_at

_MOST_NOISE = 0.4
_ROUNDING = 1e-9


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
    noise: float = Field(
        0.15, gt=0, description="Relative noise up to which a loss is judged by its beginning alone."
    )


class LossNotDecreasingState(State):
    """The beginning of each series, by ``name/mode``; the step of each loss's first row; the labels so far."""

    series: dict[str, Beginning] = Field(default_factory=dict)
    names: dict[str, int] = Field(default_factory=dict)
    labels: LabelState = LabelState()


class LossNotDecreasing(Rule[LossNotDecreasingParams, LossNotDecreasingState]):
    """Fires when a training loss has stayed where it began for ``patience`` losses.

    With ``level`` the mean of the last half of the patience, ``earlier`` that of the half before, ``start`` the median of
    the first losses, and ``u`` the standard error of a difference of such means, from differences of neighbours::

        |level - earlier| <= 2 u                       it does not move
        level >= (1 - min_fall) * start                nor has it moved

    or, instead of the second, where labels are recorded: the mean of the whole patience is what the best constant prediction
    gives (within 3 %), and at least half of ``start``. Or it rises and goes on: ``level >= growth * start`` and ``level - earlier > 3 u``.

    First losses whose median is ten times the first one, and whose highest is ten times that median, hold an explosion: then
    ``start`` is the first. Such a loss has not come back where it does not fall and the median of the patience is
    ``growth * start``, if it is worse than any constant prediction; where labels are not recorded, ``far * start``.

    A loss that fell by much and is flat has converged, and one that falls by little but steadily is slow: both are left
    alone. So is one that has been clearly lower before (two sides of a game), that was ever below zero (a policy's
    gain, a log-likelihood), that is well below any constant prediction (a model that begins trained), that has labels
    of one kind only, and one of several losses, unless its name says that it is the sum. Noise hides whether a loss fell: one that is
    noisier than the parameter is judged only where labels tell that it is worse than any constant prediction (then it has
    stayed where it began if it is within two standard errors), and one whose noise is four tenths of it or more, not at all.

    SageMaker's LossNotDecreasing asks for 0.1 % in 10 steps, which noise alone decides; 5 % is half of what separates a
    network that only shifts its output's bias from one that uses its input (labels of 10 classes: entropy 2.30, at
    random initialisation 2.3 to 2.5). Patience 100 is longer than the plateaus of small networks before they take off;
    lengthen it with your warm-up.
    """

    name = "loss_not_decreasing"
    summary = "the training loss makes no progress from where it began"
    needs = Needs(
        collections=("losses", "labels"), roles=("loss", "label"), probes=("class_counts",), about=("loss",)
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
    params_type = LossNotDecreasingParams
    state_type = LossNotDecreasingState

    def lookback(self, params: LossNotDecreasingParams) -> int:
        """What the means reach over."""
        return lookback(params.warmup, params.patience)

    def evaluate(
        self,
        params: LossNotDecreasingParams,
        state: LossNotDecreasingState,
        context: Block,
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[LossNotDecreasingState, list[Finding]]:
        """Judge each training loss by itself."""
        losses = loss_series(context, block, "train")
        labels, baselines = constant_prediction.follow(state.labels, block)
        names = first_steps(state.names, losses)
        kept, findings = dict(state.series), {}
        for series in losses:
            seen, kept[series.key] = progress(
                series, kept.get(series.key, Beginning()), params.warmup, params.patience
            )
            known = constant_prediction.at(baselines, series.steps)
            stays, rises = _verdict(params, seen, known)
            whole = is_whole(series, names)
            for place in np.flatnonzero((stays | rises) & whole):
                findings[int(series.rows[place])] = self._finding(
                    block, params, series, seen, int(place), rises=bool(rises[place])
                )
        state = LossNotDecreasingState(series=kept, names=names, labels=labels)
        return state, [findings[row] for row in sorted(findings)]

    def _finding(
        self,
        block: Block,
        params: LossNotDecreasingParams,
        series: LossSeries,
        seen: Progress,
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
    params: LossNotDecreasingParams, seen: Progress, known: list[tuple[float, ...] | None]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """At which rows a loss stays where it began, and at which it rises far above."""
    level, start, unsure = seen.level, seen.start, seen.uncertainty
    measure = ~seen.signed & (start > 0) & (level > 0)
    said = against_labels((seen.earlier + level) / 2, known)
    flat = np.abs(level - seen.earlier) <= 2 * unsure + _ROUNDING * level
    was_lower = level - seen.lowest > 4 * seen.noise / np.sqrt(20) + params.min_fall * level
    clear = seen.noise <= params.noise * level
    of_noise = 2 * seen.noise * math.sqrt(1 / params.warmup + 1 / seen.half)
    fallen = start - level
    as_began = (fallen <= params.min_fall * start) & clear | (fallen <= of_noise) & said.above
    at_constant = said.constant & (level >= start / 2)
    learnt = level - unsure < 0.9 * said.lowest
    plain = seen.noise <= _MOST_NOISE * level
    stays = measure & said.told & plain & flat & (as_began | at_constant) & ~was_lower & ~learnt
    rises = measure & (level >= params.growth * start) & (level - seen.earlier > 3 * unsure)
    high = (seen.middle >= params.growth * start) & said.above
    high |= (seen.middle >= params.far * start) & plain
    lost = measure & (seen.peak > 0) & high & (seen.earlier - level <= 2 * unsure)
    return stays | lost, rises
