"""A training loop that goes on while no optimizer updates the weights any more."""

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
    """Fires when ``updates:overdue`` is at least ``passes``: no optimizer has stepped for so many backward passes.

    Capture records that metric in a step with 200 backward passes of finite losses, and fifty times as many as any step before it had, after ten updates or
    more, where the program logs a training loss for at least every second of the newest half of these passes, and no weight changes in that half
    (of each the first 64 elements are compared). In such a step nothing else is recorded that other rules could judge: the step of the run
    does not end.

    Left alone are programs that compute gradients for something else (the Fisher information between two tasks, saliency,
    adversarial inputs), which log no training loss; those that update weights by themselves; steps that `Hook.step` counts; and an
    accumulation of gradients over as many micro-batches as before.
    """

    name = "optimizer_not_stepping"
    summary = "losses and gradients are computed on and on, but no optimizer steps any more"
    needs = Needs(collections=("metrics",), roles=("metric",))
    merge = "per_worker"
    usual_causes = (
        "A condition in the loop never lets optimizer.step() be reached: of accumulation, of a schedule, of a scaler.",
        "Updates go to a copy of the weights, which are never copied back.",
        "An exception handler skips every batch.",
    )
    what_to_try = (
        "Check that optimizer.step() is called after backward(), and under which condition.",
        "If main weights are kept apart from the model's, copy them back after each update.",
        "If the program counts steps in another way, call hook.step() after each update.",
    )
    cannot_distinguish = (
        "Gradients that are accumulated over fifty times as many micro-batches as before, from an update that never comes.",
        "Sharded parameters are not compared, and so not judged.",
    )

    def evaluate(
        self, params: OptimizerNotSteppingParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Judge each row of the metric."""
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
