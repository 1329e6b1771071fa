"""A run with statistics outside the ranges of earlier healthy runs of its program."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from watchstep.format.block import Block
from watchstep.format.tensors import ACTIVATIONS, BIASES, GRADIENTS, LOSSES, METRICS, UPDATES, WEIGHTS
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.baseline import Baseline, CatalogueRanges, phase_of, ranges_of
from watchstep_rules.signals.reference import figure_of, is_training
from watchstep_rules.signals.tensor_selection import CatalogueCache

_NEGLIGIBLE = 1e-6
"""Share of the largest value in any phase below which values and ranges are not compared, such as updates at the end of a schedule."""


class UnlikeEarlierRunsParams(Params):
    """Parameters of `UnlikeEarlierRuns`."""

    baseline: Baseline = Field(
        Baseline(),
        description="The ranges; by default those of the project's earlier runs of the same program, once there are five.",
    )
    min_magnitude: float = Field(
        1e-12,
        ge=0,
        description="Values with a smaller magnitude are not compared if their range is smaller too.",
    )


class UnlikeEarlierRuns(Rule[UnlikeEarlierRunsParams, State]):
    """Fires when a statistic leaves the range that it had in earlier healthy runs of the same program.

    The range of a tensor's statistic (the mean of losses and metrics, the rms of all others) is that of at least five earlier runs in the
    same phase of training, widened by a factor of two or more (`watchstep_rules.signals.baseline`). Phases double in length. A loss is
    judged only above its range, a metric only below, and only if its name tells that higher is better. Not judged
    are tensors of another shape, the rms of tensors with fewer than 16 elements, steps beyond the longest earlier run, and values that,
    like their range, are below a millionth of the largest value of the tensor's ranges in any phase.

    The service computes the baseline from runs that completed without an alert, of the same program file, arguments except the seed,
    architecture, capture configuration and number of workers, and pins it to an attempt before any of the attempt's rows is judged.
    Without a baseline the rule does not fire.
    """

    name = "unlike_earlier_runs"
    summary = "statistics leave the range of earlier healthy runs of the program"
    needs = Needs(collections=(LOSSES, METRICS, GRADIENTS, ACTIVATIONS, WEIGHTS, BIASES, UPDATES))
    merge = "watermark"
    usual_causes = (
        "A hyperparameter, the data or the initialization differs from the earlier runs.",
        "A fault that did not occur in the earlier runs.",
        "A library, driver or device differs from the earlier runs.",
    )
    what_to_try = (
        "Compare the configuration and the first tensor that deviates with an earlier run: watchstep diff.",
        "Look at the other alerts of this run, and at the earliest deviation.",
        "Run the earlier commit in the new environment.",
    )
    cannot_distinguish = (
        "A deliberate change of an imported module, a configuration file or the data, from a fault. A run whose alert is marked as not right counts as healthy.",
    )

    def evaluate(
        self, params: UnlikeEarlierRunsParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Compare each row with the range of its phase."""
        if not params.baseline.tensors:
            return state, []
        ranges = _RANGES.get(
            block.catalogue, params.baseline.digest, lambda: ranges_of(params.baseline, block.catalogue)
        )
        rows = np.flatnonzero(is_training(block))
        tensors = block.tensor[rows]
        spans = ranges.spans[tensors, np.minimum(phase_of(block.step[rows]), ranges.spans.shape[1] - 1)]
        means = ranges.of_mean[tensors]
        values = np.where(
            means, figure_of(block.statistics, "mean")[rows], figure_of(block.statistics, "rms")[rows]
        )
        least = np.maximum(params.min_magnitude, _NEGLIGIBLE * ranges.scale[tensors])
        tiny = np.maximum(np.abs(values), np.abs(spans).max(axis=1)) < least
        below = (values < spans[:, 0]) & ranges.low_is_bad[tensors]
        above = (values > spans[:, 1]) & ranges.high_is_bad[tensors]
        findings = []
        for place in np.flatnonzero((below | above) & ~tiny):
            low, high = spans[place]
            side, limit = ("above", high) if above[place] else ("below", low)
            name, statistic = block.info(int(rows[place])).name, "mean" if means[place] else "rms"
            message = (
                f"{statistic} of {name} is {values[place]:.4g}, {side} the range {low:.3g} to {high:.3g} of "
                f"{len(params.baseline.runs)} earlier runs in this phase"
            )
            findings.append(
                finding_at(
                    self.name, block, int(rows[place]),
                    value=float(values[place]), threshold=float(limit), message=message,
                )
            )  # fmt: skip
        return state, findings


_RANGES: CatalogueCache[CatalogueRanges] = CatalogueCache()
