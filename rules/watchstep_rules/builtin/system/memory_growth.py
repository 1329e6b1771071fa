"""Memory of the training process that grows and grows."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from watchstep.format.block import Block
from watchstep.format.system_figures import MEMORY_PRIVATE
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.steady_growth import growth, whole_quarters
from watchstep_rules.signals.system_samples import series_name

_MIB = 1024 * 1024


class MemoryGrowthParams(Params):
    """Parameters of `MemoryGrowth`."""

    growth: float = Field(
        0.1, gt=0, description="Share of itself by which memory may grow within the window."
    )
    least_mib: float = Field(64.0, ge=0, description="… and so many MiB at least.")
    window: int = Field(
        120, ge=1, le=1000, description="Rows that are looked at; one comes every ten seconds."
    )
    warmup: int = Field(
        60, ge=0, description="First rows, which do not count: caches fill, libraries are loaded."
    )


class MemoryGrowthState(State):
    """Rows so far, by ``figure@worker/mode``; no more than count."""

    seen: dict[str, int] = Field(default_factory=dict)


class MemoryGrowth(Rule[MemoryGrowthParams, MemoryGrowthState]):
    """Fires when a process' memory has grown steadily for twenty minutes: a leak, that ends the training some day.

    With m1 … m4 the median memory of each quarter of the window::

        m4 - m1 >= growth * m1   and   m4 - m1 >= least_mib
        m2 - m1, m3 - m2 and m4 - m3 are each at least half of (m4 - m1) / 3

    The second line is what a leak does, and neither a cache that fills up nor a model that is loaded. Only private
    memory is judged, without pages of files: a data set that is mapped into memory grows for a whole epoch, and the kernel
    takes it back when it likes. SageMaker's rules look at GPUs only (`gpu_memory_increase`).

    Off by default: a program that keeps its losses, or its data set as it comes, grows steadily as well, and may end before
    that matters.
    """

    name = "memory_growth"
    summary = "the memory of the training process grows and grows"
    needs = Needs(collections=("system",), roles=("system",))
    merge = "per_worker"
    usual_causes = (
        "losses or outputs are kept with their graph (losses.append(loss))",
        "a list or dictionary grows by every step",
        "workers of the data loader copy Python objects of the data set as they touch them",
    )
    what_to_try = (
        "keep loss.item() or loss.detach()",
        "compare tracemalloc's snapshots of two steps",
        "hold the data set in arrays instead of lists of objects",
    )
    params_type = MemoryGrowthParams
    state_type = MemoryGrowthState

    def lookback(self, params: MemoryGrowthParams) -> int:
        """The window."""
        return whole_quarters(params.window)

    def evaluate(
        self,
        params: MemoryGrowthParams,
        state: MemoryGrowthState,
        context: Block,
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[MemoryGrowthState, list[Finding]]:
        """Judge each row of a process by the window that ends with it."""
        found = growth(context, block, window := whole_quarters(params.window))
        least = np.maximum(params.growth * found.began, params.least_mib * _MIB)
        grows = found.is_steady & (found.risen >= least)
        seen, findings = dict(state.seen), []
        enough = params.warmup + window
        chosen = block.mask_of_tensors([info.name == MEMORY_PRIVATE for info in block.catalogue])
        for row in map(int, np.flatnonzero(chosen)):
            name = series_name(block, row)
            seen[name] = min(seen.get(name, 0) + 1, enough)
            if grows[row] and seen[name] == enough:
                findings.append(self._finding(params, block, row, found.began[row], found.risen[row]))
        return MemoryGrowthState(seen=seen), findings

    def _finding(
        self, params: MemoryGrowthParams, block: Block, row: int, began: float, risen: float
    ) -> Finding:
        limit = max(params.growth * began, params.least_mib * _MIB)
        message = (
            f"{block.info(row).name} has grown from {began / _MIB:.0f} to {(began + risen) / _MIB:.0f} MiB over "
            f"{whole_quarters(params.window)} rows, and steadily"
        )
        return finding_at(self.name, block, row, value=risen, threshold=limit, message=message)
