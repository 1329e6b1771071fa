"""Batches that are small for the machine: nothing of it is used much."""

from __future__ import annotations

from pydantic import Field

from watchstep.format.block import Block
from watchstep.format.system_figures import GPU_MEMORY, NODE_CPU, is_gpu, is_gpu_memory
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.system_samples import Recent, by_step, series_name, surely_below


class BatchSizeParams(Params):
    """Parameters of `BatchSize`."""

    cpu_threshold_p95: float = Field(70.0, gt=0, le=100, description="Percent of the machine's CPUs.")
    gpu_threshold_p95: float = Field(70.0, gt=0, le=100, description="Percent of the time of a GPU.")
    gpu_memory_threshold_p95: float = Field(70.0, gt=0, le=100, description="Percent of its memory.")
    window: int = Field(500, ge=1, description="Samples that count; older ones count for less and less.")
    patience: int = Field(1000, ge=1, description="Samples before the first judgement.")


class BatchSizeState(State):
    """How many of the last samples were low, by ``figure@worker/mode``."""

    low: dict[str, Recent] = Field(default_factory=dict)


class BatchSize(Rule[BatchSizeParams, BatchSizeState]):
    """Fires when neither the CPUs nor a GPU nor that GPU's memory is used much: larger batches would fit, and be faster.

    The 95th percentiles of the last samples of all three are below their thresholds, for so many samples surely are.
    Parameters are those of SageMaker's BatchSize, in percent and in samples of half a second; the window fades.

    Off by default: how large a batch may be is also a question of how the model learns. Where PyTorch's allocator keeps
    memory that it took once, memory looks fuller than it is, and the rule is silent.
    """

    name = "batch_size"
    summary = "CPUs, GPU and its memory are all used little: batches are small for the machine"
    needs = Needs(collections=("system",), roles=("system",), histograms=True)
    merge = "sealed"
    usual_causes = ("batches are small for this machine", "the model is small for this machine")
    what_to_try = (
        "enlarge the batch, and the learning rate with it",
        "use a smaller machine, or let several trainings share it",
    )

    def evaluate(
        self, params: BatchSizeParams, state: BatchSizeState, context: Block, block: Block, now: int
    ) -> tuple[BatchSizeState, list[Finding]]:
        """Judge what each worker sampled at the same time."""
        held = block.statistics
        limits = (params.cpu_threshold_p95, params.gpu_threshold_p95, params.gpu_memory_threshold_p95)
        columns = dict(
            zip(("cpu", "gpu", "memory"), (surely_below(held, x / 100) for x in limits), strict=True)
        )
        low, findings = dict(state.low), []
        for rows in by_step(block):
            for row in rows:
                kind = _kind(block.info(row).name)
                if kind:
                    name = series_name(block, row)
                    low[name] = low.get(name, Recent()).after(
                        int(columns[kind][row]), int(held.finite[row]), params.window
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
