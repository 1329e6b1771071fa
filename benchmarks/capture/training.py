"""Figures of what a training loses: processor time, its own thread's time, memory, and whether the account is right."""

from __future__ import annotations

import statistics
from collections.abc import Collection

from benchmarks.capture.models import WORKLOADS
from benchmarks.capture.rounds import Series, measure
from benchmarks.capture.variants import AGAIN, BASE, VARIANTS
from benchmarks.report import Figure, Report

_ROUNDS = {
    "transformer": 6,
    "transformer_small": 9,
    "mlp": 12,
    "cnn": 9,
    "gpt": 6,
    "encoder": 6,
    "dcgan": 6,
    "ppo": 6,
    "bert": 6,
    "modules": 6,
}
_ROUNDS_QUICK = 2
_QUICK_VARIANTS = (
    BASE,
    AGAIN,
    "gate",
    "statistics",
    "statistics_tensors",
    "activations_tensors",
    "state_tensors",
    "separate_operations",
    "wandb",
)
_A_THIRD = 1 / 3


def add_training_figures(
    workload: str, report: Report, *, quick: bool, variants: Collection[str] = ()
) -> None:
    """Measure one workload; the report gets what each variant cost on it. All of them where none are named."""
    wanted = variants or (_QUICK_VARIANTS if quick else VARIANTS)
    possible = [name for name, kind in VARIANTS.items() if not kind.workloads or workload in kind.workloads]
    chosen = tuple(name for name in possible if name in wanted or name in {BASE, AGAIN})
    left_out = [name for name in possible if name not in chosen]
    if left_out:
        report.remark(f"{workload}: left out of this run: {', '.join(left_out)}")
    rounds = _ROUNDS_QUICK if quick else _ROUNDS[workload]
    found = measure(workload, chosen, rounds, quick=quick)
    base = found[BASE]
    report.remark(
        f"{workload}: {WORKLOADS[workload].title}, {base.least(1) * 1e3:.1f} ms of CPU a step uninstrumented"
    )
    report.remark(f"{workload}: {rounds} rounds; fewer of peers and of variants with a period")
    noise = abs(found[AGAIN].least(1) / base.least(1) - 1)
    for variant, series in found.items():
        if variant != BASE:
            _add(report, workload, variant, series, base, noise)


def _add(report: Report, workload: str, variant: str, series: Series, base: Series, noise: float) -> None:
    kind = VARIANTS[variant]
    target = kind.targets.get(workload)
    if series.missing:
        report.add(f"{workload}/{variant}/cpu", Figure(None, "ratio", target, note=series.missing))
        report.remark(f"MISSING: {workload}/{variant}: {series.missing}")
        return
    period = kind.period
    ratio, mean = series.least(period) / base.least(period), series.mean / base.mean
    steps = sum(len(sample.thread) for sample in series.samples)
    note = f"{steps} steps in {len(series.samples)} rounds, median/min {series.spread:.2f} (bare {base.spread:.2f})"
    if kind.mean:
        note = f"mean; least/least {ratio:.3f}; {note}"
    measured = mean if kind.mean else ratio
    report.add(f"{workload}/{variant}/cpu", Figure(measured, "ratio", target, note=note))
    _add_thread(report, workload, variant, series, base)
    if series.farewell and base.farewell:
        extra = series.farewell.peak - base.farewell.peak
        note = f"uninstrumented {base.farewell.peak:.0f} MiB"
        bound = kind.memory_bound / 2**20 if kind.memory_bound else None
        report.add(f"{workload}/{variant}/memory", Figure(extra, "MiB", bound, note=note))
        if series.farewell.account:
            name = f"{workload}/{variant}/account"
            _add_account(report, name, series.farewell.account / base.least(period), measured - 1, noise)


def _add_thread(report: Report, workload: str, variant: str, series: Series, base: Series) -> None:
    """The training thread's own time: what is left when all that runs behind it is taken away."""
    pick, period = statistics.fmean if VARIANTS[variant].mean else min, VARIANTS[variant].period
    target = VARIANTS[variant].thread_targets.get(workload)
    ratio = pick(series.threads(period)) / pick(base.threads(period))
    report.add(f"{workload}/{variant}/thread", Figure(ratio, "ratio", target))
    if target is not None:
        note = f"one step in {period} against the others of its process"
        report.add(
            f"{workload}/{variant}/due_steps", Figure(series.due_steps(period), "ratio", target, note=note)
        )


def _add_account(report: Report, name: str, told: float, measured: float, noise: float) -> None:
    """The recorder's own account beside the difference of two trainings, where that is more than the noise."""
    note = f"it says {told:.2%}, the difference is {measured:.2%}, the noise {noise:.2%}"
    if measured < 3 * noise:
        report.add(name, Figure(None, "relative error", note=f"{note}: too little to tell"))
        return
    report.add(name, Figure(abs(told / measured - 1), "relative error", _A_THIRD, note=note))
