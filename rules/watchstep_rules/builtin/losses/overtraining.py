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

    patience_train: int = Field(
        500, ge=1, description="Training losses in a row without an improvement: that is too long."
    )
    patience_validation: int = Field(20, ge=1, description="The same for evaluations.")
    delta: float = Field(0.01, ge=0, description="By how much a loss must fall below its best to improve …")
    as_share: bool = Field(True, description="… as a share of that best; or as it stands.")
    window: int = Field(20, ge=1, le=1000, description="Training losses whose mean is held against the best.")


class LossMinimum(NamedTuple):
    """The lowest loss that was an improvement, and how many came since."""

    loss: float
    since: int = 0


class OvertrainingState(State):
    """The best of each loss, by ``train:`` or ``eval:`` and ``name/mode``."""

    best: dict[str, LossMinimum] = Field(default_factory=dict)


class Overtraining(Rule[OvertrainingParams, OvertrainingState]):
    """Fires when a loss has not improved for its patience: ``loss < best - delta * |best|`` never held.

    ``loss`` is the mean of the last ``window`` training losses, or a single evaluation, and ``best`` the last loss that was
    an improvement. It is SageMaker's Overtraining, which takes single losses, 5 steps of training, 10 of validation
    and a delta of 0.01 as it stands: ``window: 1``, ``as_share: false``. A training whose batches differ does not
    improve in each five steps; the defaults here are those of early stopping, a percent (Prechelt, "Early stopping, but
    when?", 1998, stops at a few percent) and patience in the tens of evaluations.

    It says that a training could end, not that anything is wrong with it, and is off by default.
    """

    name = "overtraining"
    summary = "a loss has not improved for long: training on is of no use"
    needs = Needs(collections=("losses",), roles=("loss",))
    merge = "sealed"
    usual_causes = (
        "The training has converged.",
        "The learning rate is too high to get closer, or has become so low that nothing moves.",
        "The model has too little capacity for what is left to learn.",
    )
    what_to_try = (
        "Stop here, and keep the weights of the best evaluation.",
        "Lower the learning rate, or restart it.",
        "Use a larger model, or other data.",
    )

    def lookback(self, params: OvertrainingParams) -> int:
        """The window."""
        return params.window - 1

    def evaluate(
        self, params: OvertrainingParams, state: OvertrainingState, context: Block, block: Block, now: int
    ) -> tuple[OvertrainingState, list[Finding]]:
        """Judge each loss by itself."""
        best, findings = dict(state.best), {}
        for series in loss_series(context, block, "train"):
            means = series.trailing(params.window, lambda windows: windows.mean(axis=1))
            found = _follow(params, best, f"train:{series.key}", means, params.patience_train)
            findings.update(self._said(block, series, means, found))
        for series in loss_series(context, block, "eval"):
            key = f"eval:{series.key}"
            found = _follow(params, best, key, series.values, params.patience_validation)
            findings.update(self._said(block, series, series.values, found))
        return OvertrainingState(best=best), [findings[row] for row in sorted(findings)]

    def _said(
        self, block: Block, series: LossSeries, losses: Floats, found: list[tuple[int, LossMinimum]]
    ) -> dict[int, Finding]:
        said = {}
        for place, best in found:
            row, loss = int(series.rows[place]), float(losses[place])
            message = (
                f"{series.name} is {loss:.4g}; it has not improved on {best.loss:.4g} for {best.since} "
                f"{'evaluations' if block.mode_name(row) == 'eval' else 'records'}"
            )
            said[row] = finding_at(self.name, block, row, value=loss, threshold=best.loss, message=message)
        return said


def _follow(
    params: OvertrainingParams, kept: dict[str, LossMinimum], key: str, losses: Floats, patience: int
) -> list[tuple[int, LossMinimum]]:
    """Places at which the patience is over, and the best then. Losses are few beside rows: one in a step."""
    found = []
    best = kept.get(key)
    for place in map(int, np.flatnonzero(np.isfinite(losses))):
        loss = float(losses[place])
        if best is None or loss < best.loss - params.delta * (abs(best.loss) if params.as_share else 1.0):
            best = LossMinimum(loss)
        else:
            best = best._replace(since=best.since + 1)
        if best.since >= patience:
            found.append((place, best))
    if best is not None:
        kept[key] = best
    return found
