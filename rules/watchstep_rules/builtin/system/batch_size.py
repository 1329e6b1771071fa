"""Batches that are small for the machine, so that all of its resources have low utilization."""

from __future__ import annotations

from pydantic import Field

from watchstep.format.block import Block
from watchstep.format.system_figures import GPU_MEMORY, NODE_CPU, is_gpu, is_gpu_memory
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.system_samples import Recent, by_step, series_name, surely_below


class BatchSizeParams(Params):
    """Parameters of `BatchSize`."""

    cpu_threshold_p95: float = Field(70.0, gt=0, le=100, description="Percent of the machine's CPUs.")
    gpu_threshold_p95: float = Field(70.0, gt=0, le=100, description="Percent of a GPU's time.")
    gpu_memory_threshold_p95: float = Field(70.0, gt=0, le=100, description="Percent of the GPU's memory.")
    window: int = Field(500, ge=1, description="Samples in the window; older samples have less weight.")
    patience: int = Field(1000, ge=1, description="Samples before the first evaluation.")


class BatchSizeState(State):
    """State of `BatchSize`: the share of the last samples that were low, by ``figure@worker/mode``."""

    low: dict[str, Recent] = Field(default_factory=dict)


class BatchSize(Rule[BatchSizeParams, BatchSizeState]):
    """Fires when neither the CPUs nor a GPU nor its memory is used much: larger batches would fit, and be faster.

    The 95th percentiles of the last samples of all three are below their thresholds; only samples that are certainly below count. The
    parameters are those of SageMaker's BatchSize, in percent and in samples of half a second; the window decays exponentially.

    Off by default, because the batch size also affects learning. PyTorch's allocator keeps memory that it has allocated, so memory may appear
    fuller than it is, and the rule does not fire.
    """

    name = "batch_size"
    summary = "CPUs, GPU and its memory are all used little: batches are small for the machine"
    needs = Needs(collections=("system",), roles=("system",), histograms=True)
    merge = "watermark"
    usual_causes = ("batches are small for this machine", "the model is small for this machine")
    what_to_try = (
        "enlarge the batch, and the learning rate with it",
        "use a smaller machine, or let several trainings share it",
    )

    def evaluate(
        self, params: BatchSizeParams, state: BatchSizeState, context: Block, block: Block, now: int
    ) -> tuple[BatchSizeState, list[Finding]]:
        """Judge the samples that each worker took at the same time."""
        statistics = block.statistics
        limits = (params.cpu_threshold_p95, params.gpu_threshold_p95, params.gpu_memory_threshold_p95)
        columns = dict(
            zip(("cpu", "gpu", "memory"), (surely_below(statistics, x / 100) for x in limits), strict=True)
        )
        low, findings = dict(state.low), []
        for rows in by_step(block):
            for row in rows:
                kind = _kind(block.info(row).name)
                if kind:
                    name = series_name(block, row)
                    low[name] = low.get(name, Recent()).after(
                        int(columns[kind][row]), int(statistics.finite[row]), params.window
                    )
            findings += [
                self._finding(params, block, row)
                for row in rows
                if is_gpu(block.info(row).name)
                and all(self._is_low(params, low, n) for n in _three(block, row))
            ]
        return BatchSizeState(low=low), findings

    def _is_low(self, params: BatchSizeParams, low: dict[str, Recent], name: str) -> bool:
        recent = low.get(name, Recent())
        return recent.seen >= params.patience and recent.mean >= 0.95

    def _finding(self, params: BatchSizeParams, block: Block, row: int) -> Finding:
        message = (
            f"of the last samples nineteen in twenty are below {params.gpu_threshold_p95:g} % of {block.info(row).name}, "
            f"below {params.gpu_memory_threshold_p95:g} % of its memory and below {params.cpu_threshold_p95:g} % of the CPUs"
        )
        value = 100 * float(block.statistics.max[row]) if block.statistics.finite[row] else 0.0
        return finding_at(
            self.name, block, row, value=value, threshold=params.gpu_threshold_p95, message=message
        )


def _kind(name: str) -> str:
    if name == NODE_CPU:
        return "cpu"
    return "gpu" if is_gpu(name) else "memory" if is_gpu_memory(name) else ""


def _three(block: Block, row: int) -> tuple[str, str, str]:
    """The series of a GPU, of its memory, and of the CPUs beside it."""
    own, whose = block.info(row).name, f"@{block.worker[row]}/{block.mode_name(row)}"
    return own + whose, own + GPU_MEMORY + whose, NODE_CPU + whose
