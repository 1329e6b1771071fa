"""Rules of Amazon's profiler decide as documented, on samples whose every row is of one kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.rules.builtin.system_rows import SAMPLES, system_run
from tests.rules.runs import all_at_once
from watchstep.format.system_figures import (
    CPUS,
    DATA_WORKERS,
    INITIALIZATION_SECONDS,
    NODE_CPU,
    NODE_IOWAIT,
    STEP_SECONDS,
)
from watchstep_rules.config.rule_config import RuleConfig

GPU, MEMORY = "system/gpu_0", "system/gpu_0_memory"
FEW = {"patience": 100}


def fires(rule: str, params: dict[str, Any], figures: dict[str, Any], rows: int = 40) -> bool:
    config = RuleConfig(rule=f"sagemaker_{rule}", params=params)
    outcome = all_at_once(config, system_run(figures, rows=rows))
    assert all(finding.rule == config.rule for finding in outcome.findings)
    return bool(outcome.findings)


@pytest.mark.parametrize(
    ("cpu", "gpu", "memory", "found"),
    [(0.3, 0.3, 0.3, True), (0.8, 0.3, 0.3, False), (0.3, 0.8, 0.3, False), (0.3, 0.3, 0.8, False)],
)
def test_batch_size(cpu: float, gpu: float, memory: float, found: bool) -> None:
    figures = {NODE_CPU: cpu, GPU: gpu, MEMORY: memory}
    samples = np.full(40 * SAMPLES, 100.0)
    low = all(np.percentile(samples * share, 95) < 70 for share in (cpu, gpu, memory))
    assert fires("batch_size", {**FEW, "window": "100"}, figures) is low is found
    assert not fires("batch_size", {}, figures)  # fewer samples than its patience


@pytest.mark.parametrize(("rule", "other"), [("cpu_bottleneck", NODE_CPU), ("io_bottleneck", NODE_IOWAIT)])
@pytest.mark.parametrize(("idle_rows", "found"), [(25, True), (15, False)])
def test_bottlenecks_count_from_the_start(rule: str, other: str, idle_rows: int, found: bool) -> None:
    def gpu(row: int) -> float:
        return 0.05 if row < idle_rows else 0.9

    share = 100 * idle_rows / 40
    assert (share >= 50) is found
    config = RuleConfig(rule=f"sagemaker_{rule}", params={"patience": 40 * SAMPLES})
    outcome = all_at_once(config, system_run({GPU: gpu, other: 0.95}, rows=40))
    assert bool(outcome.findings) is found


@pytest.mark.parametrize(("low", "high", "found"), [(0.5, 0.5, True), (0.9, 0.9, False), (0.02, 0.9, True)])
def test_low_gpu_utilization(low: float, high: float, found: bool) -> None:
    def gpu(row: int) -> float:
        return low if row % 2 else high

    samples = np.array([100 * gpu(row) for row in range(40)])
    p95, p5 = np.percentile(samples, [95, 5])
    assert bool(p95 < 70 or p5 < 10) is found
    assert fires("low_gpu_utilization", FEW, {GPU: gpu}) is found


@pytest.mark.parametrize(("rises", "found"), [(0.06, True), (0.04, False)])
@pytest.mark.parametrize("window", [10, 60])
def test_gpu_memory_increase(rises: float, found: bool, window: int) -> None:
    def memory(row: int) -> float:
        return 0.4 + (rises if row >= 20 else 0.0)

    rows = -(-window // SAMPLES)
    course = np.array([100 * memory(row) for row in range(40)])
    averages = np.convolve(course, np.ones(rows) / rows, "valid")
    assert bool((averages[rows:] - averages[:-rows] > 5).any()) is found
    assert fires("gpu_memory_increase", {**FEW, "window": window}, {MEMORY: memory}) is found
    assert not fires("gpu_memory_increase", {"window": window}, {MEMORY: memory})  # within its patience


@pytest.mark.parametrize(("first", "second", "found"), [(0.9, 0.85, False), (0.9, 0.2, True)])
def test_load_balancing(first: float, second: float, found: bool) -> None:
    assert fires("load_balancing", FEW, {GPU: first, "system/gpu_1": second}) is found
    assert not fires("load_balancing", {**FEW, "threshold": "0.95"}, {GPU: first, "system/gpu_1": second})


@pytest.mark.parametrize(("slow", "found"), [(1.0, False), (10.0, True)])
def test_step_outlier(slow: float, found: bool) -> None:
    def steps(row: int) -> list[float]:
        usual = [0.95, 1.05] * (SAMPLES // 2)
        return [*usual[:-1], slow] if row > 20 else usual

    assert fires("step_outlier", {"n_outliers": 5, "mode": "TRAIN"}, {STEP_SECONDS: steps}) is found
    assert not fires("step_outlier", {"n_outliers": 100}, {STEP_SECONDS: steps})


@pytest.mark.parametrize(("minutes", "found"), [(19.0, False), (21.0, True)])
def test_max_initialization_time(minutes: float, found: bool) -> None:
    assert fires("max_initialization_time", {}, {INITIALIZATION_SECONDS: 60 * minutes}, rows=1) is found
    assert not fires(
        "max_initialization_time", {"threshold": "30"}, {INITIALIZATION_SECONDS: 60 * minutes}, rows=1
    )


@pytest.mark.parametrize(("workers", "found"), [(0, False), (4, True), (6, False), (16, False), (17, True)])
def test_dataloader(workers: float, found: bool) -> None:
    cores = 8.0
    assert (workers > 0 and not 70 <= 100 * workers / cores <= 200) is found
    assert fires("dataloader", {}, {DATA_WORKERS: workers, CPUS: cores}, rows=1) is found


@pytest.mark.parametrize(
    ("params", "found"),
    [
        ({}, False),
        ({"LowGPUUtilization_patience": 100}, True),
        ({"lowgpuutilization_patience": "100", "LowGPUUtilization_threshold_p95": 30}, False),
    ],
)
def test_a_profiler_report_fires_when_one_of_its_rules_does(params: dict[str, Any], found: bool) -> None:
    config = RuleConfig(rule="sagemaker_profiler_report", params=params)
    outcome = all_at_once(config, system_run({GPU: 0.5}, rows=40))
    assert bool(outcome.findings) is found
    assert all(finding.message.startswith("LowGPUUtilization: ") for finding in outcome.findings)
