"""A training loss that had fallen, is back at its first values, and stays there."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals import constant_prediction
from watchstep_rules.signals.constant_prediction import LabelState, own_baselines
from watchstep_rules.signals.loss_progress import Beginning, progress
from watchstep_rules.signals.loss_progress import lookback as loss_lookback
from watchstep_rules.signals.loss_series import falls, first_steps, is_whole, loss_series

_LONGEST = 200


class LostProgressParams(Params):
    """Parameters of `LostProgress`."""

    window: int = Field(20, ge=2, le=1000, description="Number of losses over which the mean is taken.")
    warmup: int = Field(10, ge=1, le=1000, description="Number of first losses; their median is the start.")
    fallen: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="Share of the start to which a loss with progress has fallen.",
    )
    back: float = Field(0.8, gt=0, description="Share of the start at which the progress is lost.")
    lasting: int = Field(
        10,
        ge=1,
        le=1000,
        description="Consecutive means that are back; more if the model took longer to learn at first.",
    )


class LossCourse(NamedTuple):
    """The course of a series.

    Attributes:
        learned: number of losses until the loss first fell to ``back``; 0 before.
        away: consecutive means that are back after progress.
    """

    learned: int = 0
    away: int = 0


class LostProgressState(State):
    """State of `LostProgress`: beginning and course of each series by ``name/mode``, the step of each loss's first row, and labels."""

    series: dict[str, Beginning] = Field(default_factory=dict)
    courses: dict[str, LossCourse] = Field(default_factory=dict)
    names: dict[str, int] = Field(default_factory=dict)
    labels: LabelState = LabelState()


class LostProgress(Rule[LostProgressParams, LostProgressState]):
    """Fires when a training loss that had fallen by half is back at its first values, and does not fall again.

    With ``start`` the median of the first losses, or the loss of the best constant prediction if labels are recorded and it is lower,
    ``mean`` the mean of the last ``window`` losses and ``lowest`` the lowest mean of twenty losses so far::

        lowest <= fallen * start        it had made progress
        mean   >= back * start          which is lost

    The second condition must be true for ``lasting`` consecutive means, and for as many as the loss took at first to fall to ``back *
    start`` (200 at most), because a new task, which may be intended, is learned in about the same time as the first. A loss does not fall if
    the mean of the second half of the window is not below that of the first by more than two standard errors, from differences of
    neighbors.

    Typical causes are inputs that have become constant, labels that no longer match their inputs, batches of padding, and a learning rate or
    weight decay that overwrote the weights. `loss_spike` detects a loss that jumps above its first values earlier.

    Not judged are losses that were ever below zero, one of several losses without the name of a total loss, an attempt that resumes a run
    (with an unknown start), and a start below 1e-6.
    """

    name = "lost_progress"
    summary = "the training loss had fallen, is back at its first values, and stays there"
    needs = Needs(
        collections=("losses", "labels"),
        roles=("loss", "label"),
        probes=("class_counts",),
        about=("loss",),
        evidence_rows=0,
    )
    merge = "watermark"
    usual_causes = (
        "Inputs or labels have changed: constant or unscaled inputs, labels that do not match their inputs, batches of padding.",
        "An update overwrote the weights: a raised learning rate or weight decay, or an unusual batch.",
        "The sign of the loss, or its reduction, was changed.",
    )
    what_to_try = (
        "Look at the batches of the step at which the loss rose, and at the learning rate and weight decay that the program set there.",
        "Restart from a checkpoint before that step.",
        "If the task was changed on purpose, silence the alert for this run.",
    )
    cannot_distinguish = (
        "Harder data or a harder task on purpose, from a fault.",
        "Targets that grow with learning, as in reinforcement learning, from lost progress.",
    )

    def lookback(self, params: LostProgressParams) -> int:
        """Return the number of losses for the means."""
        return loss_lookback(params.warmup, 2 * params.window)

    def evaluate(
        self, params: LostProgressParams, state: LostProgressState, context: Block, block: Block, now: int
    ) -> tuple[LostProgressState, list[Finding]]:
        """Evaluate each training loss independently."""
        losses = loss_series(context, block, "train")
        labels, baselines = constant_prediction.follow_labels(state.labels, block)
        names = first_steps(state.names, losses)
        beginnings, courses, findings = dict(state.series), dict(state.courses), {}
        for series in losses:
            before = beginnings.get(series.key, Beginning())
            columns, beginnings[series.key] = progress(series, before, params.warmup, 2 * params.window)
            mean = series.trailing(params.window, lambda windows: windows.mean(axis=1))
            constant_loss = own_baselines(constant_prediction.at(baselines, series.steps), series.function)
            start = np.where(np.isnan(columns.start), np.nan, np.fmin(columns.start, constant_loss))
            with np.errstate(invalid="ignore"):
                is_back = (mean >= params.back * start) & (columns.lowest <= params.fallen * start)
                is_down = mean < params.back * start
            lasts, courses[series.key] = _lasts(
                params, courses.get(series.key, LossCourse()), columns.seen, is_back, is_down
            )
            if not lasts.any():
                continue
            lost = (
                lasts
                & (series.trailing(params.window, falls) != 1)
                & ~columns.signed
                & is_whole(series, names)
            )
            for index in map(int, np.flatnonzero(lost)):
                row = int(series.rows[index])
                message = (
                    f"{series.name} is {mean[index]:.4g} on average, it began at {columns.start[index]:.4g} and "
                    f"had come down to {columns.lowest[index]:.4g}"
                )
                findings[row] = finding_at(
                    self.name,
                    block,
                    row,
                    value=float(mean[index]),
                    threshold=float(params.back * start[index]),
                    message=message,
                )
        state = LostProgressState(series=beginnings, courses=courses, names=names, labels=labels)
        return state, [findings[row] for row in sorted(findings)]


def _lasts(
    params: LostProgressParams,
    course: LossCourse,
    seen: NDArray[np.int64],
    is_back: NDArray[np.bool_],
    is_down: NDArray[np.bool_],
) -> tuple[NDArray[np.bool_], LossCourse]:
    """Return the rows at which the loss has been back for long enough."""
    learned, away = course
    lasts = np.zeros(len(seen), np.bool_)
    for index, (number, back, down) in enumerate(
        zip(seen.tolist(), is_back.tolist(), is_down.tolist(), strict=True)
    ):
        away = away + 1 if back else 0
        if down and not learned:
            learned = number
        lasts[index] = away >= max(params.lasting, min(learned, _LONGEST))
    return lasts, LossCourse(learned, away)
