"""What recording costs trainings with JAX, Keras and TensorFlow: CPU time, compile time, memory, and whether losses are equal.

Runs in the environment of the frameworks: ``make bench-frameworks BENCH_ARGS="--json FILE"``. All processes share one core, XLA and
TensorFlow compute on one thread, and the plain training and each variant take turns, round by round.
"""

from __future__ import annotations

import os
import statistics
import sys
from dataclasses import replace

from benchmarks.frameworks.rounds import (
    AGAIN,
    DENSE_STEPS,
    PLAIN,
    Plan,
    VariantSeries,
    equal_losses,
    losses_of,
    measure,
)
from benchmarks.frameworks.workloads import QUICK, WORKLOADS
from benchmarks.report import Figure, Report, arguments

_FULL = Plan(launches=2, rounds=3)
_QUICK = Plan(launches=1, rounds=2, is_quick=True)
_PACKAGES = ("jax", "jaxlib", "optax", "keras", "tensorflow-cpu", "ml-dtypes")


def add_workload(report: Report, workload: str, plan: Plan) -> None:
    """Measure one workload; the report gets what each variant cost on it."""
    before = os.getloadavg()[0]
    found = measure(workload, plan)
    chosen = WORKLOADS[workload]
    plain = min(cost for series in found.values() for _, cost in series.pairs) / chosen.steps
    report.remark(
        f"{workload}: {chosen.title}; {plain * 1e3:.1f} ms of CPU a plain step; {plan.launches} launches of {plan.rounds} rounds of "
        f"{chosen.steps} steps; load {before:.1f} before, {os.getloadavg()[0]:.1f} after"
    )
    for variant, series in found.items():
        if variant == PLAIN:
            report.add(f"{workload}/{PLAIN}/first_call", _first_call(series))
        elif series.missing:
            target = chosen.targets.get(variant)
            report.add(f"{workload}/{variant}/cpu", Figure(None, "ratio", target, note="failed"))
            report.remark(f"MISSING: {workload}/{variant}: {series.missing}")
        else:
            _add_variant(report, workload, variant, found)
    _add_equality(report, workload, found)


def _add_variant(report: Report, workload: str, variant: str, found: dict[str, VariantSeries]) -> None:
    series, target = found[variant], WORKLOADS[workload].targets.get(variant)
    low, high = min(series.ratios()), max(series.ratios())
    note = f"median of {len(series.pairs)} rounds, {low:.3f} to {high:.3f}; least/least {series.least:.3f}"
    if measured := series.outcomes[-1].measured:
        note += "; measured " + ", ".join(f"{role} {steps}x" for role, steps in measured.items())
    report.add(f"{workload}/{variant}/cpu", Figure(series.median, "ratio", target, note=note))
    if variant == "defaults" and series.dense_pairs:
        ratio = statistics.median(series.ratios(dense=True))
        report.add(
            f"{workload}/{variant}/cpu_dense",
            Figure(ratio, "ratio", note=f"the first {DENSE_STEPS} steps after the first call"),
        )
    report.add(f"{workload}/{variant}/first_call", _first_call(series))
    extra = max(each.peak for each in series.outcomes) - max(each.peak for each in found[PLAIN].outcomes)
    report.add(f"{workload}/{variant}/memory", Figure(extra, "MiB", note="peak, above the plain training"))


def _first_call(series: VariantSeries) -> Figure:
    return Figure(
        statistics.median(series.first),
        "s",
        note="CPU of the first call: trace and compile; "
        + ", ".join(f"{seconds:.2f}" for seconds in series.first),
    )


def _add_equality(report: Report, workload: str, found: dict[str, VariantSeries]) -> None:
    """Whether the losses of all variants are equal. One that is not meets no target."""
    words = {True: "equal", False: "DIFFERENT", None: "not compared"}
    results = {variant: equal_losses(found, variant) for variant in found if variant not in {PLAIN, AGAIN}}
    different = sum(result is False for variant, result in results.items() if variant != "naive")
    note = "; ".join(f"{variant} {words[result]}" for variant, result in results.items())
    report.add(
        f"{workload}/different_losses",
        Figure(float(different), "variants", 0.0, note=f"{losses_of(found)} losses: {note}"),
    )


def main() -> None:
    """Measure, print, write."""
    parser = arguments(__doc__ or "")
    parser.prog = "python -m benchmarks.frameworks"
    parser.add_argument(
        "--only", choices=list(WORKLOADS), action="append", help="leave the other workloads out"
    )
    parser.add_argument("--launches", type=int, help=f"of all processes; {_FULL.launches}")
    parser.add_argument("--rounds", type=int, help=f"of each variant in a launch; {_FULL.rounds}")
    options = parser.parse_args()
    report = Report("Frameworks", quick=options.quick, packages=_PACKAGES)
    chosen = options.only or (QUICK if options.quick else list(WORKLOADS))
    if left_out := [name for name in WORKLOADS if name not in chosen]:
        report.remark(f"left out of this run: {', '.join(left_out)}")
    for name in chosen:
        print(f"measuring {name} …", file=sys.stderr, flush=True)
        plan = _QUICK if options.quick else _FULL
        plan = replace(plan, launches=options.launches or plan.launches, rounds=options.rounds or plan.rounds)
        add_workload(report, name, plan)
        if options.json:  # what is measured is not lost if the run is ended
            report.write(options.json)
    report.remark("Not measured: a TensorBoard histogram of JAX at each step, for which JAX has no callback.")
    report.remark(
        "Keras' TensorBoard callback writes histograms of weights once an epoch (histogram_freq=1)."
    )
    report.finish(options.json)


if __name__ == "__main__":
    main()
