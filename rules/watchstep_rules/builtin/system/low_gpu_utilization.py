"""A GPU that computes little, or in bursts."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from watchstep.format.block import Block
from watchstep.format.system_figures import is_gpu
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.system_samples import Recent, series_name, surely_above, surely_below


class LowGpuUtilizationParams(Params):
    """Parameters of `LowGpuUtilization`."""

    threshold_p95: float = Field(
        70.0, gt=0, le=100, description="Percent below which the 95th percentile of a GPU's use is low."
    )
    threshold_p5: float = Field(
        10.0, gt=0, le=100, description="Percent below which the 5th percentile is a pause."
    )
    window: int = Field(500, ge=1, description="Samples in the window; older samples have less weight.")
    patience: int = Field(1000, ge=1, description="Samples before the first evaluation.")


class LowGpuUtilizationState(State):
    """State of `LowGpuUtilization`, by GPU, worker and mode: the shares of the last samples that were low, high, and near zero."""

    low: dict[str, Recent] = Field(default_factory=dict)
    high: dict[str, Recent] = Field(default_factory=dict)
    idle: dict[str, Recent] = Field(default_factory=dict)


class LowGpuUtilization(Rule[LowGpuUtilizationParams, LowGpuUtilizationState]):
    """Fires when a GPU is hardly used, or is used in bursts with pauses between them.

    Of the last samples of its use::

        p95 < threshold_p95                               hardly used
        p95 >= threshold_p95  and  p5 < threshold_p5      bursts and pauses

    The parameters are those of SageMaker's LowGPUUtilization, in percent and in samples of half a second. The window decays (``e^-n`` after n
    windows), whereas SageMaker's is rectangular. A quantile counts as below a limit if enough samples are certainly below it, because rows
    contain extremes and a histogram over powers of two, not each sample.

    Off by default, because a small model on a large GPU is only slow, and usually intended.
    """

    name = "low_gpu_utilization"
    summary = "a GPU computes little, or in bursts with pauses"
    needs = Needs(collections=("system",), roles=("system",), histograms=True)
    merge = "per_worker"
    usual_causes = (
        "batches are too small for the GPU",
        "it waits for data, for the processor, or for other ranks",
        "values are copied to the host in each step (loss.item(), logging)",
    )
    what_to_try = (
        "enlarge the batch, or use a smaller GPU",
        "look at system/data_wait and system/node_cpu at the same steps, if the run records them",
        "read losses every so many steps only",
    )

    def evaluate(
        self,
        params: LowGpuUtilizationParams,
        state: LowGpuUtilizationState,
        context: Block,
        block: Block,
        now: int,
    ) -> tuple[LowGpuUtilizationState, list[Finding]]:
        """Judge each GPU's rows, one after the other."""
        statistics, window = block.statistics, params.window
        recent = dict(state.low), dict(state.high), dict(state.idle)
        counted = (
            surely_below(statistics, params.threshold_p95 / 100),
            surely_above(statistics, params.threshold_p95 / 100),
            surely_below(statistics, params.threshold_p5 / 100),
        )
        findings = []
        for row in map(int, np.flatnonzero(block.mask_of_tensors([is_gpu(i.name) for i in block.catalogue]))):
            name, samples = series_name(block, row), int(statistics.finite[row])
            for kind, count in zip(recent, counted, strict=True):
                kind[name] = kind.get(name, Recent()).after(int(count[row]), samples, window)
            low, high, idle = (kind[name] for kind in recent)
            if samples and low.seen >= params.patience:
                found = self._judged(params, block, row, (low.mean, high.mean, idle.mean))
                findings += [found] if found is not None else []
        return LowGpuUtilizationState(low=recent[0], high=recent[1], idle=recent[2]), findings

    def _judged(
        self, params: LowGpuUtilizationParams, block: Block, row: int, shares: tuple[float, float, float]
    ) -> Finding | None:
        low, high, idle = shares
        name = block.info(row).name
        if low >= 0.95:
            value, limit = 100 * low, 95.0
            message = f"{name}: {value:.0f} % of the last samples are below {params.threshold_p95:g} %: it is hardly used"
        elif high > 0.05 and idle >= 0.05:
            value, limit = 100 * idle, 5.0
            message = (
                f"{name}: {value:.0f} % of the last samples are below {params.threshold_p5:g} %, and {100 * high:.0f} % "
                f"at {params.threshold_p95:g} % or more: it computes in bursts"
            )
        else:
            return None
        return finding_at(self.name, block, row, value=value, threshold=limit, message=message)
