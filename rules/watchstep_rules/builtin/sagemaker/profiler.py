"""SageMaker profiler rules, which judge samples of the process and its machine.

All but three delegate to a built-in rule with translated parameters. ``scan_interval_us`` is the interval at which SageMaker reads its
files; here rows are judged as they arrive.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, ClassVar

import numpy as np
from pydantic import BeforeValidator, Field

from watchstep.format.block import Block
from watchstep.format.system_figures import CPUS, DATA_WORKERS, is_gpu_memory
from watchstep_rules.builtin.sagemaker.parameters import AmazonParams, ModeName, ScanInterval, Translated
from watchstep_rules.builtin.system.batch_size import BatchSize
from watchstep_rules.builtin.system.data_loader import DataLoader
from watchstep_rules.builtin.system.idle_gpu import CpuBottleneck, IoBottleneck
from watchstep_rules.builtin.system.initialization_time import InitializationTime
from watchstep_rules.builtin.system.load_balance import LoadBalance
from watchstep_rules.builtin.system.low_gpu_utilization import LowGpuUtilization
from watchstep_rules.builtin.system.memory_growth import GpuMemoryIncrease
from watchstep_rules.builtin.system.step_outlier import StepOutlier
from watchstep_rules.rule import Finding, Needs, Rule, State, finding_at
from watchstep_rules.signals.series import LaggedRows
from watchstep_rules.signals.system_samples import by_step, means, series_name

_FROM_THE_START = 1_000_000_000
"""A window longer than any run."""

_SAMPLES_PER_ROW = 20
"""Samples are taken every half second, and rows every ten seconds."""

Percent = Annotated[float, Field(gt=0, le=100)]


class SagemakerBatchSizeParams(AmazonParams):
    """Parameters of `SagemakerBatchSize`."""

    amazon: ClassVar[str] = "BatchSize"
    cpu_threshold_p95: Percent = Field(70.0, description="Percent of the machine's CPUs.")
    gpu_threshold_p95: Percent = Field(70.0, description="Percent of a GPU's time.")
    gpu_memory_threshold_p95: Percent = Field(70.0, description="Percent of the GPU's memory.")
    patience: int = Field(1000, ge=1, description="Samples before the first evaluation.")
    window: int = Field(500, ge=1, description="Samples in the window; older samples have less weight.")
    scan_interval_us: ScanInterval


class SagemakerBatchSize(Translated[SagemakerBatchSizeParams]):
    """Fires when neither the CPUs nor a GPU nor its memory is used much: `batch_size` with SageMaker's parameters."""

    name = "sagemaker_batch_size"
    summary = "CPUs, GPU and its memory are all used little, by SageMaker's criterion"
    inner = BatchSize()


class SagemakerCpuBottleneckParams(AmazonParams):
    """Parameters of `SagemakerCpuBottleneck`."""

    amazon: ClassVar[str] = "CPUBottleneck"
    threshold: Percent = Field(50.0, description="Tolerated percent of samples with a bottleneck.")
    gpu_threshold: Percent = Field(10.0, description="Percent below which a GPU is idle.")
    cpu_threshold: Percent = Field(90.0, description="Percent at which the CPUs are busy.")
    patience: int = Field(1000, ge=1, description="Samples before the first evaluation.")
    scan_interval_us: ScanInterval


class SagemakerCpuBottleneck(Translated[SagemakerCpuBottleneckParams]):
    """Fires when a GPU is idle and the CPUs are busy in ``threshold`` percent of all samples: `cpu_bottleneck`.

    All samples since the start have the same weight.
    """

    name = "sagemaker_cpu_bottleneck"
    summary = "a GPU is idle while the CPUs are busy, by SageMaker's criterion"
    inner = CpuBottleneck()
    fixed = MappingProxyType({"window": _FROM_THE_START})


class SagemakerIoBottleneckParams(AmazonParams):
    """Parameters of `SagemakerIoBottleneck`."""

    amazon: ClassVar[str] = "IOBottleneck"
    threshold: Percent = Field(50.0, description="Tolerated percent of samples with a bottleneck.")
    gpu_threshold: Percent = Field(10.0, description="Percent below which a GPU is idle.")
    io_threshold: Percent = Field(50.0, description="Percent of time at which tasks wait much for disks.")
    patience: int = Field(1000, ge=1, description="Samples before the first evaluation.")
    scan_interval_us: ScanInterval


class SagemakerIoBottleneck(Translated[SagemakerIoBottleneckParams]):
    """Fires when a GPU is idle and tasks wait for disks in ``threshold`` percent of all samples: `io_bottleneck`.

    All samples since the start have the same weight.
    """

    name = "sagemaker_io_bottleneck"
    summary = "a GPU is idle while tasks wait for disks, by SageMaker's criterion"
    inner = IoBottleneck()
    fixed = MappingProxyType({"window": _FROM_THE_START})


class SagemakerLowGpuUtilizationParams(AmazonParams):
    """Parameters of `SagemakerLowGpuUtilization`."""

    amazon: ClassVar[str] = "LowGPUUtilization"
    threshold_p95: Percent = Field(70.0, description="Percent below which the 95th percentile is low.")
    threshold_p5: Percent = Field(10.0, description="Percent below which the 5th percentile is a pause.")
    window: int = Field(500, ge=1, description="Samples in the window; older samples have less weight.")
    patience: int = Field(1000, ge=1, description="Samples before the first evaluation.")
    scan_interval_us: ScanInterval


class SagemakerLowGpuUtilization(Translated[SagemakerLowGpuUtilizationParams]):
    """Fires when a GPU is hardly used, or is used in bursts with pauses: `low_gpu_utilization` with SageMaker's parameters."""

    name = "sagemaker_low_gpu_utilization"
    summary = "a GPU computes little, or in bursts with pauses, by SageMaker's criterion"
    inner = LowGpuUtilization()


class SagemakerLoadBalancingParams(AmazonParams):
    """Parameters of `SagemakerLoadBalancing`."""

    amazon: ClassVar[str] = "LoadBalancing"
    threshold: float = Field(0.5, gt=0, le=100, description="Share by which GPUs may differ.")
    patience: int = Field(1000, ge=1, description="Samples before the first evaluation.")
    scan_interval_us: ScanInterval


class SagemakerLoadBalancing(Translated[SagemakerLoadBalancingParams]):
    """Fires when one GPU does much less than the others, or a rank's steps take much longer: `load_balance`.

    The threshold is a share of the others' mean instead of a distance of histograms.
    """

    name = "sagemaker_load_balancing"
    summary = "GPUs have unequal work, with SageMaker's parameters"
    inner = LoadBalance()


def _only_training(value: object) -> object:
    if isinstance(value, str) and value.rpartition(".")[2].upper() != "TRAIN":
        raise ValueError(f"{value!r}: only training steps are timed; omit it, or use TRAIN")
    return value


class SagemakerStepOutlierParams(AmazonParams):
    """Parameters of `SagemakerStepOutlier`."""

    amazon: ClassVar[str] = "StepOutlier"
    stddev: float = Field(
        3.0, gt=0, description="Standard deviations above the usual duration at which a step is an outlier."
    )
    mode: Annotated[ModeName | None, BeforeValidator(_only_training)] = Field(
        None, description="TRAIN, or null for the same."
    )
    n_outliers: int = Field(10, ge=1, description="Outliers within the last thousand rows.")
    scan_interval_us: ScanInterval


class SagemakerStepOutlier(Translated[SagemakerStepOutlierParams]):
    """Fires when ``n_outliers`` steps took ``stddev`` standard deviations longer than usual: `step_outlier`, however little time they cost."""

    name = "sagemaker_step_outlier"
    summary = "some steps take far longer than the others, with SageMaker's parameters"
    inner = StepOutlier()
    fixed = MappingProxyType({"lost": 0.0})


class SagemakerMaxInitializationTimeParams(AmazonParams):
    """Parameters of `SagemakerMaxInitializationTime`."""

    amazon: ClassVar[str] = "MaxInitializationTime"
    threshold: float = Field(20.0, gt=0, description="Tolerated minutes until the first step.")
    scan_interval_us: ScanInterval


class SagemakerMaxInitializationTime(Translated[SagemakerMaxInitializationTimeParams]):
    """Fires when more than ``threshold`` minutes passed until the first step: `initialization_time`."""

    name = "sagemaker_max_initialization_time"
    summary = "it takes long until the first step, by SageMaker's criterion"
    inner = InitializationTime()


class SagemakerGpuMemoryIncreaseParams(AmazonParams):
    """Parameters of `SagemakerGpuMemoryIncrease`."""

    amazon: ClassVar[str] = "GPUMemoryIncrease"
    increase: Percent = Field(5.0, description="Percent of the GPU's memory by which the average may grow.")
    patience: int = Field(1000, ge=0, description="First samples, which are ignored.")
    window: int = Field(
        10, ge=1, le=20_000, description="Samples of the moving average; a row contains twenty samples."
    )
    scan_interval_us: ScanInterval

    @property
    def rows(self) -> int:
        """Number of rows of the moving average."""
        return -(-self.window // _SAMPLES_PER_ROW)


class SagemakerGpuMemoryIncreaseState(State):
    """State of `SagemakerGpuMemoryIncrease`: number of samples so far, by ``figure@worker/mode``, up to the patience."""

    samples: dict[str, int] = Field(default_factory=dict)


class SagemakerGpuMemoryIncrease(Rule[SagemakerGpuMemoryIncreaseParams, SagemakerGpuMemoryIncreaseState]):
    """Fires when the moving average of a GPU's memory is ``increase`` points above the previous average: SageMaker's criterion.

    Both are means of whole rows of twenty samples, as many rows as ``window`` samples need. A single step up, as PyTorch's allocator makes
    at the first evaluation, is reported; `gpu_memory_increase` requires steady growth.
    """

    name = "sagemaker_gpu_memory_increase"
    summary = "the memory of a GPU grows, by SageMaker's criterion"
    needs = Needs(("system",), ("system",))
    merge = "per_worker"
    usual_causes = GpuMemoryIncrease.usual_causes
    what_to_try = GpuMemoryIncrease.what_to_try

    def lookback(self, params: SagemakerGpuMemoryIncreaseParams) -> int:
        """The rows of both averages."""
        return 2 * params.rows - 1

    def evaluate(
        self,
        params: SagemakerGpuMemoryIncreaseParams,
        state: SagemakerGpuMemoryIncreaseState,
        context: Block,
        block: Block,
        now: int,
    ) -> tuple[SagemakerGpuMemoryIncreaseState, list[Finding]]:
        """Compare the average that ends with each row with the average before it."""
        lagged = LaggedRows.of(context, block)
        column = lagged.column(means)
        averages = [
            np.mean([lagged.lag(column, rows) for rows in range(first, first + params.rows)], axis=0)
            for first in (0, params.rows)
        ]
        risen = 100 * (averages[0] - averages[1])
        samples, findings = dict(state.samples), []
        chosen = block.mask_of_tensors([is_gpu_memory(info.name) for info in block.catalogue])
        for row in np.flatnonzero(chosen).tolist():
            name = series_name(block, row)
            # The rows of the previous average must also be past the patience.
            seen = samples[name] = samples.get(name, 0) + int(block.statistics.finite[row])
            if seen > params.patience and risen[row] > params.increase:
                message = (
                    f"{block.info(row).name} has grown by {risen[row]:.3g} points over {params.rows} rows, "
                    f"{params.increase:g} tolerated"
                )
                findings.append(
                    finding_at(
                        self.name,
                        block,
                        row,
                        value=float(risen[row]),
                        threshold=params.increase,
                        message=message,
                    )
                )
            samples[name] = min(seen, params.patience + 1)
        return SagemakerGpuMemoryIncreaseState(samples=samples), findings


class SagemakerDataloaderParams(AmazonParams):
    """Parameters of `SagemakerDataloader`."""

    amazon: ClassVar[str] = "Dataloader"
    min_threshold: float = Field(
        70.0, ge=0, description="Minimum number of data loading processes, in percent of the CPUs."
    )
    max_threshold: float = Field(
        200.0, gt=0, description="Maximum number of data loading processes, in percent of the CPUs."
    )
    scan_interval_us: ScanInterval


class SagemakerDataloader(Rule[SagemakerDataloaderParams, State]):
    """Fires when fewer processes load data than ``min_threshold`` percent of the CPUs, or more than ``max_threshold``.

    This is SageMaker's criterion. A training that loads its data in the training process has no such process and is not judged.
    `data_loader` judges whether steps wait for data.
    """

    name = "sagemaker_dataloader"
    summary = "few or many processes load data for the number of CPUs, by SageMaker's criterion"
    needs = Needs(("system",), ("system",))
    merge = "watermark"
    usual_causes = DataLoader.usual_causes
    what_to_try = DataLoader.what_to_try

    def evaluate(
        self, params: SagemakerDataloaderParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Judge the samples that each worker took at the same time."""
        values, findings = means(block), []
        for rows in by_step(block):
            row_of = {block.info(row).name: row for row in rows if np.isfinite(values[row])}
            if not {DATA_WORKERS, CPUS} <= row_of.keys():
                continue
            row, cpus = row_of[DATA_WORKERS], float(values[row_of[CPUS]])
            share = 100 * float(values[row]) / cpus if cpus > 0 else np.nan
            if share > params.max_threshold or 0 < share < params.min_threshold:
                limit = params.max_threshold if share > params.max_threshold else params.min_threshold
                message = (
                    f"{block.info(row).name}: {values[row]:.0f} processes load data on {cpus:.3g} CPUs, which is {share:.0f} % "
                    f"and not {params.min_threshold:g} to {params.max_threshold:g} %"
                )
                findings.append(
                    finding_at(self.name, block, row, value=share, threshold=limit, message=message)
                )
        return state, findings
