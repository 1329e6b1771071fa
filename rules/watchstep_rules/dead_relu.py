"""A layer of rectifiers most of which never fire again."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from pydantic import Field

from watchstep.block import Block
from watchstep_rules.contract import Needs, Params, Rule, State
from watchstep_rules.finding import Finding, finding_at
from watchstep_rules.progress import Progress
from watchstep_rules.steps import whole_steps


class DeadReluParams(Params):
    """Parameters of `DeadRelu`."""

    share: float = Field(0.9, gt=0, le=1, description="Share of dead channels that is a dead layer.")
    silent_share: float = Field(
        0.5, gt=0, le=1, description="The same, where no layer of the model gets any gradient."
    )
    steps: int = Field(3, ge=1, description="Records in a row through which that holds …")
    examples: int = Field(32, ge=1, description="… and values of each channel that they saw together.")
    converged: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="Share of its first value at which a loss has converged, and no gradient is no fault.",
    )


class Streak(NamedTuple):
    """Records in a row of one layer, and values of each channel in them: of a dead layer, and of a silent one."""

    steps: int = 0
    values: float = 0.0
    silent_steps: int = 0
    silent_values: float = 0.0


class DeadReluState(State):
    """Streaks by ``tensor@worker``, workers' losses by ``loss@worker``, and parameters without any gradient."""

    streaks: dict[str, Streak] = Field(default_factory=dict)
    losses: dict[str, Progress] = Field(default_factory=dict)
    silent: dict[str, bool] = Field(default_factory=dict)


class DeadRelu(Rule[DeadReluParams, DeadReluState]):
    """Fires when most channels of a rectifier's output are zero for every example, record after record.

    ``dead_channels / channels`` must reach ``share`` through ``steps`` records in a row that saw ``examples`` values of
    each channel; or half the channels, if meanwhile no weight of the model gets any gradient and the loss is not down
    to a tenth of its start: then learning has died, whatever the other half does.

    Half of all channels is the limit of SageMaker's DeadRelu, which healthy sparse networks pass: of randomly
    initialised units half are off for an example, and of small batches many are off altogether (Glorot, Bordes and
    Bengio 2011 report up to 80 percent zeros in good networks). That is why 90 percent are asked for, and why small
    batches must agree over 32 examples. A layer that is all dead passes no gradient back (Lu et al. 2019, "Dying ReLU
    and Initialization").
    """

    name = "dead_relu"
    summary = "nearly all channels of a rectifier are zero for every example, and stay so"
    needs = Needs(
        collections=("activations", "gradients", "losses"),
        roles=("output", "gradient", "loss"),
        probes=("channels",),
    )
    merge = "sealed"
    params_type = DeadReluParams
    state_type = DeadReluState

    def evaluate(
        self,
        params: DeadReluParams,
        state: DeadReluState,
        context: Block,  # noqa: ARG002 - the contract's
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[DeadReluState, list[Finding]]:
        """Judge the layers of each step after its losses and gradients."""
        streaks, losses, silent = dict(state.streaks), dict(state.losses), dict(state.silent)
        none = np.full(len(block), np.nan)
        channels, dead = (block.probes.get(name, none) for name in ("channels", "dead_channels"))
        held, findings = block.statistics, []
        for rows in whole_steps(block):
            layers = []
            for row in map(int, rows):
                info = block.info(row)
                if info.role == "output":
                    layers += [row] * bool(channels[row] > 0 and np.isfinite(dead[row]))
                elif held.finite[row] == 0:
                    continue
                elif info.role == "loss":
                    name = f"{info.name}@{block.worker[row]}"
                    losses[name] = losses.get(name, Progress()).after(float(held.mean[row]))
                elif len(info.shape) > 1:
                    silent[f"{info.name}@{block.worker[row]}"] = bool(held.abs_sum[row] == 0)
            stuck = not any(loss.converged(params.converged) for loss in losses.values())
            is_silent = bool(silent) and all(silent.values()) and stuck
            for row in layers:
                name = f"{block.info(row).name}@{block.worker[row]}"
                values = float(held.count[row] / channels[row])
                share = float(dead[row] / channels[row])
                streak = streaks[name] = _after(
                    streaks.get(name, Streak()),
                    values,
                    is_dead=share >= params.share,
                    is_silent=share >= params.silent_share and is_silent,
                )
                found = self._judge(params, block, row, share, streak)
                findings += [found] if found else []
        return DeadReluState(streaks=streaks, losses=losses, silent=silent), findings

    def _judge(
        self, params: DeadReluParams, block: Block, row: int, share: float, streak: Streak
    ) -> Finding | None:
        channels = round(block.probes["channels"][row])
        said = f"{share:.0%} of {channels} channels of {block.info(row).name} are zero for every example"
        if streak.steps >= params.steps and streak.values >= params.examples:
            message = f"{said}, at least {params.share:.0%} for {streak.steps} records in a row"
            return finding_at(self.name, block, row, value=share, threshold=params.share, message=message)
        if streak.silent_steps >= params.steps and streak.silent_values >= params.examples:
            message = f"{said}, and no weight had any gradient for {streak.silent_steps} records in a row"
            return finding_at(
                self.name, block, row, value=share, threshold=params.silent_share, message=message
            )
        return None


def _after(streak: Streak, values: float, *, is_dead: bool, is_silent: bool) -> Streak:
    return Streak(
        streak.steps + 1 if is_dead else 0,
        streak.values + values if is_dead else 0.0,
        streak.silent_steps + 1 if is_silent else 0,
        streak.silent_values + values if is_silent else 0.0,
    )
