"""A GPU that is used less than the others, or a rank that takes longer."""

from __future__ import annotations

import math
from statistics import median

from pydantic import Field

from watchstep.format.block import Block
from watchstep.format.system_figures import STEP_SECONDS, is_gpu
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.system_samples import Recent, by_step, means, series_name


class LoadBalanceParams(Params):
    """Parameters of `LoadBalance`."""

    threshold: float = Field(
        0.5, gt=0, description="Tolerated share by which a GPU or rank differs from the median of the others."
    )
    window: int = Field(500, ge=1, description="Samples in the window; older samples have less weight.")
    patience: int = Field(1000, ge=1, description="Samples, or steps, of each before the first evaluation.")


class LoadBalanceState(State):
    """State of `LoadBalance`: the mean of the last samples, by ``figure@worker/mode``."""

    recent: dict[str, Recent] = Field(default_factory=dict)


class LoadBalance(Rule[LoadBalanceParams, LoadBalanceState]):
    """Fires when one GPU is used much less than the others of the run, or the steps of one rank take much longer.

    With the mean of the last samples, and the median m of the means of all others::

        use of the GPU  < (1 - threshold) * m
        time of a step  > (1 + threshold) * m

    SageMaker's LoadBalancing compares histograms of the GPUs' use by an undocumented distance with the threshold 0.5. Here the threshold
    is a share of the others' mean, so that 45 and 55 percent are considered equal. Ranks that wait for each other in every step take
    equally long; in this case only the GPUs differ.

    Off by default, because pipelines and parameter servers are uneven by design.
    """

    name = "load_balance"
    summary = "one GPU is used much less than the others, or one rank takes much longer"
    needs = Needs(collections=("system",), roles=("system",))
    merge = "watermark"
    usual_causes = (
        "ranks get unequal shares of the data, or examples of unequal length",
        "one rank does more work: logging, evaluation, checkpoints",
        "a GPU is slower: throttling, another program, a weaker model",
    )
    what_to_try = (
        "distribute batches by length",
        "compare the step times and data waits of the workers",
        "run nvidia-smi on the deviating machine",
    )

    def evaluate(
        self, params: LoadBalanceParams, state: LoadBalanceState, context: Block, block: Block, now: int
    ) -> tuple[LoadBalanceState, list[Finding]]:
        """Judge each row by the means after all rows of its step."""
        recent, findings = dict(state.recent), []
        statistics, mean = block.statistics, means(block)
        for rows in by_step(block):
            judged = [row for row in rows if _kind(block.info(row).name) and not math.isnan(mean[row])]
            for row in judged:
                name, samples = series_name(block, row), int(statistics.finite[row])
                total = float(mean[row]) * samples
                recent[name] = recent.get(name, Recent()).after(total, samples, params.window)
            for row in judged:
                finding = self._judged(params, recent, block, row)
                findings += [finding] if finding is not None else []
        return LoadBalanceState(recent=recent), findings

    def _judged(
        self, params: LoadBalanceParams, recent: dict[str, Recent], block: Block, row: int
    ) -> Finding | None:
        own, name = series_name(block, row), block.info(row).name
        kind = _kind(name)
        others = [
            samples.mean
            for other, samples in recent.items()
            if other != own and _kind(other.partition("@")[0]) == kind and samples.seen >= params.patience
        ]
        if not others or recent[own].seen < params.patience:
            return None
        value, middle = recent[own].mean, median(others)
        subject = f"{name} of worker {block.worker[row]}"
        if kind == "gpu" and value < (limit := (1 - params.threshold) * middle):
            message = f"{subject} is used at {100 * value:.0f} %, the others at {100 * middle:.0f} %"
        elif kind == "step" and value > (limit := (1 + params.threshold) * middle):
            message = f"{subject} is {value:.3g} s, that of the others {middle:.3g} s"
        else:
            return None
        return finding_at(self.name, block, row, value=value, threshold=limit, message=message)


def _kind(name: str) -> str:
    return "gpu" if is_gpu(name) else "step" if name == STEP_SECONDS else ""
