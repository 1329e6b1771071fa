"""A GPU that is idle while the CPUs are busy."""

from __future__ import annotations

from pydantic import Field

from watchstep.format.block import Block
from watchstep.format.system_figures import NODE_CPU
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.system_samples import IdleThresholds, Recent, follow


class CpuBottleneckParams(Params):
    """Parameters of `CpuBottleneck`."""

    threshold: float = Field(50.0, gt=0, le=100, description="Percent of samples that may be so.")
    gpu_threshold: float = Field(10.0, gt=0, le=100, description="Percent below which a GPU is idle.")
    cpu_threshold: float = Field(90.0, gt=0, le=100, description="Percent from which on the CPUs are busy.")
    window: int = Field(1000, ge=1, description="Samples that count; older ones count for less and less.")
    patience: int = Field(1000, ge=1, description="Samples before the first judgement.")


class CpuBottleneckState(State):
    """The share of the last samples that were so, by ``GPU@worker/mode``."""

    recent: dict[str, Recent] = Field(default_factory=dict)


class CpuBottleneck(Rule[CpuBottleneckParams, CpuBottleneckState]):
    """Fires when a GPU is idle and the machine's CPUs are busy, both at once, for much of the time.

    The share of the last samples with ``use of the GPU < gpu_threshold`` and ``use of the CPUs >= cpu_threshold`` is at
    least ``threshold``; all in percent. Defaults are those of SageMaker's CPUBottleneck, which counts from the start of the
    run on; here a window fades, so that a slow start is forgotten. CPUs are the container's, where it has a quota.

    A single thread that holds everything up does not show in the CPUs of a machine that has many: `data_loader` sees the
    wait. Off by default: nothing is wrong with what is learnt.
    """

    name = "cpu_bottleneck"
    summary = "a GPU is idle while the CPUs are busy"
    needs = Needs(collections=("system",), roles=("system",), histograms=True)
    merge = "sealed"
    usual_causes = (
        "data are decoded and augmented by too few, or by slow, processors",
        "other programs use this machine",
        "threads of several libraries outnumber the CPUs",
    )
    what_to_try = (
        "prepare data beforehand, or on the GPU",
        "ask for more CPUs beside the GPU",
        "set OMP_NUM_THREADS and torch.set_num_threads to what the CPUs hold",
    )
    params_type = CpuBottleneckParams
    state_type = CpuBottleneckState

    def evaluate(
        self,
        params: CpuBottleneckParams,
        state: CpuBottleneckState,
        context: Block,  # noqa: ARG002 - the contract's
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[CpuBottleneckState, list[Finding]]:
        """Judge what each worker sampled at the same time."""
        recent = dict(state.recent)
        limits = IdleThresholds(params.gpu_threshold / 100, params.cpu_threshold / 100, params.window)
        findings = []
        for row, known in follow(block, recent, (NODE_CPU,), limits):
            share = 100 * known.mean
            if known.seen >= params.patience and share >= params.threshold:
                message = (
                    f"{block.info(row).name} was below {params.gpu_threshold:g} % while the CPUs were at "
                    f"{params.cpu_threshold:g} % or more, in {share:.0f} % of the last samples"
                )
                findings.append(
                    finding_at(
                        self.name, block, row, value=share, threshold=params.threshold, message=message
                    )
                )
        return CpuBottleneckState(recent=recent), findings
