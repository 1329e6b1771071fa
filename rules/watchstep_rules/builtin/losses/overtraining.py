"""A loss that has not improved for so long that training on is of no use."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from pydantic import Field

from watchstep.format.block import Block
from watchstep.format.statistics import Floats
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.loss_series import LossSeries, loss_series


class OvertrainingParams(Params):
    """Parameters of `Overtraining`."""

    patience_train: int = Field(500, ge=1, description="Consecutive training losses without an improvement.")
    patience_validation: int = Field(20, ge=1, description="Consecutive evaluations without an improvement.")
    delta: float = Field(0.01, ge=0, description="Fall below the minimum that counts as an improvement.")
    as_share: bool = Field(True, description="Whether delta is a share of the minimum instead of absolute.")
    window: int = Field(
        20, ge=1, le=1000, description="Number of training losses over which the mean is taken."
    )


class LossMinimum(NamedTuple):
    """The lowest loss that was an improvement, and the number of losses since."""

    loss: float
    since: int = 0


class OvertrainingState(State):
    """State of `Overtraining`: the minimum of each loss, by ``train:`` or ``eval:`` and ``name/mode``."""

    best: dict[str, LossMinimum] = Field(default_factory=dict)


class Overtraining(Rule[OvertrainingParams, OvertrainingState]):
    """Fires when a loss has not improved for its patience: ``loss < best - delta * |best|`` was never true.

    ``loss`` is the mean of the last ``window`` training losses, or a single evaluation, and ``best`` is the last loss that was an
    improvement. This is SageMaker's Overtraining, which uses single losses, 5 training steps, 10 validation steps and an absolute delta of
    0.01: ``window: 1``, ``as_share: false``. A training with varying batches does not improve every five steps. The defaults are those of
    early stopping: one percent (Prechelt, "Early stopping, but when?", 1998, stops at a few percent) and a patience of tens of evaluations.

    The rule reports that a training could end, not a fault, and is off by default.
    """

    name = "overtraining"
    summary = "a loss has not improved for a long time: further training is of no use"
    needs = Needs(collections=("losses",), roles=("loss",))
    merge = "watermark"
    usual_causes = (
        "The training has converged.",
        "The learning rate is too high to converge further, or has become too low to make progress.",
        "The model has too little capacity to learn more.",
    )
    what_to_try = (
        "Stop here, and keep the weights of the best evaluation.",
        "Lower the learning rate, or restart it.",
        "Use a larger model, or other data.",
    )

    def lookback(self, params: OvertrainingParams) -> int:
        """Return the number of losses before the newest in the window."""
        return params.window - 1

    def evaluate(
        self, params: OvertrainingParams, state: OvertrainingState, context: Block, block: Block, now: int
    ) -> tuple[OvertrainingState, list[Finding]]:
        """Evaluate each loss independently."""
        best, findings = dict(state.best), {}
        for series in loss_series(context, block, "train"):
            means = series.trailing(params.window, lambda windows: windows.mean(axis=1))
            expired = _follow(params, best, f"train:{series.key}", means, params.patience_train)
            findings.update(self._findings(block, series, means, expired))
        for series in loss_series(context, block, "eval"):
            key = f"eval:{series.key}"
            expired = _follow(params, best, key, series.values, params.patience_validation)
            findings.update(self._findings(block, series, series.values, expired))
        return OvertrainingState(best=best), [findings[row] for row in sorted(findings)]

    def _findings(
        self, block: Block, series: LossSeries, losses: Floats, expired: list[tuple[int, LossMinimum]]
    ) -> dict[int, Finding]:
        findings = {}
        for index, best in expired:
            row, loss = int(series.rows[index]), float(losses[index])
            message = (
                f"{series.name} is {loss:.4g}; it has not improved on {best.loss:.4g} for {best.since} "
                f"{'evaluations' if block.mode_name(row) == 'eval' else 'records'}"
            )
            findings[row] = finding_at(
                self.name, block, row, value=loss, threshold=best.loss, message=message
            )
        return findings


def _follow(
    params: OvertrainingParams, minimums: dict[str, LossMinimum], key: str, losses: Floats, patience: int
) -> list[tuple[int, LossMinimum]]:
    """Return the indices at which the patience has expired, and the minimum at each. Losses are few compared with rows: one per step."""
    expired = []
    best = minimums.get(key)
    for index in map(int, np.flatnonzero(np.isfinite(losses))):
        loss = float(losses[index])
        if best is None or loss < best.loss - params.delta * (abs(best.loss) if params.as_share else 1.0):
            best = LossMinimum(loss)
        else:
            best = best._replace(since=best.since + 1)
        if best.since >= patience:
            expired.append((index, best))
    if best is not None:
        minimums[key] = best
    return expired
