"""A GPU that has less to do than the others, or a rank that takes longer."""

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
        0.5, gt=0, description="Share by which one may differ from the median of the others."
    )
    window: int = Field(500, ge=1, description="Samples that count; older ones count for less and less.")
    patience: int = Field(1000, ge=1, description="Samples, or steps, of each before the first judgement.")


class LoadBalanceState(State):
    """The mean of the last samples, by ``figure@worker/mode``."""

    recent: dict[str, Recent] = Field(default_factory=dict)


class LoadBalance(Rule[LoadBalanceParams, LoadBalanceState]):
    """Fires when one GPU does much less than the others of the run, or one rank's steps take much longer.

    With the mean of the last samples, against the median m of the means of all others::

        use of the GPU  < (1 - threshold) * m
        time of a step  > (1 + threshold) * m

    SageMaker's LoadBalancing compares histograms of the GPUs' use by a distance that it does not tell, with the threshold
    0.5; here it is a share of the others' mean, so that 45 and 55 percent are alike. Ranks that wait for each other in
    every step take equally long: there only the GPUs tell.

    Off by default: pipelines and parameter servers are uneven by design.
    """

    name = "load_balance"
    summary = "one GPU has much less to do than the others, or one rank takes much longer"
    needs = Needs(collections=("system",), roles=("system",))
    merge = "sealed"
    usual_causes = (
        "ranks get unequal shares of the data, or examples of unequal length",
        "one rank does more: logging, evaluation, checkpoints",
        "a GPU is slower: heat, another program, a weaker model of it",
    )
    what_to_try = (
        "deal out batches by length",
        "look at the step times and waits for data of each worker",
        "run nvidia-smi on the machine that is apart",
    )

    def evaluate(
        self, params: LoadBalanceParams, state: LoadBalanceState, context: Block, block: Block, now: int
    ) -> tuple[LoadBalanceState, list[Finding]]:
        """Judge each row by the means as they are when all of its step is in."""
        recent, findings = dict(state.recent), []
        held, mean = block.statistics, means(block)
        for rows in by_step(block):
            judged = [row for row in rows if _kind(block.info(row).name) and not math.isnan(mean[row])]
            for row in judged:
                name, samples = series_name(block, row), int(held.finite[row])
                total = float(mean[row]) * samples
                recent[name] = recent.get(name, Recent()).after(total, samples, params.window)
            for row in judged:
                found = self._judged(params, recent, block, row)
                findings += [found] if found is not None else []
        return LoadBalanceState(recent=recent), findings

    def _judged(
        self, params: LoadBalanceParams, recent: dict[str, Recent], block: Block, row: int
    ) -> Finding | None:
        own, name = series_name(block, row), block.info(row).name
        kind = _kind(name)
        others = [
            one.mean
            for other, one in recent.items()
            if other != own and _kind(other.partition("@")[0]) == kind and one.seen >= params.patience
        ]
        if not others or recent[own].seen < params.patience:
            return None
        value, middle = recent[own].mean, median(others)
        whose = f"{name} of worker {block.worker[row]}"
        if kind == "gpu" and value < (limit := (1 - params.threshold) * middle):
            message = f"{whose} is used at {100 * value:.0f} %, the others at {100 * middle:.0f} %"
        elif kind == "step" and value > (limit := (1 + params.threshold) * middle):
            message = f"{whose} is {value:.3g} s, that of the others {middle:.3g} s"
        else:
            return None
        return finding_at(self.name, block, row, value=value, threshold=limit, message=message)


def _kind(name: str) -> str:
    return "gpu" if is_gpu(name) else "step" if name == STEP_SECONDS else ""
