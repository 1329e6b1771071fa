"""A training loss that has jumped far above its recent level, and stays there."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from watchstep.block import Block
from watchstep_rules.contract import Needs, Params, Rule, State
from watchstep_rules.figures.loss_series import first_steps, is_whole, loss_series
from watchstep_rules.figures.robust import medians, robust_spread
from watchstep_rules.finding import Finding, finding_at


class LossSpikeParams(Params):
    """Parameters of `LossSpike`."""

    window: int = Field(50, ge=2, le=1000, description="Losses before the jump, whose median is the level.")
    lasting: int = Field(5, ge=1, le=1000, description="Losses in a row that are above; 1 for any spike.")
    deviations: float = Field(
        10.0, gt=0, description="Robust standard deviations by which they are above the level …"
    )
    rise: float = Field(2.0, gt=1, description="… which they also are so many times …")
    of_first: float = Field(0.25, ge=0, description="… and above by this share of the first loss.")


class LossSpikeState(State):
    """The first finite loss of each series, by ``name/mode``; the step of each loss's first row."""

    first: dict[str, float] = Field(default_factory=dict)
    names: dict[str, int] = Field(default_factory=dict)


class LossSpike(Rule[LossSpikeParams, LossSpikeState]):
    """Fires when the last ``lasting`` training losses are all far above the level of the ``window`` before them.

    With ``level`` the median of the window and ``spread`` 1.4826 times the median of distances from it (which is the
    standard deviation, were they normal, and does not notice single outliers: Hampel 1974), each of the last losses is at
    least ``level`` plus the largest of::

        deviations * spread,    (rise - 1) * |level|,    of_first * |first|

    Large models are known for losses that jump within a few steps, after which some recover and some do not (Chowdhery
    et al., "PaLM", 2022, section 5.1; Zhang et al., "OPT", 2022, section 2.5); both restart from a checkpoint before the
    jump and leave out the batches that it happened at. A loss that comes back within ``lasting`` is left alone: one odd
    batch does that. ``lasting: 1`` tells of any. The share of the first loss leaves alone what happens close to zero.

    Of several losses only the one whose name says that it is the whole is judged. Off by default: a learning rate that
    restarts, a new phase of a schedule, or harder data do the same on purpose.
    """

    name = "loss_spike"
    summary = "the training loss jumps far above its recent level, and stays there"
    needs = Needs(collections=("losses",), roles=("loss",))
    merge = "sealed"
    usual_causes = (
        "The learning rate is too high for where the training has come to.",
        "A batch of odd data drove the weights away: corrupted, unnormalised or wrongly labelled examples.",
        "Adam's second moments were small when large gradients came back.",
    )
    what_to_try = (
        "Restart from a checkpoint before the jump, with a lower rate or without the batches of these steps.",
        "Clip gradients by their norm.",
        "Lower Adam's beta2 (0.95) or raise its epsilon.",
    )
    params_type = LossSpikeParams
    state_type = LossSpikeState

    def lookback(self, params: LossSpikeParams) -> int:
        """The window and what is held against it."""
        return params.window + params.lasting - 1

    def evaluate(
        self,
        params: LossSpikeParams,
        state: LossSpikeState,
        context: Block,
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[LossSpikeState, list[Finding]]:
        """Judge each training loss by itself."""
        losses = loss_series(context, block, "train")
        names = first_steps(state.names, losses)
        first, findings = dict(state.first), {}
        width = params.window + params.lasting
        for series in losses:
            known = series.values[np.isfinite(series.values)]
            if len(known):
                first.setdefault(series.key, float(known[0]))
            floor = params.of_first * abs(first.get(series.key, np.inf))
            level = series.trailing(width, lambda windows: medians(windows[:, : params.window]))
            spread = series.trailing(width, lambda windows: robust_spread(windows[:, : params.window]))
            lowest = series.trailing(width, lambda windows: windows[:, params.window :].min(axis=1))
            above = np.maximum(
                np.maximum(params.deviations * spread, (params.rise - 1) * np.abs(level)), floor
            )
            with np.errstate(invalid="ignore"):
                jumped = (lowest >= level + above) & (above > 0) & is_whole(series, names)
            for place in map(int, np.flatnonzero(jumped)):
                row = int(series.rows[place])
                message = (
                    f"{series.name} is {series.values[place]:.4g}, the lowest of the last {params.lasting} is "
                    f"{lowest[place]:.4g}; the median of the {params.window} before is {level[place]:.4g}"
                )
                findings[row] = finding_at(
                    self.name,
                    block,
                    row,
                    value=float(lowest[place]),
                    threshold=float(level[place] + above[place]),
                    message=message,
                )
        return LossSpikeState(first=first, names=names), [findings[row] for row in sorted(findings)]
