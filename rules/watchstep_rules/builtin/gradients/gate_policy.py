"""What the gate policy and guards did with a training: updates that were skipped, and a stop."""

from __future__ import annotations

import numpy as np

from watchstep.capture.steps.metric_names import STOPPED, WITHHELD
from watchstep.format.block import Block
from watchstep.stopping import FROM_ANOTHER_RANK
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at, finding_of_run


class SkippedUpdates(Rule[Params, State]):
    """Fires at each step whose update the gate policy skipped: ``updates:skipped >= 1``.

    The gate policy (``on_nonfinite="skip"``) leaves out updates by gradients that are not finite. Training goes on, and the batch
    was without effect. The recorder writes the metric at each skipped step, and once more at the first step with an update, so that
    consecutive skips are one alert. Its severity is info by default: the policy did what it was asked to do. With severity warning in the
    rule file, it notifies.
    """

    name = "skipped_updates"
    summary = "the gate policy skipped an update"
    needs = Needs(collections=("metrics",), roles=("metric",))
    merge = "per_worker"
    usual_causes = (
        "A sample with NaN, infinity or an absurd magnitude in the batch of this step.",
        "The gradients diverge: many skips in a row.",
        "An operation that has no finite gradient at some input, such as a root or a logarithm of zero.",
    )
    what_to_try = (
        "Replay the bundle of the first skipped step to find the first operation with a bad number: watchstep replay.",
        "Look at the samples of the step.",
        "Use on_nonfinite='skip:N' to stop after N skips in a row.",
    )
    cannot_distinguish = (
        "One batch with a bad sample, from the first step of a divergence: both are one skipped update.",
    )

    def evaluate(
        self, params: Params, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Judge each row of the metric by itself."""
        is_metric = block.mask_of_tensors([info.name == WITHHELD for info in block.catalogue])
        rows = np.flatnonzero(is_metric & (block.statistics.mean > 0))
        message = "the gate policy skipped the update of step {}: its gradients are not finite"
        return state, [
            finding_at(
                self.name, block, int(row), value=1.0, threshold=1.0, message=message.format(block.step[row])
            )
            for row in rows
        ]


class TrainingStopped(Rule[Params, State]):
    """Fires at the step at which the gate policy or a guard stopped the training in its own process.

    The recorder writes a row for the stop, whose name contains the reason: with ``watchstep run --explain`` the operation and the source line that made the first NaN
    or infinity. Weights and optimizer are as they were before the update, so no rule about damage fires. Ranks that name a place come before those that do not. The rule has no
    action ``stop``: the training has ended, and a program that handles the stop may go on on purpose.
    """

    name = "training_stopped"
    summary = "the gate policy or a guard stopped the training, for the reason in the message"
    needs = Needs(collections=("metrics",), roles=("metric",))
    merge = "per_worker"
    usual_causes = (
        "A sample with NaN, infinity or an absurd magnitude in the batch of this step.",
        "An operation that has no finite gradient at some input, such as a root or a logarithm of zero.",
        "Another rule, which the program evaluates in a guard.",
    )
    what_to_try = (
        "Read the line that the message names; without one, start the program again with watchstep explain.",
        "Resume from the last checkpoint without the samples of the step: watchstep skip-list.",
    )
    cannot_distinguish = (
        "A stop that a program handles by itself and goes on after, from one that ends it.",
    )

    def evaluate(
        self, params: Params, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Judge each report of a stop by itself."""
        is_report = block.mask_of_tensors([info.name.startswith(_STOPPED) for info in block.catalogue])
        return state, [self._finding(block, row) for row in np.flatnonzero(is_report).tolist()]

    def _finding(self, block: Block, row: int) -> Finding:
        message = block.info(row).name.removeprefix(_STOPPED)
        step, time_ns = int(block.step[row]), int(block.time_ns[row])
        finding = finding_of_run(self.name, step, time_ns, value=1.0, threshold=1.0, message=message)
        finding = finding.model_copy(update={"worker": int(block.worker[row])})
        # An alert names the finding of the lowest cause rank.
        return finding if FROM_ANOTHER_RANK in message else finding.model_copy(update={"cause_rank": (0, 0)})


_STOPPED = f"{STOPPED}@"
