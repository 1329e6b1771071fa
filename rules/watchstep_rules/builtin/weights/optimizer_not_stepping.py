"""A training loop that continues while no optimizer updates the weights."""

from __future__ import annotations

import re

import numpy as np
from pydantic import Field

from watchstep.format.block import Block
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at

_OVERDUE = re.compile(r"(.*\.)?updates:overdue(_\d+)?$")


class OptimizerNotSteppingParams(Params):
    """Parameters of `OptimizerNotStepping`."""

    passes: int = Field(
        200,
        ge=200,
        le=1_000_000,
        description="Backward passes since the last update; capture counts from 200.",
    )


class OptimizerNotStepping(Rule[OptimizerNotSteppingParams, State]):
    """Fires when ``updates:overdue`` is at least ``passes``: no optimizer has stepped for this many backward passes.

    Capture records this metric in a step with 200 backward passes of finite losses, and fifty times as many as in any earlier step, after at
    least ten updates, if the program logs a training loss for at least every second pass of the newest half, and no weight changes in that
    half (the first 64 elements of each are compared). In such a step nothing else is recorded that other rules could judge, because the
    step of the run does not end.

    Not reported are programs that compute gradients for another purpose (the Fisher information between two tasks, saliency, adversarial
    inputs), which log no training loss; programs that update weights themselves; steps that `Hook.step` counts; and gradient accumulation
    over as many micro-batches as before.
    """

    name = "optimizer_not_stepping"
    summary = "losses and gradients are computed, but no optimizer steps"
    needs = Needs(collections=("metrics",), roles=("metric",))
    merge = "per_worker"
    usual_causes = (
        "A condition in the loop never reaches optimizer.step(): of gradient accumulation, a schedule or a scaler.",
        "Updates go to a copy of the weights that is never copied back.",
        "An exception handler skips every batch.",
    )
    what_to_try = (
        "Check that optimizer.step() is called after backward(), and under which condition.",
        "If main weights are separate from the model's, copy them back after each update.",
        "If the program counts steps in another way, call hook.step() after each update.",
    )
    cannot_distinguish = (
        "Gradients that are accumulated over fifty times as many micro-batches as before, from a missing update.",
        "Sharded parameters are not compared and therefore not judged.",
    )

    def evaluate(
        self, params: OptimizerNotSteppingParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Evaluate each row of the metric."""
        block = block.where(
            block.mask_of_tensors([_OVERDUE.match(info.name) is not None for info in block.catalogue])
        )
        return state, [
            finding_at(
                self.name,
                block,
                int(row),
                value=float(block.statistics.mean[row]),
                threshold=float(params.passes),
                message=(
                    f"{block.info(int(row)).name}: {block.statistics.mean[row]:.0f} backward passes since step "
                    f"{int(block.step[row]) - 1}, and a training loss is logged for them, but no optimizer has stepped and no weight changes"
                ),
            )
            for row in np.flatnonzero(block.statistics.mean >= params.passes)
        ]
