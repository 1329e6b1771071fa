"""A loss that has not fallen by a percentage within so many steps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from pydantic import Field

from watchstep.block import Block
from watchstep_rules.contract import Needs, Params, Rule, State
from watchstep_rules.figures.loss_series import LossSeries, loss_series
from watchstep_rules.finding import Finding, finding_at
from watchstep_rules.loss_not_decreasing import LossNotDecreasing


class SagemakerLossNotDecreasingParams(Params):
    """Parameters of `SagemakerLossNotDecreasing`."""

    num_steps: int = Field(
        10, ge=1, description="Steps at least between two losses that are held against each other."
    )
    diff_percent: float = Field(
        0.1, ge=0, le=100, description="Percent by which the loss must fall between them."
    )
    increase_threshold_percent: float = Field(
        5.0, ge=0, description="Percent by which it may rise between them; the message says when it did."
    )


class Checked(NamedTuple):
    """The loss that the next one is held against."""

    step: int
    loss: float


class SagemakerLossNotDecreasingState(State):
    """The last loss of each series that was checked, by ``name/mode``."""

    checked: dict[str, Checked] = Field(default_factory=dict)


class SagemakerLossNotDecreasing(Rule[SagemakerLossNotDecreasingParams, SagemakerLossNotDecreasingState]):
    """Fires when a loss falls by less than ``diff_percent`` within ``num_steps``, or rises by more than ``increase_threshold_percent``.

    Each loss is looked at whenever ``num_steps`` have passed since it was last: ``100 * (before - loss) / |before|``. That is
    SageMaker's LossNotDecreasing with its defaults, in every mode that has losses (SageMaker: the first of eval,
    train and global, unless told). A loss that rises does not fall, so the second test fires with the first.

    Losses of batches scatter by more than a tenth of a percent, so it fires for most trainings: `loss_not_decreasing` says
    which of these make no progress.
    """

    name = "sagemaker_loss_not_decreasing"
    summary = "a loss has not fallen by a percentage within some steps, as SageMaker tests it"
    needs = Needs(collections=("losses",), roles=("loss",))
    merge = "sealed"
    usual_causes = LossNotDecreasing.usual_causes
    what_to_try = LossNotDecreasing.what_to_try
    params_type = SagemakerLossNotDecreasingParams
    state_type = SagemakerLossNotDecreasingState

    def evaluate(
        self,
        params: SagemakerLossNotDecreasingParams,
        state: SagemakerLossNotDecreasingState,
        context: Block,
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[SagemakerLossNotDecreasingState, list[Finding]]:
        """Judge each loss by itself."""
        checked, findings = dict(state.checked), {}
        for series in [*loss_series(context, block, "train"), *loss_series(context, block, "eval")]:
            known = np.flatnonzero(np.isfinite(series.values))
            place = 0
            while place < len(known):
                at = int(known[place])
                step, loss = int(series.steps[at]), float(series.values[at])
                before = checked.get(series.key)
                if before is not None and step - before.step < params.num_steps:
                    place = int(np.searchsorted(series.steps[known], before.step + params.num_steps))
                    continue
                if before is not None and (found := self._judge(params, block, series, at, before)):
                    findings[int(series.rows[at])] = found
                checked[series.key] = Checked(step, loss)
                place += 1
        return SagemakerLossNotDecreasingState(checked=checked), [findings[row] for row in sorted(findings)]

    def _judge(
        self,
        params: SagemakerLossNotDecreasingParams,
        block: Block,
        series: LossSeries,
        at: int,
        before: Checked,
    ) -> Finding | None:
        loss = float(series.values[at])
        fall = before.loss - loss
        fallen = (
            100 * fall / abs(before.loss) if before.loss else float(np.sign(fall)) * np.inf if fall else 0.0
        )
        if fallen >= params.diff_percent and -fallen <= params.increase_threshold_percent:
            return None
        rises = -fallen > params.increase_threshold_percent
        limit = params.increase_threshold_percent if rises else params.diff_percent
        what = (
            f"risen by {-fallen:.3g} %, more than {limit:g} %"
            if rises
            else f"fallen by {fallen:.3g} %, less than {limit:g} %"
        )
        message = f"{series.name} has {what}, since step {before.step}: from {before.loss:.4g} to {loss:.4g}"
        return finding_at(
            self.name,
            block,
            int(series.rows[at]),
            value=float(-fallen if rises else fallen),
            threshold=limit,
            message=message,
        )
