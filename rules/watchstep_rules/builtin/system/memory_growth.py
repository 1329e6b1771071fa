"""Rules about memory that grows steadily: of the training process, and of a GPU."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block
from watchstep.format.statistics import Floats
from watchstep.format.system_figures import MEMORY_PRIVATE, is_gpu_memory
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.series import Trail
from watchstep_rules.signals.system_samples import means, series_name


class Growth(NamedTuple):
    """What the last rows of each series did, one entry for each row of a block.

    Attributes:
        began: median of the first quarter of the rows.
        risen: by how much the median of the last quarter is above that; NaN where there are too few rows.
        is_steady: every quarter's median is above that of the quarter before, by half of an even share at least.
    """

    began: Floats
    risen: Floats
    is_steady: NDArray[np.bool_]


def whole_quarters(window: int) -> int:
    """How many of so many rows can be looked at in four equal parts; 4 at least."""
    return 4 * max(1, window // 4)


def growth(context: Block, block: Block, width: int) -> Growth:
    """The growth of each row's mean over the last rows of its series.

    A leak adds about as much in each quarter of the time; a cache that fills, or one large allocation, does not, and medians
    do not see peaks that go away.

    Args:
        context: earlier rows; the rule looks back on ``width`` of them.
        block: n rows.
        width: how many rows count, the row itself included, as `whole_quarters` gives it.
    """
    quarter = width // 4
    trail = Trail.of(context, block)
    column = trail.column(means)
    back = [trail.back(column, row) for row in reversed(range(width))]
    medians = np.median(np.reshape(back, (4, quarter, len(block))), axis=1)
    risen = medians[3] - medians[0]
    with np.errstate(invalid="ignore"):
        is_steady = (np.diff(medians, axis=0) >= risen / 6).all(axis=0) & (risen > 0)
    return Growth(medians[0], risen, is_steady)


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

    def lookback(self, params: MemoryGrowthParams) -> int:
        """The window."""
        return whole_quarters(params.window)

    def evaluate(
        self, params: MemoryGrowthParams, state: MemoryGrowthState, context: Block, block: Block, now: int
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

    def lookback(self, params: GpuMemoryIncreaseParams) -> int:
        """The window."""
        return whole_quarters(params.window)

    def evaluate(
        self,
        params: GpuMemoryIncreaseParams,
        state: GpuMemoryIncreaseState,
        context: Block,
        block: Block,
        now: int,
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
