"""A loss that has not fallen by a percentage within so many steps."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block
from watchstep.format.tensors import LOSSES, TensorInfo
from watchstep_rules.builtin.losses.loss_not_decreasing import LossNotDecreasing
from watchstep_rules.builtin.sagemaker.amazon import ModeName, ScopedParams, is_named
from watchstep_rules.rule import Finding, Needs, Rule, State, finding_at
from watchstep_rules.signals.ranges.reference import lowest_workers
from watchstep_rules.signals.tensor_selection import rows_where

_ORDER = ("eval", "train")
"""Of several modes the first counts; others are Amazon's GLOBAL."""


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
    """The loss that the next one is held against."""

    step: int
    loss: float


class SagemakerLossNotDecreasingState(State):
    """The last loss of each series that was checked, by ``name/mode``, and the modes that had losses so far."""

    checked: dict[str, ReferenceLoss] = Field(default_factory=dict)
    modes: tuple[str, ...] = ()


class SagemakerLossNotDecreasing(Rule[SagemakerLossNotDecreasingParams, SagemakerLossNotDecreasingState]):
    """Fires when a loss falls by less than ``diff_percent`` within ``num_steps``, or rises by more than ``increase_threshold_percent``.

    Each loss is looked at whenever ``num_steps`` have passed since it was last: ``100 * (before - loss) / |before|``. That is
    SageMaker's LossNotDecreasing with its defaults. Without a ``mode`` losses of the mode EVAL are judged once there are some, before
    that those of TRAIN, and others only where there are neither. Only single numbers are losses. A loss that rises does not
    fall, so the second test fires with the first.

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

    def needed(self, params: SagemakerLossNotDecreasingParams) -> Needs:
        """The losses, and what is named."""
        return params.needs_of(self.needs)

    def evaluate(
        self,
        params: SagemakerLossNotDecreasingParams,
        state: SagemakerLossNotDecreasingState,
        context: Block,  # noqa: ARG002 - the contract's
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[SagemakerLossNotDecreasingState, list[Finding]]:
        """Judge each loss by itself, step by step."""
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
                if before is not None and (found := self._judge(params, block, row, before)):
                    findings[row] = found
        state = SagemakerLossNotDecreasingState(checked=checked, modes=tuple(sorted(modes)))
        return state, [findings[row] for row in sorted(findings)]

    def _judge(
        self, params: SagemakerLossNotDecreasingParams, block: Block, row: int, before: ReferenceLoss
    ) -> Finding | None:
        loss = float(block.statistics.mean[row])
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
        message = f"{block.info(row).name} has {what}, since step {before.step}: from {before.loss:.4g} to {loss:.4g}"
        return finding_at(
            self.name,
            block,
            row,
            value=float(-fallen if rises else fallen),
            threshold=limit,
            message=message,
        )


def _losses(params: SagemakerLossNotDecreasingParams, block: Block) -> NDArray[np.intp]:
    """Rows of losses that are numbers, each of the lowest worker that has it."""
    collections = (*(params.collection_names or ()), *((LOSSES,) if params.use_losses_collection else ()))
    chosen = rows_where(block, is_named, collections, params.tensor_regex or ()) & rows_where(
        block, _is_scalar
    )
    finite = (block.statistics.nonfinite == 0) & (block.statistics.count > 0)
    return np.flatnonzero(chosen & finite & lowest_workers(block))


def _is_scalar(info: TensorInfo) -> bool:
    return info.role in ("loss", "metric") or info.shape in ((), (1,))


def _by_step(block: Block, rows: NDArray[np.intp]) -> list[list[int]]:
    """Rows of each step, steps ascending."""
    rows = rows[np.argsort(block.step[rows], kind="stable")]
    parts = np.split(rows, np.flatnonzero(np.diff(block.step[rows])) + 1)
    return [part.tolist() for part in parts if len(part)]


def _is_in_mode(params: SagemakerLossNotDecreasingParams, mode: str, seen: set[str]) -> bool:
    if params.mode is not None:
        return params.mode in ("GLOBAL", mode.upper())
    first = next((one for one in _ORDER if one in seen), None)
    return first is None or mode == first
