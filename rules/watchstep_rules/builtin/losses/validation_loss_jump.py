"""A validation loss that jumps to several times its level, and stays there."""

from __future__ import annotations

import math
from typing import NamedTuple

from pydantic import Field

from watchstep.format.block import Block
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.loss_series import NOTHING, first_steps, is_whole, loss_series

_LONGEST = 50
"""Largest required duration of a jump in evaluations, however long the model took to learn at first."""


class ValidationLossJumpParams(Params):
    """Parameters of `ValidationLossJump`."""

    window: int = Field(
        3, ge=1, le=100, description="Number of evaluations before the jump; the highest is the level."
    )
    lasting: int = Field(
        4,
        ge=1,
        le=100,
        description="Consecutive evaluations above the bar; more if the model took longer to learn at first.",
    )
    warmup: int = Field(5, ge=2, le=1000, description="Fewest evaluations before the jump.")
    fallen: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="Share of its first value to which the level must have fallen, so that the model had learned.",
    )
    rise: float = Field(
        4.0, gt=1, description="Ratio of the loss to the level, and of its rise to the largest earlier rise."
    )
    of_first: float = Field(0.25, gt=0, description="Share of its first value that the loss must reach.")
    falls: float = Field(
        0.9, gt=0, le=1, description="Share of the lowest since the jump below which the loss still falls."
    )


class ValidationJump(NamedTuple):
    """Consecutive evaluations above a bar.

    Attributes:
        level: highest evaluation of the window before them.
        bar: loss that they all reach.
        length: number of evaluations.
        lowest: lowest of the evaluations.
        highest: highest of the evaluations.
        fired: whether the alert has fired.
    """

    level: float
    bar: float
    length: int
    lowest: float
    highest: float
    fired: bool


class Evaluations(NamedTuple):
    """The past of a series; evaluations that are not finite are ignored.

    Attributes:
        seen: number of evaluations so far.
        first: first value; 0 before it.
        signed: whether a value was negative.
        learned: number of the first evaluation at which the loss had fallen; 0 before it.
        recent: last ``window`` values, oldest first.
        ratio: largest ratio of a value to the highest of the window before it; at least 1.
        rise: largest difference between these; at least 0.
        jump: values since the loss jumped; None if it is below the bar.
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
    """State of `ValidationLossJump`: the past of each series by ``name/mode``, and the step of each loss's first row."""

    series: dict[str, Evaluations] = Field(default_factory=dict)
    names: dict[str, int] = Field(default_factory=dict)


class ValidationLossJump(Rule[ValidationLossJumpParams, ValidationLossJumpState]):
    """Fires when a validation loss that had fallen jumps to several times its level, and stays there.

    With ``level`` the highest of the last ``window`` evaluations, ``first`` the first evaluation, and ``ratio`` and ``difference`` the
    largest so far between an evaluation and the highest of the ``window`` before it (at least 1 and 0), the loss jumps if ``level <= fallen
    * first``, and an evaluation is at least the largest of::

        rise * ratio * level,    level + rise * difference,    of_first * first

    The alert fires when the loss has been at this bar or above for ``lasting`` consecutive evaluations, and for as many as it took at first
    to fall to ``fallen * first`` (50 at most), and does not fall: the newest evaluation is at least ``falls`` times the lowest since the
    jump. A model recovers from a spike, or learns another task, in about the time that it took to learn at first. The alert lasts until the
    loss is below the bar. At least ``warmup`` evaluations precede the jump. A noisy series, such as that of a few randomly drawn examples, or
    one with spikes, has large earlier ratios and differences, and therefore needs a larger jump.

    The training loss does not show a fault of the training data that is easy to learn: batches sorted by class, padding that is counted as a
    target, the same batch repeatedly. The validation data do not change, so their loss shows that the model has lost what it had learned.
    `overfit` detects a slow rise; `lost_progress` and `loss_spike` judge the training loss.

    Not reported are spikes, losses that were ever below zero, a first value below 1e-6, and one of several validation losses without the name
    of a total loss.
    """

    name = "validation_loss_jump"
    summary = "the validation loss had fallen, jumps to several times its level, and stays there"
    needs = Needs(collections=("losses",), roles=("loss",))
    merge = "watermark"
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
        "Harder validation data or a harder task on purpose, from a model that lost what it had learned.",
    )

    def lookback(self, params: ValidationLossJumpParams) -> int:
        """Return 0, because the state contains the window."""
        return 0

    def evaluate(
        self,
        params: ValidationLossJumpParams,
        state: ValidationLossJumpState,
        context: Block,
        block: Block,
        now: int,
    ) -> tuple[ValidationLossJumpState, list[Finding]]:
        """Evaluate each validation loss independently."""
        losses = loss_series(context, block, "eval")
        names = first_steps(state.names, losses)
        past, findings = dict(state.series), {}
        for series in losses:
            evaluations = past.get(series.key, Evaluations())
            for row, loss, is_total in zip(
                series.rows.tolist(), series.values.tolist(), is_whole(series, names).tolist(), strict=True
            ):
                if not math.isfinite(loss):
                    continue
                evaluations = _after(params, evaluations, loss)
                jump = evaluations.jump
                if jump is None or not jump.fired or not is_total:
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
    """Add an evaluation."""
    seen, first = past.seen + 1, past.first if past.seen else loss
    learned = past.learned or (seen if loss <= params.fallen * first else 0)
    after = past._replace(
        seen=seen,
        first=first,
        signed=past.signed or loss < 0,
        learned=learned,
        recent=(*past.recent, loss)[-params.window :],
        jump=None,
    )
    if after.signed:
        return after
    level = max(past.recent, default=0.0)
    jump = past.jump
    if jump is None and _had_learned(params, past, level):
        bar = max(params.rise * past.ratio * level, level + params.rise * past.rise, params.of_first * first)
        jump = ValidationJump(level, bar, 0, math.inf, 0.0, fired=False)
    if jump is not None and loss >= jump.bar:
        length, falls = jump.length + 1, loss < params.falls * jump.lowest
        lasts = length >= max(params.lasting, min(learned, _LONGEST))
        return after._replace(
            jump=jump._replace(
                length=length,
                lowest=min(jump.lowest, loss),
                highest=max(jump.highest, loss),
                fired=jump.fired or (lasts and not falls),
            )
        )
    if past.jump is not None:
        # The loss recovered. A healthy training has such spikes, so the next jump must be larger than this one.
        level, loss = past.jump.level, past.jump.highest
    if len(past.recent) < params.window:
        return after
    ratio = loss / level if level > 0 else 1.0
    return after._replace(ratio=max(past.ratio, ratio), rise=max(past.rise, loss - level))


def _had_learned(params: ValidationLossJumpParams, past: Evaluations, level: float) -> bool:
    return (
        past.seen >= max(params.warmup, params.window)
        and past.first > NOTHING
        and level <= params.fallen * past.first
    )
