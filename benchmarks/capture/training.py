"""Figures of what a training loses: processor time, its own thread's time, memory, and whether the account is right."""

from __future__ import annotations

import statistics

from benchmarks.capture.models import WORKLOADS
from benchmarks.capture.rounds import Series, measure
from benchmarks.capture.variants import AGAIN, BASE, VARIANTS
from benchmarks.report import Figure, Report

_ROUNDS = {"transformer": 9, "transformer_small": 15, "mlp": 18, "cnn": 18}
_ROUNDS_QUICK = 2
_QUICK_VARIANTS = (BASE, AGAIN, "gate", "statistics", "statistics_tensors", "separate_operations", "wandb")
_LOST = 1.02
"""At most 2 % of the training thread's time, with full tensors every 10 steps."""
_A_THIRD = 1 / 3
_TELLING = 0.005
"""Below half a hundredth of the step, the difference of two trainings says nothing about an account."""


def add_training_figures(workload: str, report: Report, *, quick: bool) -> None:
    """Measure one workload; the report gets what each variant cost on it."""
    chosen = _QUICK_VARIANTS if quick else tuple(VARIANTS)
    rounds = _ROUNDS_QUICK if quick else _ROUNDS[workload]
    found = measure(workload, chosen, rounds, quick=quick)
    base = found[BASE]
    least = min(base.cpu) * 1e3
    report.remark(f"{workload}: {WORKLOADS[workload].title}, {least:.1f} ms of CPU a step uninstrumented")
    for variant, series in found.items():
        if variant != BASE:
            _add(report, workload, variant, series, base)


def _add(report: Report, workload: str, variant: str, series: Series, base: Series) -> None:
    kind = VARIANTS[variant]
    target = kind.targets.get(workload)
    if series.missing:
        report.add(f"{workload}/{variant}/cpu", Figure(None, "ratio", target, note=series.missing))
        report.remark(f"MISSING: {workload}/{variant}: {series.missing}")
        return
    ratio = min(series.cpu) / min(base.cpu)
    mean = statistics.fmean(series.cpu) / statistics.fmean(base.cpu)
    note = f"{len(series.cpu)} rounds, median/min {series.spread:.2f} (bare {base.spread:.2f})"
    if kind.mean:
        note = f"mean over {len(series.cpu)} rounds; least/least {ratio:.3f}; {note.partition(', ')[2]}"
    report.add(f"{workload}/{variant}/cpu", Figure(mean if kind.mean else ratio, "ratio", target, note=note))
    _add_thread(report, workload, variant, series, base)
    if series.farewell and base.farewell:
        extra = series.farewell.peak - base.farewell.peak
        note = f"uninstrumented {base.farewell.peak:.0f} MiB"
        report.add(f"{workload}/{variant}/memory", Figure(extra, "MiB", note=note))
        if series.farewell.account is not None:
            _add_account(report, f"{workload}/{variant}/account", series.farewell.account, mean - 1)


def _add_thread(report: Report, workload: str, variant: str, series: Series, base: Series) -> None:
    """The training thread's own time: what is left when all that runs behind it is taken away."""
    thread = [sample.thread for sample in series.samples]
    bare = [sample.thread for sample in base.samples]
    pick = statistics.fmean if VARIANTS[variant].mean else min
    target = _LOST if (workload, variant) == ("mlp", "statistics_tensors") else None
    report.add(f"{workload}/{variant}/thread", Figure(pick(thread) / pick(bare), "ratio", target))


def _add_account(report: Report, name: str, told: float, measured: float) -> None:
    """The recorder's own account beside the difference of two trainings."""
    if measured < _TELLING:
        note = f"it says {told:.2%}; the difference, {measured:.2%}, is too small to tell"
        report.add(name, Figure(None, "relative error", note=note))
        return
    note = f"it says {told:.2%}, the difference is {measured:.2%}"
    report.add(name, Figure(abs(told / measured - 1), "relative error", _A_THIRD, note=note))
