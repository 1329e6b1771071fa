"""A validation loss that jumps to several times its level, and stays there."""

from __future__ import annotations

import math
from typing import NamedTuple

from pydantic import Field

from watchstep.format.block import Block
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.loss_series import NOTHING, first_steps, is_whole, loss_series

_LONGEST = 50
"""Evaluations that a jump has to last at most, however long the model took to learn at first."""


class ValidationLossJumpParams(Params):
    """Parameters of `ValidationLossJump`."""

    window: int = Field(3, ge=1, le=100, description="Evaluations before the jump; the highest is the level.")
    lasting: int = Field(
        4,
        ge=1,
        le=100,
        description="Evaluations in a row that are above; more where it took longer to learn at first.",
    )
    warmup: int = Field(5, ge=2, le=1000, description="Evaluations before the jump, at least.")
    fallen: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="Share of its first value that the level is at most: the model had learned.",
    )
    rise: float = Field(
        4.0, gt=1, description="How many times the level the loss is, and its rise the largest before."
    )
    of_first: float = Field(0.25, gt=0, description="Share of its first value that the loss is at least.")
    falls: float = Field(
        0.9, gt=0, le=1, description="Share of the lowest since the jump below which the loss still falls."
    )


class ValidationJump(NamedTuple):
    """Evaluations in a row that are above a bar.

    Attributes:
        level: the highest evaluation of the window before them.
        bar: the loss that they all reach.
        length: how many there are.
        lowest: of them.
        highest: of them.
        fired: the alert has begun.
    """

    level: float
    bar: float
    length: int
    lowest: float
    highest: float
    fired: bool


class Evaluations(NamedTuple):
    """What is remembered of a series; evaluations that are not finite are left out.

    Attributes:
        seen: evaluations so far.
        first: the first value; 0 before it.
        signed: a value was below zero.
        learned: the number of the first evaluation at which the loss had fallen; 0 before it.
        recent: the last ``window`` values, oldest first.
        ratio: the largest ratio of a value to the highest of the window before it; at least 1.
        rise: the largest difference of these; at least 0.
        jump: the values since the loss jumped, if it is above.
    """

    seen: int = 0
    first: float = 0.0
    signed: bool = False
    learned: int = 0
    recent: tuple[float, ...] = ()
    ratio: float = 1.0
    rise: float = 0.0
    jump: ValidationJump | None = None


class ValidationLossJumpState(State):
    """The past of each series, by ``name/mode``; the step of each loss's first row."""

    series: dict[str, Evaluations] = Field(default_factory=dict)
    names: dict[str, int] = Field(default_factory=dict)


class ValidationLossJump(Rule[ValidationLossJumpParams, ValidationLossJumpState]):
    """Fires when a validation loss that had fallen jumps to several times its level, and stays there.

    With ``level`` the highest of the last ``window`` evaluations, ``first`` the first evaluation, and ``ratio`` and ``difference``
    the largest so far of an evaluation to the highest of the ``window`` before it (at least 1 and 0), the loss jumps where
    ``level <= fallen * first``, and an evaluation is at least the largest of::

        rise * ratio * level,    level + rise * difference,    of_first * first

    The alert begins when the loss has been at that bar or above for ``lasting`` evaluations in a row, and for as many as it took at
    first to come down to ``fallen * first`` (50 at most), and does not fall: the newest evaluation is at least ``falls`` times
    the lowest since the jump. A model recovers from a spike, or learns another task, in about the time that it took to learn at first. The
    alert lasts until the loss is below the bar. At least ``warmup`` evaluations come before the jump. A series that scatters, as that of a
    few examples drawn anew each time, or one that has spikes, has large earlier ratios and differences, and so needs a larger jump.

    The training loss does not show a fault of the training data that is easy to learn: batches of one class after the other, padding
    that is counted as a target, one batch again and again. The validation data are the same as before, so their loss shows that the model
    has lost what it had learned. `overfit` finds a slow rise, `lost_progress` and `loss_spike` judge the training loss.

    Left alone are spikes, losses that were ever below zero, a first value below 1e-6, and one of several validation losses unless its
    name says that it is the sum.
    """

    name = "validation_loss_jump"
    summary = "the validation loss had fallen, jumps to several times its level, and stays there"
    needs = Needs(collections=("losses",), roles=("loss",))
    merge = "sealed"
    usual_causes = (
        "The training data have changed: sorted or of one class, padding among the targets, shuffled labels, other units.",
        "Updates damage the model: the sign of the loss, a learning rate or a weight decay was changed.",
        "The validation data or their preprocessing have changed.",
    )
    what_to_try = (
        "Look at the training batches between the last good evaluation and the first bad one: their order, labels and padding.",
        "Restart from a checkpoint before the jump.",
        "If the validation data or the task were changed on purpose, silence the alert for this run.",
    )
    cannot_distinguish = (
        "Validation data or a task that are changed on purpose and are harder than before, from a model that came undone.",
    )

    def lookback(self, params: ValidationLossJumpParams) -> int:
        """None: the state holds the window."""
        return 0

    def evaluate(
        self,
        params: ValidationLossJumpParams,
        state: ValidationLossJumpState,
        context: Block,
        block: Block,
        now: int,
    ) -> tuple[ValidationLossJumpState, list[Finding]]:
        """Judge each validation loss by itself."""
        losses = loss_series(context, block, "eval")
        names = first_steps(state.names, losses)
        past, findings = dict(state.series), {}
        for series in losses:
            evaluations = past.get(series.key, Evaluations())
            for row, loss, whole in zip(
                series.rows.tolist(), series.values.tolist(), is_whole(series, names).tolist(), strict=True
            ):
                if not math.isfinite(loss):
                    continue
                evaluations = _after(params, evaluations, loss)
                jump = evaluations.jump
                if jump is None or not jump.fired or not whole:
                    continue
                message = (
                    f"{series.name} on validation data is {loss:.4g}, at least {jump.bar:.4g} for {jump.length} evaluations; "
                    f"it began at {evaluations.first:.4g} and had fallen to {jump.level:.4g}"
                )
                findings[row] = finding_at(
                    self.name, block, row, value=loss, threshold=jump.bar, message=message
                )
            past[series.key] = evaluations
        return ValidationLossJumpState(series=past, names=names), [findings[row] for row in sorted(findings)]


def _after(params: ValidationLossJumpParams, past: Evaluations, loss: float) -> Evaluations:
    """What is remembered after another evaluation."""
    seen, first = past.seen + 1, past.first if past.seen else loss
    learned = past.learned or (seen if loss <= params.fallen * first else 0)
    new = past._replace(
        seen=seen,
        first=first,
        signed=past.signed or loss < 0,
        learned=learned,
        recent=(*past.recent, loss)[-params.window :],
        jump=None,
    )
    if new.signed:
        return new
    level = max(past.recent, default=0.0)
    jump = past.jump
    if jump is None and _had_learned(params, past, level):
        bar = max(params.rise * past.ratio * level, level + params.rise * past.rise, params.of_first * first)
        jump = ValidationJump(level, bar, 0, math.inf, 0.0, fired=False)
    if jump is not None and loss >= jump.bar:
        length, falls = jump.length + 1, loss < params.falls * jump.lowest
        enough = length >= max(params.lasting, min(learned, _LONGEST))
        return new._replace(
            jump=jump._replace(
                length=length,
                lowest=min(jump.lowest, loss),
                highest=max(jump.highest, loss),
                fired=jump.fired or (enough and not falls),
            )
        )
    if past.jump is not None:
        # It came back: a healthy training has such spikes, and the next jump must be larger than this one.
        level, loss = past.jump.level, past.jump.highest
    if len(past.recent) < params.window:
        return new
    ratio = loss / level if level > 0 else 1.0
    return new._replace(ratio=max(past.ratio, ratio), rise=max(past.rise, loss - level))


def _had_learned(params: ValidationLossJumpParams, past: Evaluations, level: float) -> bool:
    return (
        past.seen >= max(params.warmup, params.window)
        and past.first > NOTHING
        and level <= params.fallen * past.first
    )
