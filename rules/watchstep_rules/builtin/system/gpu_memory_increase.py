"""Memory of a GPU that grows and grows."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from watchstep.format.block import Block
from watchstep.format.system_figures import is_gpu_memory
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.steady_growth import growth, whole_quarters
from watchstep_rules.signals.system_samples import series_name


class GpuMemoryIncreaseParams(Params):
    """Parameters of `GpuMemoryIncrease`."""

    increase: float = Field(
        5.0, gt=0, le=100, description="Percent of the GPU's memory by which it may grow."
    )
    window: int = Field(
        60, ge=1, le=1000, description="Rows that are looked at; one comes every ten seconds."
    )
    patience: int = Field(1000, ge=0, description="First samples, which do not count.")


class GpuMemoryIncreaseState(State):
    """By ``figure@worker/mode``: samples so far, at most the patience, and rows since then, at most the window."""

    seen: dict[str, tuple[int, int]] = Field(default_factory=dict)


class GpuMemoryIncrease(Rule[GpuMemoryIncreaseParams, GpuMemoryIncreaseState]):
    """Fires when the memory that is taken of a GPU has grown by five percent of it in ten minutes, and steadily.

    With m1 … m4 the median of each quarter of the window, in percent of the GPU's memory::

        m4 - m1 >= increase
        m2 - m1, m3 - m2 and m4 - m3 are each at least half of (m4 - m1) / 3

    The increase and the patience are those of SageMaker's GPUMemoryIncrease, which asks for the first line alone, of a
    moving average; the second keeps the one step out that PyTorch's allocator makes at a longer batch or at the first
    evaluation.

    Off by default: batches of growing length fill the allocator's memory by and by, and nothing is wrong.
    """

    name = "gpu_memory_increase"
    summary = "the memory of a GPU grows and grows"
    needs = Needs(collections=("system",), roles=("system",))
    merge = "per_worker"
    usual_causes = (
        "losses or outputs are kept with their graph (losses.append(loss))",
        "batches of ever longer examples",
        "another program uses this GPU",
    )
    what_to_try = (
        "keep loss.item() or loss.detach()",
        "compare torch.cuda.memory_snapshot() of two steps",
        "sort or cut examples by their length",
    )
    params_type = GpuMemoryIncreaseParams
    state_type = GpuMemoryIncreaseState

    def lookback(self, params: GpuMemoryIncreaseParams) -> int:
        """The window."""
        return whole_quarters(params.window)

    def evaluate(
        self,
        params: GpuMemoryIncreaseParams,
        state: GpuMemoryIncreaseState,
        context: Block,
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[GpuMemoryIncreaseState, list[Finding]]:
        """Judge each row of a GPU by the window that ends with it."""
        found = growth(context, block, window := whole_quarters(params.window))
        grows = found.is_steady & (100 * found.risen >= params.increase)
        seen, findings = dict(state.seen), []
        chosen = block.mask_of_tensors([is_gpu_memory(info.name) for info in block.catalogue])
        for row in map(int, np.flatnonzero(chosen)):
            name = series_name(block, row)
            samples, rows = seen.get(name, (0, 0))
            rows = min(rows + (samples >= params.patience), window)
            samples = min(samples + int(block.statistics.finite[row]), params.patience)
            seen[name] = (samples, rows)
            if grows[row] and rows == window:
                before, after = 100 * found.began[row], 100 * (found.began[row] + found.risen[row])
                message = (
                    f"{block.info(row).name} has grown from {before:.1f} to {after:.1f} % over {window} rows, "
                    "and steadily"
                )
                value = 100 * float(found.risen[row])
                findings.append(
                    finding_at(self.name, block, row, value=value, threshold=params.increase, message=message)
                )
        return GpuMemoryIncreaseState(seen=seen), findings
