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
from watchstep_rules.signals.series import LaggedRows
from watchstep_rules.signals.system_samples import means, series_name


class Growth(NamedTuple):
    """The growth over the last rows of each series, one entry for each row of a block.

    Attributes:
        began: median of the first quarter of the rows.
        risen: increase to the median of the last quarter; NaN if there are too few rows.
        is_steady: whether the median of each quarter exceeds that of the previous one by at least half of an even share.
    """

    began: Floats
    risen: Floats
    is_steady: NDArray[np.bool_]


def whole_quarters(window: int) -> int:
    """The largest multiple of four up to ``window``, and at least 4."""
    return 4 * max(1, window // 4)


def growth(context: Block, block: Block, width: int) -> Growth:
    """The growth of each row's mean over the last rows of its series.

    A leak adds about the same amount in each quarter of the time. A cache that fills, or one large allocation, does not, and medians ignore
    temporary peaks.

    Args:
        context: earlier rows; the rule's lookback is ``width``.
        block: n rows.
        width: number of rows, including the row itself, a result of `whole_quarters`.
    """
    quarter = width // 4
    lagged = LaggedRows.of(context, block)
    column = lagged.column(means)
    back = [lagged.lag(column, row) for row in reversed(range(width))]
    medians = np.median(np.reshape(back, (4, quarter, len(block))), axis=1)
    risen = medians[3] - medians[0]
    with np.errstate(invalid="ignore"):
        is_steady = (np.diff(medians, axis=0) >= risen / 6).all(axis=0) & (risen > 0)
    return Growth(medians[0], risen, is_steady)


_MIB = 1024 * 1024


class MemoryGrowthParams(Params):
    """Parameters of `MemoryGrowth`."""

    growth: float = Field(
        0.1, gt=0, description="Tolerated growth within the window, as a share of the memory."
    )
    least_mib: float = Field(64.0, ge=0, description="Tolerated growth within the window in MiB.")
    window: int = Field(120, ge=1, le=1000, description="Rows in the window; one every ten seconds.")
    warmup: int = Field(
        60, ge=0, description="First rows, which are ignored: caches fill and libraries are loaded."
    )


class MemoryGrowthState(State):
    """State of `MemoryGrowth`: number of rows so far, by ``figure@worker/mode``, up to the number needed."""

    seen: dict[str, int] = Field(default_factory=dict)


class MemoryGrowth(Rule[MemoryGrowthParams, MemoryGrowthState]):
    """Fires when the memory of a process has grown steadily for twenty minutes: a leak, which eventually ends the training.

    With m1 … m4 the median memory of each quarter of the window::

        m4 - m1 >= growth * m1   and   m4 - m1 >= least_mib
        m2 - m1, m3 - m2 and m4 - m3 are each at least half of (m4 - m1) / 3

    The second line is true for a leak, and neither for a cache that fills nor for a model that is loaded. Only private memory is judged,
    without file pages: a memory-mapped data set grows for a whole epoch, and the kernel can reclaim it. SageMaker's rules judge only GPUs
    (`gpu_memory_increase`).

    Off by default: a program that stores its losses, or its data set as it arrives, grows steadily as well, and may end before it matters.
    """

    name = "memory_growth"
    summary = "the memory of the training process grows steadily"
    needs = Needs(collections=("system",), roles=("system",))
    merge = "per_worker"
    usual_causes = (
        "losses or outputs are stored with their graph (losses.append(loss))",
        "a list or dictionary grows at every step",
        "workers of the data loader copy Python objects of the data set on access",
    )
    what_to_try = (
        "store loss.item() or loss.detach()",
        "compare tracemalloc snapshots of two steps",
        "store the data set in arrays instead of lists of objects",
    )

    def lookback(self, params: MemoryGrowthParams) -> int:
        """The window."""
        return whole_quarters(params.window)

    def evaluate(
        self, params: MemoryGrowthParams, state: MemoryGrowthState, context: Block, block: Block, now: int
    ) -> tuple[MemoryGrowthState, list[Finding]]:
        """Judge each row of a process by the window that ends with it."""
        trend = growth(context, block, window := whole_quarters(params.window))
        least = np.maximum(params.growth * trend.began, params.least_mib * _MIB)
        grows = trend.is_steady & (trend.risen >= least)
        seen, findings = dict(state.seen), []
        needed = params.warmup + window
        chosen = block.mask_of_tensors([info.name == MEMORY_PRIVATE for info in block.catalogue])
        for row in map(int, np.flatnonzero(chosen)):
            name = series_name(block, row)
            seen[name] = min(seen.get(name, 0) + 1, needed)
            if grows[row] and seen[name] == needed:
                findings.append(self._finding(params, block, row, trend.began[row], trend.risen[row]))
        return MemoryGrowthState(seen=seen), findings

    def _finding(
        self, params: MemoryGrowthParams, block: Block, row: int, began: float, risen: float
    ) -> Finding:
        limit = max(params.growth * began, params.least_mib * _MIB)
        message = (
            f"{block.info(row).name} has grown from {began / _MIB:.0f} to {(began + risen) / _MIB:.0f} MiB over "
            f"{whole_quarters(params.window)} rows, steadily"
        )
        return finding_at(self.name, block, row, value=risen, threshold=limit, message=message)


class GpuMemoryIncreaseParams(Params):
    """Parameters of `GpuMemoryIncrease`."""

    increase: float = Field(5.0, gt=0, le=100, description="Tolerated growth in percent of the GPU's memory.")
    window: int = Field(60, ge=1, le=1000, description="Rows in the window; one every ten seconds.")
    patience: int = Field(1000, ge=0, description="First samples, which are ignored.")


class GpuMemoryIncreaseState(State):
    """State of `GpuMemoryIncrease`, by ``figure@worker/mode``: number of samples up to the patience, and of rows since then up to the window."""

    seen: dict[str, tuple[int, int]] = Field(default_factory=dict)


class GpuMemoryIncrease(Rule[GpuMemoryIncreaseParams, GpuMemoryIncreaseState]):
    """Fires when the used memory of a GPU has grown steadily by five percent of its memory within ten minutes.

    With m1 … m4 the median of each quarter of the window, in percent of the GPU's memory::

        m4 - m1 >= increase
        m2 - m1, m3 - m2 and m4 - m3 are each at least half of (m4 - m1) / 3

    The increase and the patience are those of SageMaker's GPUMemoryIncrease, which requires only the first line, for a moving average. The
    second line excludes the single step of PyTorch's allocator at a longer batch or at the first evaluation.

    Off by default: batches of growing length gradually fill the allocator's memory without a fault.
    """

    name = "gpu_memory_increase"
    summary = "the memory of a GPU grows steadily"
    needs = Needs(collections=("system",), roles=("system",))
    merge = "per_worker"
    usual_causes = (
        "losses or outputs are stored with their graph (losses.append(loss))",
        "batches have increasingly long examples",
        "another program uses this GPU",
    )
    what_to_try = (
        "store loss.item() or loss.detach()",
        "compare torch.cuda.memory_snapshot() of two steps",
        "sort or truncate examples by length",
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
        trend = growth(context, block, window := whole_quarters(params.window))
        grows = trend.is_steady & (100 * trend.risen >= params.increase)
        seen, findings = dict(state.seen), []
        chosen = block.mask_of_tensors([is_gpu_memory(info.name) for info in block.catalogue])
        for row in map(int, np.flatnonzero(chosen)):
            name = series_name(block, row)
            samples, rows = seen.get(name, (0, 0))
            rows = min(rows + (samples >= params.patience), window)
            samples = min(samples + int(block.statistics.finite[row]), params.patience)
            seen[name] = (samples, rows)
            if grows[row] and rows == window:
                before, after = 100 * trend.began[row], 100 * (trend.began[row] + trend.risen[row])
                message = (
                    f"{block.info(row).name} has grown from {before:.1f} to {after:.1f} % over {window} rows, "
                    "steadily"
                )
                value = 100 * float(trend.risen[row])
                findings.append(
                    finding_at(self.name, block, row, value=value, threshold=params.increase, message=message)
                )
        return GpuMemoryIncreaseState(seen=seen), findings
