"""SageMaker rules about losses and progress: loss not decreasing, overfit, overtraining and stalled training."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from watchstep.format.block import Block
from watchstep.format.tensors import LOSSES, TensorInfo
from watchstep_rules.builtin.losses.loss_not_decreasing import LossNotDecreasing
from watchstep_rules.builtin.losses.overfit import Overfit
from watchstep_rules.builtin.losses.overtraining import Overtraining, OvertrainingParams
from watchstep_rules.builtin.sagemaker.parameters import (
    AmazonParams,
    ModeName,
    Patterns,
    ScopedParams,
    Translated,
    is_matched,
    is_named,
)
from watchstep_rules.builtin.system.stalled_training import (
    StalledTraining,
    StalledTrainingParams,
)
from watchstep_rules.rule import Finding, Needs, Rule, State, finding_at
from watchstep_rules.signals.loss_series import loss_series
from watchstep_rules.signals.reference import lowest_workers
from watchstep_rules.signals.tensor_selection import has_role, rows_where

_ORDER = ("eval", "train")
"""Priority of modes: the first one with losses counts. Other modes are GLOBAL in SageMaker."""


class SagemakerLossNotDecreasingParams(ScopedParams):
    """Parameters of `SagemakerLossNotDecreasing`."""

    amazon: ClassVar[str] = "LossNotDecreasing"
    use_losses_collection: bool = Field(
        True, description="Judge the collection losses, besides what is named."
    )
    num_steps: int = Field(
        10, ge=1, description="Steps at least between two losses that are held against each other."
    )
    diff_percent: float = Field(
        0.1, ge=0, le=100, description="Percent by which the loss must fall between them."
    )
    increase_threshold_percent: float = Field(
        5.0, ge=0, description="Percent by which it may rise between them; the message says when it did."
    )
    mode: ModeName | None = Field(
        None,
        description="TRAIN, EVAL, or GLOBAL for all; the first of EVAL and TRAIN that has losses if null.",
    )


class ReferenceLoss(NamedTuple):
    """The loss that the next one is compared with."""

    step: int
    loss: float


class SagemakerLossNotDecreasingState(State):
    """The last loss of each series that was checked, by ``name/mode``, and the modes that had losses so far."""

    checked: dict[str, ReferenceLoss] = Field(default_factory=dict)
    modes: tuple[str, ...] = ()


class SagemakerLossNotDecreasing(Rule[SagemakerLossNotDecreasingParams, SagemakerLossNotDecreasingState]):
    """Fires when a loss falls by less than ``diff_percent`` within ``num_steps``, or rises by more than ``increase_threshold_percent``.

    Each loss is judged whenever ``num_steps`` have passed since it was last: ``100 * (before - loss) / |before|``. That is
    SageMaker's LossNotDecreasing with its defaults. Without a ``mode`` losses of the mode EVAL are judged once there are some, before
    that those of TRAIN, and others only where there are neither. Only single numbers are losses. A loss that rises does not
    fall, so the second test fires with the first.

    Losses of batches scatter by more than a tenth of a percent, so it fires for most trainings: `loss_not_decreasing` says
    which of these make no progress.
    """

    name = "sagemaker_loss_not_decreasing"
    summary = "a loss has not fallen by a percentage within some steps, by SageMaker's criterion"
    needs = Needs(collections=("losses",), roles=("loss",))
    merge = "watermark"
    usual_causes = LossNotDecreasing.usual_causes
    what_to_try = LossNotDecreasing.what_to_try

    def needed(self, params: SagemakerLossNotDecreasingParams) -> Needs:
        """Return the needs: the losses, and the named tensors."""
        return params.needs_of(self.needs)

    def evaluate(
        self,
        params: SagemakerLossNotDecreasingParams,
        state: SagemakerLossNotDecreasingState,
        context: Block,
        block: Block,
        now: int,
    ) -> tuple[SagemakerLossNotDecreasingState, list[Finding]]:
        """Evaluate each loss independently, step by step."""
        checked, modes, findings = dict(state.checked), set(state.modes), {}
        for step_rows in _by_step(block, _losses(params, block)):
            modes.update(block.mode_name(row) for row in step_rows)
            for row in step_rows:
                if not _is_in_mode(params, block.mode_name(row), modes):
                    continue
                mode = "" if params.mode == "GLOBAL" else f"/{block.mode_name(row)}"
                key, loss = f"{block.info(row).name}{mode}", float(block.statistics.mean[row])
                step, before = int(block.step[row]), checked.get(key)
                if before is not None and step - before.step < params.num_steps:
                    continue
                checked[key] = ReferenceLoss(step, loss)
                if before is not None and (finding := self._judge(params, block, row, before)):
                    findings[row] = finding
        state = SagemakerLossNotDecreasingState(checked=checked, modes=tuple(sorted(modes)))
        return state, [findings[row] for row in sorted(findings)]

    def _judge(
        self, params: SagemakerLossNotDecreasingParams, block: Block, row: int, before: ReferenceLoss
    ) -> Finding | None:
        loss = float(block.statistics.mean[row])
        fall = before.loss - loss
        fall_percent = (
            100 * fall / abs(before.loss) if before.loss else float(np.sign(fall)) * np.inf if fall else 0.0
        )
        if fall_percent >= params.diff_percent and -fall_percent <= params.increase_threshold_percent:
            return None
        rises = -fall_percent > params.increase_threshold_percent
        limit = params.increase_threshold_percent if rises else params.diff_percent
        change = (
            f"risen by {-fall_percent:.3g} %, more than {limit:g} %"
            if rises
            else f"fallen by {fall_percent:.3g} %, less than {limit:g} %"
        )
        message = f"{block.info(row).name} has {change}, since step {before.step}: from {before.loss:.4g} to {loss:.4g}"
        return finding_at(
            self.name,
            block,
            row,
            value=float(-fall_percent if rises else fall_percent),
            threshold=limit,
            message=message,
        )


def _losses(params: SagemakerLossNotDecreasingParams, block: Block) -> NDArray[np.intp]:
    """Return the rows of finite losses, each of the lowest worker that has it."""
    collections = (*(params.collection_names or ()), *((LOSSES,) if params.use_losses_collection else ()))
    chosen = rows_where(block, is_named, collections, params.tensor_regex or ()) & rows_where(
        block, _is_scalar
    )
    finite = (block.statistics.nonfinite == 0) & (block.statistics.count > 0)
    return np.flatnonzero(chosen & finite & lowest_workers(block))


def _is_scalar(info: TensorInfo) -> bool:
    return info.role in ("loss", "metric") or info.shape in ((), (1,))


def _by_step(block: Block, rows: NDArray[np.intp]) -> list[list[int]]:
    """Return the rows of each step, steps ascending."""
    rows = rows[np.argsort(block.step[rows], kind="stable")]
    parts = np.split(rows, np.flatnonzero(np.diff(block.step[rows])) + 1)
    return [part.tolist() for part in parts if len(part)]


def _is_in_mode(params: SagemakerLossNotDecreasingParams, mode: str, seen: set[str]) -> bool:
    if params.mode is not None:
        return params.mode in ("GLOBAL", mode.upper())
    first = next((candidate for candidate in _ORDER if candidate in seen), None)
    return first is None or mode == first


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
    evaluation's step, and over the newest of training up to it. Every model that generalizes a little worse than it fits is
    found: `overfit` asks for a validation loss that rises.
    """

    name = "sagemaker_overfit"
    summary = "the validation loss is above the training loss, by SageMaker's criterion"
    needs = Needs(collections=("losses",), roles=("loss",))
    merge = "watermark"
    usual_causes = Overfit.usual_causes
    what_to_try = Overfit.what_to_try

    def evaluate(
        self,
        params: SagemakerOverfitParams,
        state: SagemakerOverfitState,
        context: Block,
        block: Block,
        now: int,
    ) -> tuple[SagemakerOverfitState, list[Finding]]:
        """Compare each evaluation with the training losses of its step."""
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
    """Return row and loss by step, kind and ``name/mode``."""
    losses: dict[int, _Losses] = {}
    for kind in ("train", "eval"):
        for series in loss_series(context, block, kind):
            for index in _finite(series.values):
                losses_of_kind = losses.setdefault(int(series.steps[index]), {}).setdefault(kind, {})
                losses_of_kind[series.key] = (int(series.rows[index]), float(series.values[index]))
    return losses


def _finite(values: NDArray[np.float64]) -> list[int]:
    indices: list[int] = np.flatnonzero(np.isfinite(values)).tolist()
    return indices


class SagemakerOvertrainingParams(AmazonParams):
    """Parameters of `SagemakerOvertraining`."""

    amazon: ClassVar[str] = "Overtraining"
    patience_train: int = Field(5, ge=1, description="Training losses in a row without an improvement.")
    patience_validation: int = Field(10, ge=1, description="Validation losses in a row without one.")
    delta: float = Field(0.01, ge=0, description="By how much a loss must fall below the best one.")


class SagemakerOvertraining(Translated[SagemakerOvertrainingParams]):
    """Fires when ``loss < best - delta`` has not held for ``patience_train`` or ``patience_validation`` losses in a row.

    SageMaker's Overtraining, on single losses and with a delta as it stands. ``best`` is the last loss that was an improvement. The
    losses of a training differ by batch: `overtraining` takes means, and a delta as a share.
    """

    name = "sagemaker_overtraining"
    summary = "a loss has not improved for some steps, by SageMaker's criterion"
    inner = Overtraining()

    def translated(self, params: SagemakerOvertrainingParams) -> OvertrainingParams:
        """Return the parameters for single losses and an absolute delta."""
        return OvertrainingParams(
            patience_train=params.patience_train,
            patience_validation=params.patience_validation,
            delta=params.delta,
            as_share=False,
            window=1,
        )


class SagemakerStalledTrainingParams(AmazonParams):
    """Parameters of `SagemakerStalledTraining`."""

    amazon: ClassVar[str] = "StalledTrainingRule"
    threshold: float = Field(1800.0, gt=0, description="Seconds without a row that are too long.")
    stop_training_on_fire: bool = Field(
        False, description="Only false: a rule config stops a job by its actions, not by a parameter."
    )
    training_job_name_prefix: str = Field(
        "", max_length=256, description="Accepted and without effect: a run knows its job."
    )

    @field_validator("stop_training_on_fire")
    @classmethod
    def _stops_by_action(cls, value: bool) -> bool:
        if value:
            raise ValueError(
                "true: give the rule config 'actions: [stop]' instead, which an operator must be allowed to do"
            )
        return value


class SagemakerStalledTraining(Translated[SagemakerStalledTrainingParams]):
    """Fires when no row of any worker came for ``threshold`` seconds by the service's clock: SageMaker's StalledTrainingRule.

    Of the time between two evaluations no more than a third of the threshold counts, so that a service that was down
    makes no silence. `stalled_training` also asks for a silence longer than the pauses that the run has come back from.
    """

    name = "sagemaker_stalled_training"
    summary = "nothing was recorded for some time, by SageMaker's criterion"
    inner = StalledTraining()

    def translated(self, params: SagemakerStalledTrainingParams) -> StalledTrainingParams:
        """Return the parameters that ignore earlier pauses."""
        return StalledTrainingParams(threshold=params.threshold, patience=0.0)
