"""A validation loss above the training loss by more than a share of it."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from watchstep.block import Block
from watchstep_rules.contract import Needs, Params, Rule, State
from watchstep_rules.figures.loss_series import LossSeries, loss_series
from watchstep_rules.finding import Finding, finding_at
from watchstep_rules.overfit import Overfit


class SagemakerOverfitParams(Params):
    """Parameters of `SagemakerOverfit`."""

    start_step: int = Field(0, ge=0, description="Evaluations before this step are not judged.")
    patience: int = Field(1, ge=1, le=1000, description="Evaluations in a row that must be above the ratio.")
    ratio_threshold: float = Field(
        0.1, ge=0, description="(validation - training) / training above which it is found."
    )


class SagemakerOverfitState(State):
    """The newest training loss by name; evaluations in a row above the ratio, by ``name/mode``."""

    train: dict[str, float] = Field(default_factory=dict)
    above: dict[str, int] = Field(default_factory=dict)


class SagemakerOverfit(Rule[SagemakerOverfitParams, SagemakerOverfitState]):
    """Fires when ``(validation - training) / training > ratio_threshold`` for ``patience`` evaluations in a row.

    SageMaker's Overfit, with its defaults. The training loss is that of the same name, or the only one, at the newest step up
    to the evaluation's. Every model that generalises a little worse than it fits is found: `overfit` asks for a validation
    loss that rises.
    """

    name = "sagemaker_overfit"
    summary = "the validation loss is above the training loss, as SageMaker tests it"
    needs = Needs(collections=("losses",), roles=("loss",))
    merge = "sealed"
    usual_causes = Overfit.usual_causes
    what_to_try = Overfit.what_to_try
    params_type = SagemakerOverfitParams
    state_type = SagemakerOverfitState

    def evaluate(
        self,
        params: SagemakerOverfitParams,
        state: SagemakerOverfitState,
        context: Block,
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[SagemakerOverfitState, list[Finding]]:
        """Judge each evaluation beside the training loss of its step."""
        train, above, findings = dict(state.train), dict(state.above), {}
        courses = {series.name: series for series in loss_series(context, block, "train")}
        for series in loss_series(context, block, "eval"):
            for at in map(
                int, np.flatnonzero(np.isfinite(series.values) & (series.steps >= params.start_step))
            ):
                seen = _train_at(train, courses, series.name, int(series.steps[at]))
                if seen is None or seen == 0:
                    continue
                ratio = (float(series.values[at]) - seen) / seen
                above[series.key] = above.get(series.key, 0) + 1 if ratio > params.ratio_threshold else 0
                if above[series.key] >= params.patience:
                    message = (
                        f"{series.name} of validation is {series.values[at]:.4g}, that of training {seen:.4g}: above it by "
                        f"{ratio:.3g} of it, {params.ratio_threshold:g} at most"
                    )
                    row = int(series.rows[at])
                    findings[row] = finding_at(
                        self.name, block, row, value=ratio, threshold=params.ratio_threshold, message=message
                    )
        for name, course in courses.items():
            known = course.values[np.isfinite(course.values)]
            if len(known):
                train[name] = float(known[-1])
        state = SagemakerOverfitState(train=train, above=above)
        return state, [findings[row] for row in sorted(findings)]


def _train_at(before: dict[str, float], courses: dict[str, LossSeries], name: str, step: int) -> float | None:
    """The newest training loss up to a step, of this name or the only one."""
    known = dict(before)
    for other, course in courses.items():
        values = course.values[(course.steps <= step) & np.isfinite(course.values)]
        if len(values):
            known[other] = float(values[-1])
    return known.get(name, next(iter(known.values())) if len(known) == 1 else None)
