"""Rules about a GPU that is idle while another resource is the bottleneck: the CPUs, or disks.

Both judge the share of the last samples in which the GPU was idle and the other resource was busy. A row holds extremes and a histogram
of about twenty samples, so it is known how many samples of each resource were beyond a limit, not which. If a share a of the samples of
one and a share b of the other were, at least ``a + b - 1`` were both (Fréchet). Only this certain share counts.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, NamedTuple, TypeVar

from pydantic import Field

from watchstep.format.block import Block
from watchstep.format.system_figures import NODE_CPU, NODE_IO_STALL, NODE_IOWAIT, is_gpu
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.system_samples import Recent, by_step, series_name, surely_above, surely_below


class IdleGpuParams(Params):
    """Parameters of the rules about an idle GPU."""

    threshold: float = Field(
        50.0, gt=0, le=100, description="Tolerated percent of samples with a bottleneck."
    )
    gpu_threshold: float = Field(10.0, gt=0, le=100, description="Percent below which a GPU is idle.")
    window: int = Field(1000, ge=1, description="Samples in the window; older samples have less weight.")
    patience: int = Field(1000, ge=1, description="Samples before the first evaluation.")


class IdleGpuState(State):
    """The share of the last samples with an idle GPU and a busy other resource, by ``GPU@worker/mode``."""

    recent: dict[str, Recent] = Field(default_factory=dict)


class Bottleneck(NamedTuple):
    """The other resource.

    Attributes:
        limit: percent from which on it is busy.
        message: what a finding says of it.
    """

    limit: float
    message: str


P = TypeVar("P", bound=IdleGpuParams)


class IdleGpu(Rule[P, IdleGpuState]):
    """A GPU that is idle while another resource is busy.

    Attributes:
        figures: figures of the other resource; the first that was sampled counts.
    """

    figures: ClassVar[tuple[str, ...]]
    needs = Needs(collections=("system",), roles=("system",), histograms=True)
    merge = "watermark"

    @abstractmethod
    def bottleneck(self, params: P) -> Bottleneck:
        """The other resource, with these parameters."""

    def evaluate(
        self, params: P, state: IdleGpuState, context: Block, block: Block, now: int
    ) -> tuple[IdleGpuState, list[Finding]]:
        """Judge the samples that each worker took at the same time."""
        recent, findings = dict(state.recent), []
        bottleneck, batch = self.bottleneck(params), block.statistics
        idle, busy = (
            surely_below(batch, params.gpu_threshold / 100),
            surely_above(batch, bottleneck.limit / 100),
        )
        for rows in by_step(block):
            row_of = {block.info(row).name: row for row in rows}
            other = next((row_of[name] for name in self.figures if name in row_of), None)
            if other is None or not batch.finite[other]:
                continue
            busy_share = busy[other] / batch.finite[other]
            for row in rows:
                gpu, samples = block.info(row).name, int(batch.finite[row])
                if not is_gpu(gpu) or not samples:
                    continue
                both = max(0.0, float(idle[row] / samples + busy_share - 1))
                name = series_name(block, row)
                last = recent[name] = recent.get(name, Recent()).after(both * samples, samples, params.window)
                share = 100 * last.mean
                if last.seen >= params.patience and share >= params.threshold:
                    message = (
                        f"{gpu} was below {params.gpu_threshold:g} % while {bottleneck.message}, "
                        f"in {share:.0f} % of the last samples"
                    )
                    findings.append(
                        finding_at(
                            self.name, block, row, value=share, threshold=params.threshold, message=message
                        )
                    )
        return IdleGpuState(recent=recent), findings


class CpuBottleneckParams(IdleGpuParams):
    """Parameters of `CpuBottleneck`."""

    cpu_threshold: float = Field(90.0, gt=0, le=100, description="Percent at which the CPUs are busy.")


class CpuBottleneck(IdleGpu[CpuBottleneckParams]):
    """Fires when a GPU is idle and the machine's CPUs are busy, both at once, for much of the time.

    The share of the last samples with ``use of the GPU < gpu_threshold`` and ``use of the CPUs >= cpu_threshold`` is at least ``threshold``;
    all in percent. Defaults are those of SageMaker's CPUBottleneck, which counts from the start of the run; here the window decays, so that a
    slow start is forgotten. CPUs are those of the container if it has a quota.

    A single blocking thread is not visible in the utilization of many CPUs; `data_loader` detects the wait. Off by default, because the model
    learns correctly.
    """

    name = "cpu_bottleneck"
    summary = "a GPU is idle while the CPUs are busy"
    figures = (NODE_CPU,)
    usual_causes = (
        "data are decoded and augmented by too few, or by slow, processors",
        "other programs use this machine",
        "threads of several libraries outnumber the CPUs",
    )
    what_to_try = (
        "prepare data beforehand, or on the GPU",
        "request more CPUs per GPU",
        "set OMP_NUM_THREADS and torch.set_num_threads to the number of CPUs",
    )

    def bottleneck(self, params: CpuBottleneckParams) -> Bottleneck:
        """The CPUs."""
        limit = params.cpu_threshold
        return Bottleneck(limit, f"the CPUs were at {limit:g} % or more")


class IoBottleneckParams(IdleGpuParams):
    """Parameters of `IoBottleneck`."""

    io_threshold: float = Field(
        50.0, gt=0, le=100, description="Percent of time at which tasks wait much for disks."
    )


class IoBottleneck(IdleGpu[IoBottleneckParams]):
    """Fires when a GPU is idle and something waits for disks, both at once, for much of the time.

    The share of the last samples with ``use of the GPU < gpu_threshold`` and ``wait >= io_threshold`` is at least ``threshold``; all in
    percent, with the defaults of SageMaker's IOBottleneck. The wait is the share of time in which some task of the machine waits for disks, if
    the kernel reports it (pressure stall information, Linux 4.20 and later); otherwise the share of its CPUs that wait, as in SageMaker, which
    a single reader on a machine with many CPUs never raises to one half.

    Reading over the network does not count as a wait for disks; `data_loader` detects it. Off by default, because the model learns correctly.
    """

    name = "io_bottleneck"
    summary = "a GPU is idle while tasks wait for disks"
    figures = (NODE_IO_STALL, NODE_IOWAIT)
    usual_causes = (
        "data lie on a slow disk, or in very many small files",
        "checkpoints are written often, and training waits for them",
        "memory is insufficient, and pages are read repeatedly",
    )
    what_to_try = (
        "put the data on a local disk, in few large files, and read ahead",
        "write checkpoints less often, or asynchronously",
        "request more memory",
    )

    def bottleneck(self, params: IoBottleneckParams) -> Bottleneck:
        """The disks."""
        limit = params.io_threshold
        return Bottleneck(limit, f"tasks waited for disks for {limit:g} % of the time or more")
