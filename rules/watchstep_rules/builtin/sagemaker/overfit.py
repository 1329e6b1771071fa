"""A validation loss above the training loss by more than a share of it."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block
from watchstep_rules.builtin.losses.overfit import Overfit
from watchstep_rules.builtin.sagemaker.amazon import AmazonParams, Patterns, is_matched
from watchstep_rules.rule import Finding, Needs, Rule, State, finding_at
from watchstep_rules.signals.losses.loss_series import loss_series
from watchstep_rules.signals.tensor_selection import has_role, rows_where


class SagemakerOverfitParams(AmazonParams):
    """Parameters of `SagemakerOverfit`."""

    amazon: ClassVar[str] = "Overfit"
    tensor_regex: Patterns | None = Field(None, description="Losses by name; all where it is left out.")
    start_step: int = Field(0, ge=0, description="Evaluations before this step are not judged.")
    patience: int = Field(1, ge=1, le=1000, description="Evaluations in a row that must be above the ratio.")
    ratio_threshold: float = Field(
        0.1, ge=0, description="(validation - training) / training above which it is found."
    )


class SagemakerOverfitState(State):
    """The newest training loss by ``name/mode``; evaluations in a row above the ratio."""

    train: dict[str, float] = Field(default_factory=dict)
    above: int = 0


class SagemakerOverfit(Rule[SagemakerOverfitParams, SagemakerOverfitState]):
    """Fires when ``(validation - training) / training > ratio_threshold`` for ``patience`` evaluations in a row.

    SageMaker's Overfit, with its defaults. Of several losses the means are held against each other: over those of validation at the
    evaluation's step, and over the newest of training up to it. Every model that generalises a little worse than it fits is
    found: `overfit` asks for a validation loss that rises.
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
        """Judge each evaluation beside the training losses of its step."""
        if params.tensor_regex is not None:
            block = block.where(
                rows_where(block, has_role, "loss") & rows_where(block, is_matched, params.tensor_regex)
            )
        train, above, findings = dict(state.train), state.above, []
        losses = _numbers(context, block)
        for step in sorted(losses):
            for key, (_, loss) in losses[step].get("train", {}).items():
                train[key] = loss
            evaluated = losses[step].get("eval", {})
            if not evaluated or not train or step < params.start_step:
                continue
            validation = float(np.mean([loss for _, loss in evaluated.values()]))
            training = float(np.mean(list(train.values())))
            if training == 0:
                continue
            ratio = (validation - training) / training
            above = above + 1 if ratio > params.ratio_threshold else 0
            if above >= params.patience:
                row = min(row for row, _ in evaluated.values())
                message = (
                    f"{block.info(row).name} of validation is {validation:.4g}, that of training {training:.4g}: above it by "
                    f"{ratio:.3g} of it, {params.ratio_threshold:g} at most"
                )
                findings.append(
                    finding_at(
                        self.name, block, row, value=ratio, threshold=params.ratio_threshold, message=message
                    )
                )
        return SagemakerOverfitState(train=train, above=above), findings


_Losses = dict[str, dict[str, tuple[int, float]]]


def _numbers(context: Block, block: Block) -> dict[int, _Losses]:
    """Row and loss by step, kind and ``name/mode``."""
    found: dict[int, _Losses] = {}
    for kind in ("train", "eval"):
        for series in loss_series(context, block, kind):
            for place in _finite(series.values):
                of_kind = found.setdefault(int(series.steps[place]), {}).setdefault(kind, {})
                of_kind[series.key] = (int(series.rows[place]), float(series.values[place]))
    return found


def _finite(values: NDArray[np.float64]) -> list[int]:
    places: list[int] = np.flatnonzero(np.isfinite(values)).tolist()
    return places
