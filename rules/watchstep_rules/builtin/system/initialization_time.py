"""A program with a long initialization before its first step."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from watchstep.format.block import Block
from watchstep.format.system_figures import INITIALIZATION_SECONDS
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.system_samples import means


class InitializationTimeParams(Params):
    """Parameters of `InitializationTime`."""

    threshold: float = Field(20.0, gt=0, description="Tolerated minutes until the first update.")


class InitializationTime(Rule[InitializationTimeParams, State]):
    """Fires when more than twenty minutes passed from the start of the process to its first update.

    The threshold is that of SageMaker's MaxInitializationTime. The time is known after the first update; `stalled_training` reports a program
    that does not reach it.

    Off by default, because the acceptable time for loading data and model depends on the program.
    """

    name = "initialization_time"
    summary = "it takes long from the start of the process to the first update"
    needs = Needs(collections=("system",), roles=("system",))
    merge = "per_worker"
    usual_causes = (
        "the data set or a checkpoint is downloaded or unpacked first",
        "the model is compiled",
        "ranks wait for one that comes late",
    )
    what_to_try = (
        "stream the data, or keep what was prepared",
        "keep the compiler's cache from run to run",
        "look at when each rank began",
    )

    def evaluate(
        self, params: InitializationTimeParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Judge the single row of each worker."""
        minutes = means(block) / 60
        chosen = block.mask_of_tensors([info.name == INITIALIZATION_SECONDS for info in block.catalogue])
        with np.errstate(invalid="ignore"):
            late = np.flatnonzero(chosen & (minutes > params.threshold))
        return state, [
            finding_at(
                self.name,
                block,
                row,
                value=float(minutes[row]),
                threshold=params.threshold,
                message=(
                    f"{block.info(row).name}: {minutes[row]:.1f} minutes from the start of the process to its first "
                    f"update, {params.threshold:g} tolerated"
                ),
            )
            for row in map(int, late)
        ]
