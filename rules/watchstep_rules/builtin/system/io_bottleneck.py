"""A GPU that is idle while tasks wait for disks."""

from __future__ import annotations

from pydantic import Field

from watchstep.format.block import Block
from watchstep.format.system_figures import NODE_IO_STALL, NODE_IOWAIT
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.system_samples import IdleThresholds, Recent, follow


class IoBottleneckParams(Params):
    """Parameters of `IoBottleneck`."""

    threshold: float = Field(50.0, gt=0, le=100, description="Percent of samples that may be so.")
    gpu_threshold: float = Field(10.0, gt=0, le=100, description="Percent below which a GPU is idle.")
    io_threshold: float = Field(
        50.0, gt=0, le=100, description="Percent of waiting from which on it is much."
    )
    window: int = Field(1000, ge=1, description="Samples that count; older ones count for less and less.")
    patience: int = Field(1000, ge=1, description="Samples before the first judgement.")


class IoBottleneckState(State):
    """The share of the last samples that were so, by ``GPU@worker/mode``."""

    recent: dict[str, Recent] = Field(default_factory=dict)


class IoBottleneck(Rule[IoBottleneckParams, IoBottleneckState]):
    """Fires when a GPU is idle and something waits for disks, both at once, for much of the time.

    The share of the last samples with ``use of the GPU < gpu_threshold`` and ``wait >= io_threshold`` is at least
    ``threshold``; all in percent, and SageMaker's of IOBottleneck. The wait is the share of time in which some task of the
    machine waits for disks, where the kernel tells (pressure stall information, Linux 4.20 and later); else the share of
    its CPUs that wait, SageMaker's figure, which one reader on a machine of many CPUs never brings to a half.

    Reading over the network does not count as a wait for disks: `data_loader` sees it. Off by default: nothing is wrong
    with what is learnt.
    """

    name = "io_bottleneck"
    summary = "a GPU is idle while tasks wait for disks"
    needs = Needs(collections=("system",), roles=("system",), histograms=True)
    merge = "sealed"
    usual_causes = (
        "data lie on a slow disk, or in very many small files",
        "checkpoints are written often, and training waits for them",
        "memory is short, and pages are read again and again",
    )
    what_to_try = (
        "put the data on a local disk, in few large files, and read ahead",
        "write checkpoints more rarely, or beside training",
        "ask for more memory",
    )
    params_type = IoBottleneckParams
    state_type = IoBottleneckState

    def evaluate(
        self,
        params: IoBottleneckParams,
        state: IoBottleneckState,
        context: Block,  # noqa: ARG002 - the contract's
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[IoBottleneckState, list[Finding]]:
        """Judge what each worker sampled at the same time."""
        recent = dict(state.recent)
        limits = IdleThresholds(params.gpu_threshold / 100, params.io_threshold / 100, params.window)
        findings = []
        for row, known in follow(block, recent, (NODE_IO_STALL, NODE_IOWAIT), limits):
            share = 100 * known.mean
            if known.seen >= params.patience and share >= params.threshold:
                message = (
                    f"{block.info(row).name} was below {params.gpu_threshold:g} % while tasks waited for disks for "
                    f"{params.io_threshold:g} % of the time or more, in {share:.0f} % of the last samples"
                )
                findings.append(
                    finding_at(
                        self.name, block, row, value=share, threshold=params.threshold, message=message
                    )
                )
        return IoBottleneckState(recent=recent), findings
