"""A hidden layer of sigmoids or tanhs that sit at their bounds, where they pass hardly any gradient."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.block import Block
from watchstep.statistics import Floats
from watchstep.tensors import TensorInfo
from watchstep_rules.contract import Needs, Params, Rule, State
from watchstep_rules.finding import Finding, finding_at
from watchstep_rules.layers import is_weighted
from watchstep_rules.progress import Progress
from watchstep_rules.steps import whole_steps

_MIDDLE_AND_HALF = {"Sigmoid": (0.5, 0.5), "Tanh": (0.0, 1.0)}
"""Where these activations are steepest, and how far from there their bounds are."""


class SaturatedActivationParams(Params):
    """Parameters of `SaturatedActivation`."""

    slope: float = Field(
        0.1, gt=0, lt=1, description="Mean slope over the greatest one, below which a layer is saturated."
    )
    share: float = Field(
        0.5, gt=0, le=1, description="Share of channels at a bound for every example, from which on it is."
    )
    steps: int = Field(3, ge=1, description="Records in a row through which that holds …")
    examples: int = Field(32, ge=1, description="… and values of each channel that they saw together.")
    converged: float = Field(
        0.1, ge=0, lt=1, description="Share of its first value at which a loss has converged: no fault then."
    )
    stuck: float = Field(
        0.75,
        ge=0,
        lt=1,
        description="The same for an activation that no weighted layer follows: above it, it is judged too.",
    )


class Streak(NamedTuple):
    """Records in a row in which a layer was saturated, and values of each channel in them."""

    steps: int = 0
    values: float = 0.0


class SaturatedActivationState(State):
    """Streaks by ``tensor@worker``, losses by ``loss@worker``, and where in the model the last weighted layer stands."""

    streaks: dict[str, Streak] = Field(default_factory=dict)
    losses: dict[str, Progress] = Field(default_factory=dict)
    last: int = -1


class SaturatedActivation(Rule[SaturatedActivationParams, SaturatedActivationState]):
    """Fires when a hidden layer's sigmoids or tanhs lie at their bounds, record after record, while the loss is not low.

    The slope of tanh at an output y is ``1 - y^2``, that of a sigmoid ``y (1 - y)``; so of the greatest slope the mean
    over all outputs is, exactly::

        slope = 1 - mean(((y - middle) / half) ^ 2)

    A layer is saturated where that is below 0.1, or where half of its channels are within one percent of a bound for
    every example (SageMaker's SaturatedActivation asks for half of the nodes). Saturation of hidden layers early in
    training is what Glorot and Bengio (2010) found to stop learning. An activation after the last weighted layer is
    left alone once the loss has come down by a quarter: the output of a classifier that is sure lies at a bound, that
    of a network whose targets lie beyond the bounds does so too, and its loss stays where it was. So is any layer once the loss is down to a
    tenth of its start: units that have become switches are how such a network represents what it learnt.
    """

    name = "saturated_activation"
    summary = "a hidden layer's sigmoids or tanhs stay at their bounds"
    needs = Needs(collections=("activations", "losses"), roles=("output", "loss"), probes=("channels",))
    merge = "sealed"
    params_type = SaturatedActivationParams
    state_type = SaturatedActivationState

    def evaluate(
        self,
        params: SaturatedActivationParams,
        state: SaturatedActivationState,
        context: Block,  # noqa: ARG002 - the contract's
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[SaturatedActivationState, list[Finding]]:
        """Judge the layers of each step after its losses."""
        streaks, losses, last = dict(state.streaks), dict(state.losses), state.last
        slope, share, values = _slopes(block), *_shares(block)
        findings = []
        for rows in whole_steps(block):
            last = max(
                [last, *(block.info(int(row)).order for row in rows if _is_layer(block.info(int(row))))]
            )
            _follow(losses, block, rows)
            stuck = not any(loss.converged(params.converged) for loss in losses.values())
            at_start = bool(losses) and not any(loss.converged(params.stuck) for loss in losses.values())
            for row in map(int, rows):
                if np.isnan(slope[row]) and np.isnan(share[row]):
                    continue
                name = f"{block.info(row).name}@{block.worker[row]}"
                flat = bool(slope[row] < params.slope) or bool(share[row] >= params.share)
                before = streaks.get(name, Streak())
                hit = flat and (stuck if block.info(row).order < last else at_start)
                streak = Streak(before.steps + 1, before.values + float(values[row])) if hit else Streak()
                streaks[name] = streak
                if streak.steps >= params.steps and streak.values >= params.examples:
                    findings.append(self._finding(params, block, row, (slope[row], share[row]), streak))
        return SaturatedActivationState(streaks=streaks, losses=losses, last=last), findings

    def _finding(
        self,
        params: SaturatedActivationParams,
        block: Block,
        row: int,
        seen: tuple[float, float],
        streak: Streak,
    ) -> Finding:
        slope, share = seen
        since = f"for {streak.steps} records in a row"
        name = block.info(row).name
        if slope < params.slope:
            message = f"{name} has {slope:.2g} of its greatest slope, below {params.slope:.2g} {since}"
            return finding_at(
                self.name, block, row, value=float(slope), threshold=params.slope, message=message
            )
        message = f"{share:.0%} of the channels of {name} are at a bound for every example, {since}"
        return finding_at(self.name, block, row, value=float(share), threshold=params.share, message=message)


def _is_layer(info: TensorInfo) -> bool:
    return info.role == "output" and is_weighted(info)


def _follow(losses: dict[str, Progress], block: Block, rows: NDArray[np.intp]) -> None:
    for row in map(int, rows):
        if block.info(row).role == "loss" and block.statistics.finite[row]:
            name = f"{block.info(row).name}@{block.worker[row]}"
            losses[name] = losses.get(name, Progress()).after(float(block.statistics.mean[row]))


def _slopes(block: Block) -> Floats:
    """Mean slope over the greatest one; NaN for what is no sigmoid or tanh."""
    bounds = [
        _MIDDLE_AND_HALF.get(info.module_type, (np.nan, np.nan)) if info.role == "output" else (np.nan,) * 2
        for info in block.catalogue
    ]
    middle, half = np.array(bounds).reshape(-1, 2)[block.tensor].T
    held = block.statistics
    with np.errstate(invalid="ignore", divide="ignore"):
        from_middle = held.m2 / held.finite + (held.mean - middle) ** 2
        return np.asarray(1 - from_middle / half**2)


def _shares(block: Block) -> tuple[Floats, Floats]:
    """Share of saturated channels, and how many values there are of each; NaN where there are no channels."""
    none = np.full(len(block), np.nan)
    channels, saturated = (block.probes.get(name, none) for name in ("channels", "saturated_channels"))
    with np.errstate(invalid="ignore", divide="ignore"):
        share, values = saturated / channels, block.statistics.count / channels
    return share, np.where(np.isfinite(values), values, np.maximum(block.statistics.count, 0))
